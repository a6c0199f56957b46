"""A store of floating-point rows: nothing is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from export.stages.quantize.quantize import ROWS, Quantize, Specs
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Float(Quantize):
    """Base of the two: the rows as they are, in the dtype that the method is named after."""

    center: bool = False
    method: str = "float32"

    @property
    def by_row(self) -> bool:
        return True

    def specs(self, heads: list[int], slots: int, head_dim: int) -> Specs:
        return {name: (self.method, [*heads, slots, head_dim]) for name in ROWS}

    def quantize(self, kept: Tokens) -> dict[str, Tensor]:
        dtype = getattr(torch, self.method)
        return {"key_store": kept.key.to(dtype), "value_store": kept.value.to(dtype)}

    def restore(self, store: dict[str, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        return store["key_store"].float(), store["value_store"].float()


@dataclass(eq=False)
class Float16(Float):
    """Half precision: the reference of sizes."""

    method: Literal["float16"] = "float16"


@dataclass(eq=False)
class Float32(Float):
    """Single precision: the reference of accuracy."""

    method: Literal["float32"] = "float32"
