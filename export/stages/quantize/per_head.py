"""8 bits with one static scale a head; rotated as in QuaRot (arXiv 2404.00456), where a channel is an outlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise


@dataclass(eq=False)
class PerHead(Blockwise):
    """Keys and values have one calibrated scale a head: nothing but codes is stored, and compaction adds no noise.

    A head's largest channel sets the step of all the others: `rotate` helps.
    """

    method: Literal["per-head"] = "per-head"

    @property
    def keys(self) -> Blocks:
        return Blocks(8, tokens=None, channels=None)

    @property
    def values(self) -> Blocks:
        return Blocks(8, tokens=None, channels=None)
