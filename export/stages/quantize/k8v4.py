"""K in 8 bits, V in 4: keys decide where attention looks and bear less noise (KVTuner, arXiv 2502.04420)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise, at_least_two


@dataclass(eq=False)
class K8V4(Blockwise):
    """Keys as in `int8`, with a calibrated scale a channel; values as in `int4`. Compaction adds no noise.

    Attributes:
        group: channels of a value's scale.
    """

    group: int = 32
    method: Literal["k8v4"] = "k8v4"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_two("group", self.group)

    @property
    def keys(self) -> Blocks:
        return Blocks(8, tokens=None, channels=1)

    @property
    def values(self) -> Blocks:
        return Blocks(4, tokens=1, channels=self.group, scales=self.scales)
