"""How a picture becomes `pixel_values`: the settings that export writes and the runtime applies.

Every kind has a rule of its own for the size that a picture is brought to, and a way to cut what it has become. Sizes
are height and width.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil, floor, inf, sqrt
from pathlib import Path
from typing import Any, Literal

from engines.config import parse, read_json

FILE = "preprocessor.json"
RESAMPLE = range(6)  # PIL: nearest, lanczos, bilinear, bicubic, box, hamming
Size = tuple[int, int]


def eight_bits(image: Any) -> Any:
    """A PIL image of 16 bits a pixel in 8; any other as it is. Pillow would make white of all that is above 255.

    One of 32 bits (mode I: a TIFF file, an array) does not say which it holds. It is taken as 8 bits while no number is
    above 255, as by Pillow, and as 16 otherwise. What a PGM file says in mode I are 16 bits, however dark it is.

    Raises:
        ValueError: which of its numbers is black or white is not known.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    levels = image if image.mode == "F" else image.convert("I")  # Pillow finds no extrema of I;16B
    least, most = levels.getextrema()
    if image.mode == "F" or least < 0 or most > 65535:
        raise ValueError(f"pixels of mode {image.mode} from {least:g} to {most:g}: save it with 8 or 16 bits a pixel")
    sixteen = most > 255 or image.mode != "I" or image.format == "PPM"
    made = (levels.point(lambda level: level / 257 + 0.5) if sixteen else levels).convert("L")
    made.info.pop("transparency", None)  # a level of 16 bits; others would share what it becomes
    return made


class _Rule:
    def steps(self, height: int, width: int) -> list[Size]:
        """Sizes that a picture of this size is resized to, one after another."""
        raise NotImplementedError

    def target(self, height: int, width: int) -> Size:
        """The size that a picture of this size is brought to: that of its layout."""
        return (self.steps(height, width) or [(height, width)])[-1]


def _positive(kind: object, *names: str) -> None:
    for name in names:
        if (value := getattr(kind, name)) < 1:
            raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class Plain(_Rule):
    """Resized, then cropped (CLIP, SigLIP, PaliGemma, Gemma 3).

    Attributes:
        resize: `{"height", "width"}` (aspect ratio not kept), `{"shortest_edge"}` (kept), or None.
        crop: `{"height", "width"}` around the centre (padded with zeros where the picture is smaller), or None.
    """

    resize: dict[str, int] | None
    crop: dict[str, int] | None
    method: Literal["plain"] = "plain"

    def __post_init__(self) -> None:
        if self.resize is not None and set(self.resize) not in ({"height", "width"}, {"shortest_edge"}):
            raise ValueError(f"resize must have height and width, or shortest_edge, got {sorted(self.resize)}")
        if self.crop is not None and set(self.crop) != {"height", "width"}:
            raise ValueError(f"crop must have height and width, got {sorted(self.crop)}")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and min(size.values()) < 1:
                raise ValueError(f"{name} must be positive, got {size}")

    def steps(self, height: int, width: int) -> list[Size]:
        if self.resize is None:
            return []
        if edge := self.resize.get("shortest_edge"):
            long = int(edge * max(height, width) / min(height, width))
            return [(edge, long) if height <= width else (long, edge)]
        return [(self.resize["height"], self.resize["width"])]

    def target(self, height: int, width: int) -> Size:
        return (self.crop["height"], self.crop["width"]) if self.crop else super().target(height, width)


