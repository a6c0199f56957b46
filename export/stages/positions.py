"""Prompts longer than the model was trained for: RoPE with longer waves, NTK-aware (bloc97, 2023).

As YaRN states it (arXiv 2309.00071, section 3.1): base' = base · s^(d / (d - 2)), d the numbers that RoPE turns. The
wave of pair i of d/2 then is s^(2i / (d - 2)) times as long: the shortest stays, so that neighbours are told apart as
before, and the longest is stretched s times, so that no position lies beyond what the training has seen of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engines.errors import UserError
from export.stages.stage import Stage, twin


@dataclass(eq=False)
class Positions(Stage):
    """Positions stay whole numbers from 0; what they turn is changed. Every prompt pays for it, short ones too.

    Attributes:
        scale: s: how many times the positions of the training the model gets; 1: RoPE as it was trained.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.scale <= 1000:
            raise ValueError(f"scale must be from 1 to 1000, got {self.scale}")

    def stretch(self, language_model: nn.Module) -> nn.Module:
        """The decoder with stretched RoPE. The given one is not changed, and all weights are shared with it.

        Raises:
            UserError: its RoPE is not the plain one.
        """
        if self.scale == 1:
            return language_model
        rotary: Any = getattr(language_model, "rotary_emb", None)
        if (kind := getattr(rotary, "rope_type", None)) != "default":
            has = f"of type {kind!r}" if rotary is not None else "none that could be found"
            raise UserError(f"[positions] scale: needs RoPE of type 'default', this model's is {has}: leave it out")
        stretched: Any = twin(language_model)
        frequency = rotary.inv_freq.double()  # of d/2 pairs: base^(-2i / d)
        power = torch.arange(len(frequency)) / max(len(frequency) - 1, 1)
        stretched.rotary_emb.inv_freq = (frequency * self.scale**-power).float()
        return stretched


def turns_halves(language_model: Any, head_dim: int) -> bool:
    """Whether RoPE turns a whole head, number i of its first half with number i of the second: Llama's way.

    Of a model without weights, whose tables are on the `meta` device too, only the first half of that can be told.
    """
    rotary, one = language_model.rotary_emb, torch.ones(1, 1, dtype=torch.long)
    kinds = [[kind] for kind in getattr(rotary, "layer_types", [])] or [[]]
    tables = [rotary(torch.zeros(1), one, *kind)[0] for kind in kinds]
    whole = all(cos.shape[-1] == head_dim for cos in tables)
    return whole and all(cos.is_meta or torch.equal(*cos.chunk(2, dim=-1)) for cos in tables)
