"""8 bits with static keys: K per channel, V per token (KIVI's axes, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise


@dataclass(eq=False)
class Int8(Blockwise):
    """Keys have a calibrated scale a channel, values one a token.

    Quantizing a restored row again gives the same integers: compaction adds no noise however often it runs.
    """

    method: Literal["int8"] = "int8"

    @property
    def keys(self) -> Blocks:
        return Blocks(8, tokens=None, channels=1)

    @property
    def values(self) -> Blocks:
        return Blocks(8, tokens=1, channels=None, scales=self.scales)
