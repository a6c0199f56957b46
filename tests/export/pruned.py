"""Hugging Face's answer to a prompt of which some visual tokens were dropped.

Its own model reads the whole prompt, and nobody may look at what was dropped: what is left is what it would be if that
had never been there, at the positions that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.recipe import PRESETS

LEVEL, KEEP = "half", 0.5


def recipe(folder: Path) -> Path:
    """Of the level: `off`, but for the visual tokens that it drops."""
    path = folder / f"{LEVEL}.toml"
    path.write_text((PRESETS / "off.toml").read_text() + f"\n[perception]\nkeep = {KEEP}\n")
    return path


def check(patches: Sequence[Sequence[float]]) -> None:
    """As many of each picture are kept as the recipe says; by fewer heads where some layers look back less far."""
    for picture in patches:
        assert sum(share > 0 for share in picture) == round(KEEP * len(picture))


def answered(
    model: Any, inputs: Mapping[str, Tensor], patches: Sequence[Sequence[float]], steps: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the logarithm of each one's probability.

    Args:
        inputs: as the family's processor makes them, of the whole prompt.
        patches: as in the runtime's `Stats`.
    """
    taken = {key: inputs[key] for key in signature(model.forward).parameters if key in inputs}
    ids = taken["input_ids"]
    visual = torch.isin(ids, torch.tensor([model.config.image_token_id, getattr(model.config, "video_token_id", -1)]))
    taken["attention_mask"] = torch.ones_like(ids)
    position: Tensor | None = None
    if counts := getattr(model.model, "get_rope_index", None):  # else it counts them by their places, as it should
        known = {key: inputs[key] for key in signature(counts).parameters if key in inputs}
        taken["position_ids"] = counts(**{**known, "attention_mask": taken["attention_mask"]})[0]
        position = taken["position_ids"].amax(dim=(0, 2), keepdim=True).expand(3, -1, -1)
    dropped = torch.tensor([share == 0 for picture in patches for share in picture])
    taken["attention_mask"][visual] -= dropped.long()
    tokens, told, seen = [], [], taken["attention_mask"]
    with torch.no_grad():
        out = model(**taken, use_cache=True)
        for step in range(1, steps + 1):
            likely = out.logits[0, -1].log_softmax(dim=-1)
            tokens.append(int(likely.argmax()))
            told.append(float(likely.max()))
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            turned = {} if position is None else {"position_ids": position + step}
            past = {"attention_mask": seen, "cache": out.past_key_values, "use_cache": True}
            out = model(input_ids=torch.tensor([tokens[-1:]]), **past, **turned)
    return tokens, told
