"""Families with one rotary position, from a checkpoint to an answer: what the runtime says, Hugging Face says.

Of all visual tokens, and of those that a level keeps.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig, GotOcr2Processor

import runtime
from engines.errors import UserError
from export import build
from runtime.sampling import Sampling
from tests.export import processors, pruned, zoo

STEPS, BUCKET = 24, "96"
SIZES = {  # of the picture, which are its layout's
    "llava": (56, 56),
    "llava_pixtral": (56, 84),
    "mistral3": (56, 84),
    "llava_next": (56, 100),
    "llava_onevision": (112, 90),
    "idefics3": (112, 56),
    "internvl": (56, 112),
    "got_ocr2": (128, 128),
    "aya_vision": (112, 112),
    "paligemma": (56, 56),
    "paligemma2": (56, 56),
    "gemma3": (56, 56),
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LAYERS: dict[str, Any] = dict.fromkeys(("aya_vision", "paligemma2", "gemma3"), MIXED)
QUESTION = "what is in the image ?"


def inputs_of(name: str, picture: Image.Image) -> dict[str, torch.Tensor]:
    """By the family's processor."""
    processor = processors.make(name)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return dict(processor(images=[picture], text=[text], return_tensors="pt"))


def answered(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[float]]:
    """By Hugging Face: greedy tokens, and the logarithm of each one's probability."""
    taken = {key: inputs[key] for key in signature(model.forward).parameters if key in inputs}
    model.generation_config.eos_token_id = None
    greedy = GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        out = model.generate(**taken, generation_config=greedy)
    tokens = out.sequences[0, taken["input_ids"].shape[1] :]
    told = torch.cat(out.logits).log_softmax(dim=-1).gather(1, tokens[:, None])
    return tokens.tolist(), told[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_bundle_answers_as_hugging_face(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GotOcr2Processor, "num_image_tokens", 4)  # 256 for the real encoder, and in no settings
    folder, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    height, width = SIZES[name]
    model = zoo.model(name, num_hidden_layers=2, **LAYERS.get(name, {}))
    model.save_pretrained(folder)
    processors.save(name, folder)
    levels = ["--recipe", "off", "--recipe", str(pruned.recipe(tmp_path))]
    once = [*levels, "--guard", "off", "--no-report", "--kernels", "never", "--buckets", BUCKET]
    options = [*once, "--image-sizes", f"{height}x{width}"]
    assert build.main([str(folder), "--out", str(bundle), *options]) == 0
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8))
    inputs = inputs_of(name, picture)
    asked: dict[str, Any] = {"ignore_eos": True, "sampling": Sampling(logprobs=0)}
    for level in ("off", pruned.LEVEL):
        vlm = runtime.open(bundle, level=level, threads=1)
        got = vlm.generate(QUESTION, [picture], STEPS, **asked)
        if level == pruned.LEVEL:
            pruned.check(got.stats.patches)
            tokens, told = pruned.answered(model, inputs, got.stats.patches, STEPS)
        else:
            tokens, told = answered(model, inputs)
        assert got.tokens == tokens
        np.testing.assert_allclose([each.logprob for each in got.logprobs], told, atol=1e-3)
    if name == "paligemma2":
        with pytest.raises(UserError, match="in both directions"):
            vlm.generate(QUESTION, [picture], 1, question_later=True)
