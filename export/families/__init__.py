"""One small adapter a model family: where its vision encoder and its decoder are. Hugging Face's code does the rest."""

from __future__ import annotations

from export.families.family import Family
from export.families.llava import LLAVA

FAMILIES: dict[str, Family] = {"llava": LLAVA}
"""Hugging Face's `model_type` -> how such a model is taken apart."""