@dataclass(frozen=True)
class LongestEdge(_Rule):
    """Shrunk to fit, and both edges rounded up to whole patches (Pixtral, Mistral 3).

    Attributes:
        height, width: what it must fit into.
        multiple: of both edges.
    """

    height: int
    width: int
    multiple: int
    method: Literal["longest_edge"] = "longest_edge"

    def __post_init__(self) -> None:
        _positive(self, "height", "width", "multiple")

    def steps(self, height: int, width: int) -> list[Size]:
        if (ratio := max(height / self.height, width / self.width)) > 1:
            height, width = max(1, floor(height / ratio)), max(1, floor(width / ratio))
        return [(-(-height // self.multiple) * self.multiple, -(-width // self.multiple) * self.multiple)]


@dataclass(frozen=True)
class Patches(_Rule):
    """Cut into flat patches, those that are merged beside each other (Qwen2-VL, 2.5 and 3, GLM-4V).

    Attributes:
        patch: edge of a patch.
        merge: patches along the edge of what becomes one token.
        temporal: frames in a patch; a picture is all of them.
        least, most: pixels of a picture.
        clip: these are the pixels of `temporal` frames, and what is smaller than a token is first enlarged (GLM-4V).
    """

    patch: int
    merge: int
    temporal: int
    least: int
    most: int
    clip: bool = False
    method: Literal["patches"] = "patches"

    def __post_init__(self) -> None:
        _positive(self, "patch", "merge", "temporal", "least")
        if self.most < self.least:
            raise ValueError(f"most must be at least {self.least} pixels, got {self.most}")

    def steps(self, height: int, width: int) -> list[Size]:
        """What is over 200 times as long as wide, which Hugging Face refuses, keeps its size and gets no layout."""
        edge, frames = self.patch * self.merge, self.temporal if self.clip else 1
        if self.clip and min(height, width) < edge:
            scale = max(edge / height, edge / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            return [(height, width)]
        rounded = round(height / edge) * edge, round(width / edge) * edge
        if frames * rounded[0] * rounded[1] > self.most:
            shrink = sqrt(frames * height * width / self.most)
            return [(max(edge, floor(height / shrink / edge) * edge), max(edge, floor(width / shrink / edge) * edge))]
        if frames * rounded[0] * rounded[1] < self.least:
            grow = sqrt(self.least / (frames * height * width))
            return [(ceil(height * grow / edge) * edge, ceil(width * grow / edge) * edge)]
        return [rounded]


@dataclass(frozen=True)
class Grid(_Rule):
    """As many tiles as come nearest to its aspect ratio, and the whole behind them (InternVL, GOT-OCR2, Aya Vision).

    Attributes:
        height, width: of a tile.
        least, most: tiles.
    """

    height: int
    width: int
    least: int
    most: int
    method: Literal["grid"] = "grid"

    def __post_init__(self) -> None:
        _positive(self, "height", "width", "least")
        if self.most < self.least:
            raise ValueError(f"most must be at least {self.least} tiles, got {self.most}")

    @property
    def tile(self) -> Size:
        return self.height, self.width

    def steps(self, height: int, width: int) -> list[Size]:
        """Of grids that are as near, the one with more tiles, unless the picture would be more than doubled."""
        sides = range(1, self.most + 1)
        grids = [(rows, columns) for columns in sides for rows in sides if self.least <= rows * columns <= self.most]
        best, nearest = (1, 1), inf
        for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            apart = abs(width / height - columns / rows)
            enough = height * width > 0.5 * self.height * self.width * rows * columns
            if apart < nearest or (apart == nearest and enough):
                best, nearest = (rows, columns), apart
        return [(best[0] * self.height, best[1] * self.width)]


@dataclass(frozen=True)
class Split(_Rule):
    """Resized by its longest edge, then to whole tiles; the whole, shrunk to one, is the last (Idefics3, SmolVLM).

    Attributes:
        longest: edge that it is resized to first.
        edge: of a tile.
        split: False: the whole alone.
    """

    longest: int
    edge: int
    split: bool = True
    method: Literal["split"] = "split"
    LIMIT = 4096  # of the longest edge

    def __post_init__(self) -> None:
        _positive(self, "longest", "edge")

    @property
    def tile(self) -> Size:
        return self.edge, self.edge

    def steps(self, height: int, width: int) -> list[Size]:
        first = self._to_longest(height, width)
        return [first, self._to_tiles(*first) if self.split else self.tile]

    def _to_longest(self, height: int, width: int) -> Size:
        ratio = width / height
        if width >= height:
            height, width = int(self.longest / ratio), self.longest
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        if max(height, width) > self.LIMIT:
            ratio = width / height
            wide = width >= height
            height, width = (int(self.LIMIT / ratio), self.LIMIT) if wide else (self.LIMIT, int(self.LIMIT * ratio))
        return max(height, 1), max(width, 1)

    def _to_tiles(self, height: int, width: int) -> Size:
        ratio = width / height
        if width >= height:
            width = ceil(width / self.edge) * self.edge
            height = max(1, int(width / ratio))
        else:
            height = ceil(height / self.edge) * self.edge
            width = max(1, int(height * ratio))
        return ceil(height / self.edge) * self.edge, ceil(width / self.edge) * self.edge


@dataclass(frozen=True)
class AnyRes(_Rule):
    """The whole, shrunk to a tile, and the tiles of the resolution that it fits best, padded (LLaVA-NeXT, OneVision).

    Attributes:
        edge: of a tile.
        resolutions: heights and widths to choose from.
    """

    edge: int
    resolutions: list[list[int]]
    method: Literal["anyres"] = "anyres"

    def __post_init__(self) -> None:
        _positive(self, "edge")
        for size in self.resolutions:
            if len(size) != 2 or min(size) < 1 or size[0] % self.edge or size[1] % self.edge:
                raise ValueError(f"resolutions must be heights and widths in tiles of {self.edge}, got {size}")
        if not self.resolutions:
            raise ValueError("resolutions must hold at least one")

    @property
    def tile(self) -> Size:
        return self.edge, self.edge

    def canvas(self, height: int, width: int) -> Size:
        """The resolution that keeps most of the picture; of equals the smallest, and of those the first."""

        def kept_and_wasted(size: list[int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return -kept, size[0] * size[1] - kept

        best = min(self.resolutions, key=kept_and_wasted)
        return best[0], best[1]

    def steps(self, height: int, width: int) -> list[Size]:
        return [fitted(height, width, self.canvas(height, width))]


def fitted(height: int, width: int, into: Size) -> Size:
    """The largest size of the same aspect ratio, as far as whole pixels allow it."""
    by_height, by_width = into[0] / height, into[1] / width
    if by_width < by_height:
        return min(ceil(height * by_width), into[0]), into[1]
    return into[0], min(ceil(width * by_height), into[1])


Kind = Plain | LongestEdge | Patches | Grid | Split | AnyRes


@dataclass(frozen=True)
class ImagePreprocessor:
    """A picture is brought to a size and cut, rescaled and normalised; the result is float32.

    Attributes:
        kind: which size it is brought to, and what is cut from it.
        resample: the filter, as PIL numbers it.
        rescale: factor from 0..255 to the model's range, usually 1/255.
        mean, std: of each of the three channels, after rescaling.
    """

    kind: Kind
    resample: int
    rescale: float
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        if self.resample not in RESAMPLE:
            raise ValueError(f"resample must be one of PIL's filters 0 to 5, got {self.resample}")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise ValueError(f"mean and std must have 3 numbers, got {len(self.mean)} and {len(self.std)}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")

    @property
    def fixed_size(self) -> Size | None:
        """Height and width of what it makes of any picture; None where that depends on the picture."""
        size = (self.kind.crop or self.kind.resize or {}) if isinstance(self.kind, Plain) else {}
        return (size["height"], size["width"]) if "height" in size else None

    @classmethod
    def read(cls, folder: Path) -> ImagePreprocessor:
        """Read `preprocessor.json` of a bundle."""
        path = Path(folder) / FILE
        return parse(cls, read_json(path), str(path))

    def write(self, folder: Path) -> None:
        """Write `preprocessor.json` into a bundle's folder."""
        (Path(folder) / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")
