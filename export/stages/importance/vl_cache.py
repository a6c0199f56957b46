"""Importance by the question alone: VL-Cache (arXiv 2410.23317)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from export.stages.importance.importance import Observation, Windowed, group_mean
from export.stages.tokens import VISUAL, Tokens


@dataclass(eq=False)
class VLCache(Windowed):
    """SnapKV whose observers are the post-vision queries: those of the window that follow the last visual token.

    Visual tokens look at the image around them, whatever is asked: they would make every patch important. A prompt that
    ends with an image has no post-vision query; there the whole window observes.
    """

    method: Literal["vl-cache"] = "vl-cache"

    def observe(self, seen: Observation) -> Tensor:
        queries, tokens = seen.visible.shape[1:]
        order = torch.arange(tokens)
        newest = torch.where(seen.kinds == VISUAL, order, -1).amax(dim=1, keepdim=True)
        seen = seen.only(order[tokens - queries :] > newest)
        return seen.averaged(group_mean(seen.attention))

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return self.smoothed(tokens)
