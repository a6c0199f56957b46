"""How a Hugging Face model counts its position ids."""

from __future__ import annotations

from typing import Any

from engines.errors import UserError
from engines.mrope import MRope

FAMILIES = {  # model type -> whether the frames of a video stand apart
    "qwen2_vl": False,
    "qwen2_5_vl": False,
    "qwen3_vl": True,
    "glm4v": True,
}


def mrope_of(config: Any) -> MRope | None:
    """The rule of a model; None where a token has one position."""
    if config.model_type not in FAMILIES:
        return None
    text, vision = config.get_text_config(), config.vision_config
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise UserError(f"{config.model_type} with sliding windows is not supported: their reach is not told in time")
    speed = getattr(vision, "tokens_per_second", None)
    return MRope(vision.spatial_merge_size, None if speed is None else float(speed), FAMILIES[config.model_type])
