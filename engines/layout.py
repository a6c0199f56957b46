"""A size that pictures are brought to: what such a picture is in the vision graph, and in the prompt.

Standard library only: export writes it, the runtime reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


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


@dataclass(frozen=True)
class VideoStyle:
    """How a model sees a video: so many of its frames at once are one picture, and this is what a prompt has for them.

    Attributes:
        placeholder: what a chat template writes for a video.
        token: stands in a prompt as often as there are visual tokens; `token_id` is its id.
        frames: that are one picture: what the encoder's patches hold.
        start, end: around each picture's tokens.
        time: of each picture, told nowhere, `before` it (the mean of its frames') or `behind` it (the first frame's).
        ends: whether the frames that are taken go from the first to the last; else each begins a part of equal length.
    """

    placeholder: str
    token: str
    token_id: int
    frames: int
    start: str = ""
    end: str = ""
    time: Literal["nowhere", "before", "behind"] = "nowhere"
    ends: bool = False

    def __post_init__(self) -> None:
        if not self.placeholder or not self.token or self.frames < 1:
            raise ValueError(f"a style of videos needs a placeholder, a token and frames, got {self}")

    def text(self, tokens: int, times: Sequence[float]) -> str:
        """What takes the placeholder's place.

        Args:
            tokens: visual tokens of a picture.
            times: of the frames, in seconds; the last one is repeated where some are missing.
        """
        known, parts = [*times, *[times[-1]] * (-len(times) % self.frames)], []
        for first in range(0, len(known), self.frames):
            inside = f"{self.start}{self.token * tokens}{self.end}"
            if self.time == "before":
                inside = f"<{(known[first] + known[first + self.frames - 1]) / 2:.1f} seconds>{inside}"
            elif self.time == "behind":
                inside += str(int(known[first]))
            parts.append(inside)
        return "".join(parts)


def choose_layout(height: int, width: int, layouts: Sequence[Layout]) -> Layout:
    """The layout nearest to a picture in aspect ratio and area: its own size, if that is one of them.

    Near is by logarithms: half is as far as twice. The aspect ratio counts twice, since a picture that is stretched
    looks wrong, and one that is shrunk does not.
    """

    def distance(layout: Layout) -> float:
        tall, broad = math.log(height / layout.height), math.log(width / layout.width)
        return 2 * abs(tall - broad) + abs(tall + broad)

    return min(layouts, key=distance)
