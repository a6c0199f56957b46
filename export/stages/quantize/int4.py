"""4 bits, symmetric: K per channel in groups of tokens, V per token in groups of channels (arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise, at_least_two


@dataclass(eq=False)
class Int4(Blockwise):
    """Keys have a scale for each channel of a group of tokens, values for a group of each token's channels.

    Compaction moves tokens from group to group, so that keys are rounded anew, by half a step of their new group at
    most. Values are not: their scales go with them.

    Attributes:
        group: tokens of a key's scale, channels of a value's.
    """

    group: int = 32
    method: Literal["int4"] = "int4"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_two("group", self.group)

    @property
    def keys(self) -> Blocks:
        return Blocks(4, tokens=self.group, channels=1, scales=self.scales)

    @property
    def values(self) -> Blocks:
        return Blocks(4, tokens=1, channels=self.group, scales=self.scales)
