"""One small adapter a model family: where its vision encoder and its decoder are. Hugging Face's code does the rest."""

from __future__ import annotations

from functools import partial

from export.families.family import Family, decoder
from export.families.features import Mistral3, Tiles, features, llava, packed
from export.families.patches import Patches, Windows
from export.families.text import TEXT

FAMILIES: dict[str, Family] = {
    "aya_vision": Family(features, decoder),
    "gemma3": Family(features, partial(decoder, block="image")),
    "glm4v": Family(Patches, decoder),
    "got_ocr2": Family(features, decoder),
    "idefics3": Family(Tiles, decoder),
    "internvl": Family(features, decoder),
    "llama": TEXT,
    "llava": Family(llava, decoder),
    "llava_next": Family(packed, decoder),
    "llava_onevision": Family(packed, decoder),
    "mistral": TEXT,
    "mistral3": Family(Mistral3, decoder),
    "paligemma": Family(features, partial(decoder, block="prompt", first_position=1)),
    "qwen2": TEXT,
    "qwen2_5_vl": Family(Windows, decoder),
    "qwen2_vl": Family(Patches, decoder),
    "qwen3": TEXT,
    "qwen3_vl": Family(Patches, decoder),
    "smolvlm": Family(Tiles, decoder),
}
"""Hugging Face's `model_type` -> how such a model is taken apart."""

STATE = "which keep a state that is no KV cache"
MISSING: dict[str, str] = {
    "florence2": "a decoder that reads what an encoder of text gives (cross-attention)",
    "lfm2_vl": f"layers that convolve, {STATE}",
    "mllama": "layers that read the image by cross-attention",
    "qwen3_5": f"layers of linear attention, {STATE}",
}
"""`model_type` -> what such a model has that is not supported."""
