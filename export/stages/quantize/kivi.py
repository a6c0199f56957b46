"""2 to 4 bits, asymmetric: KIVI (arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise, at_least_two


@dataclass(eq=False)
class Kivi(Blockwise):
    """Keys per channel in groups of tokens, values per token in groups of channels, each with its smallest number.

    The paper's full-precision residual is this project's window. As with `int4`, compaction rounds keys anew.

    Attributes:
        bits: of a code: 2, 3 or 4.
        group: tokens of a key's scale, channels of a value's.
    """

    bits: Literal[2, 3, 4] = 2
    group: int = 32
    method: Literal["kivi"] = "kivi"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_two("group", self.group)

    @property
    def keys(self) -> Blocks:
        return Blocks(self.bits, tokens=self.group, channels=1, offset=True, scales=self.scales)

    @property
    def values(self) -> Blocks:
        return Blocks(self.bits, tokens=1, channels=self.group, offset=True, scales=self.scales)
