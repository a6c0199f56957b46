"""2 to 4 bits of rotated rows: TurboQuant (arXiv 2504.19874), with levels at equal distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise, at_least_two


@dataclass(eq=False)
class TurboQuant(Blockwise):
    """Rotated rows look normal whatever they were: the best step follows from their norm, and nothing else is stored.

    One scale for a group of a token's channels, and no smallest number: half of what `kivi` stores beside the codes.
    Nothing but the centres is calibrated. (The paper's rotation is random and its levels are not equidistant, which for
    normal numbers saves 1 % of the squared error at 2 bits and 8 % at 3.)

    Scales go with their tokens. Where dropped tokens are merged into kept ones, compaction quantizes anew, which adds
    next to no noise to rows that are nearly normal, as rotation makes them. Of a row of few large numbers, which an
    odd head_dim leaves unrotated, every such compaction finds another step.

    Attributes:
        bits: of a code: 2, 3 or 4.
        group: channels of a scale.
    """

    rotate: bool = True
    bits: Literal[2, 3, 4] = 3
    group: int = 128
    method: Literal["turboquant"] = "turboquant"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_two("group", self.group)

    @property
    def keys(self) -> Blocks:
        return Blocks(self.bits, tokens=1, channels=self.group, normal=True, scales=self.scales)

    @property
    def values(self) -> Blocks:
        return Blocks(self.bits, tokens=1, channels=self.group, normal=True, scales=self.scales)
