"""Every layer sees the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.shorten.shorten import Shorten


@dataclass(eq=False)
class Whole(Shorten):
    """Nothing is shortened."""

    method: Literal["none"] = "none"
