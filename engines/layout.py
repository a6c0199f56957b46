"""A size that pictures are brought to: what such a picture is in the vision graph, and in the prompt.

Standard library only: export writes it, the runtime reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """One size of pictures.

    Attributes:
        name: `HEIGHTxWIDTH`.
        height, width: of the picture once it is resized, before tiles or patches are cut from it.
        pixel_values: shape that the vision graph takes: what Hugging Face's image processor makes of one such picture.
        text: what takes the placeholder's place in a prompt.
        tokens: N, visual tokens of the picture, which is how often `text` holds the image token.
        grid: patches of a model with M-RoPE, [time, height, width], before any are merged; of others empty.
    """

    name: str
    height: int
    width: int
    pixel_values: list[int]
    text: str
    tokens: int
    grid: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.name != f"{self.height}x{self.width}":
            raise ValueError(f"a layout of {self.height} x {self.width} must bear that name, got {self.name!r}")
        if min(self.height, self.width, self.tokens) < 1 or not self.text:
            raise ValueError(f"layout {self.name} needs a size, a text and at least one token")
        if not self.pixel_values or min(self.pixel_values) < 1:
            raise ValueError(f"layout {self.name} has pixel_values of the shape {self.pixel_values}")
        if len(self.grid) not in (0, 3) or min(self.grid, default=1) < 1:
            raise ValueError(f"layout {self.name} has a grid of {self.grid}, and needs [time, height, width] or none")


def choose_layout(height: int, width: int, layouts: Sequence[Layout]) -> Layout:
    """The layout nearest to a picture in aspect ratio and area: its own size, if that is one of them.

    Near is by logarithms: half is as far as twice. The aspect ratio counts twice, since a picture that is stretched
    looks wrong, and one that is shrunk does not.
    """

    def distance(layout: Layout) -> float:
        tall, broad = math.log(height / layout.height), math.log(width / layout.width)
        return 2 * abs(tall - broad) + abs(tall + broad)

    return min(layouts, key=distance)
