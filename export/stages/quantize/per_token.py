"""8 or 4 bits with a scale for groups of every token's channels: FlexGen (arXiv 2303.06865)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise, at_least_two


@dataclass(eq=False)
class PerToken(Blockwise):
    """Keys and values alike. Nothing but the centres is calibrated, and the scales go with their tokens.

    Attributes:
        bits: of a code: 8 or 4.
        group: channels of a scale.
    """

    bits: Literal[8, 4] = 8
    group: int = 32
    method: Literal["per-token"] = "per-token"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_two("group", self.group)

    @property
    def keys(self) -> Blocks:
        return Blocks(self.bits, tokens=1, channels=self.group, scales=self.scales)

    @property
    def values(self) -> Blocks:
        return Blocks(self.bits, tokens=1, channels=self.group, scales=self.scales)
