"""How an image becomes `pixel_values`: the settings that export writes and the runtime applies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.config import parse, read_json

FILE = "preprocessor.json"
RESAMPLE = range(6)  # PIL: nearest, lanczos, bilinear, bicubic, box, hamming


@dataclass(frozen=True)
class ImagePreprocessor:
    """Resize, crop, rescale and normalise, in this order; the result is float32 [1, 3, H, W].

    Attributes:
        resize: `{"height", "width"}` (aspect ratio not kept), `{"shortest_edge"}` (kept), or None.
        resample: the filter, as PIL numbers it.
        crop: `{"height", "width"}` around the centre (padded with zeros where the image is smaller), or None.
        rescale: factor from 0..255 to the model's range, usually 1/255.
        mean, std: of each of the three channels, after rescaling.
    """

    resize: dict[str, int] | None
    resample: int
    crop: dict[str, int] | None
    rescale: float
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        if self.resize is not None and set(self.resize) not in ({"height", "width"}, {"shortest_edge"}):
            raise ValueError(f"resize must have height and width, or shortest_edge, got {sorted(self.resize)}")
        if self.crop is not None and set(self.crop) != {"height", "width"}:
            raise ValueError(f"crop must have height and width, got {sorted(self.crop)}")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and min(size.values()) < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        if self.resample not in RESAMPLE:
            raise ValueError(f"resample must be one of PIL's filters 0 to 5, got {self.resample}")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise ValueError(f"mean and std must have 3 numbers, got {len(self.mean)} and {len(self.std)}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """Height and width of what it makes of any picture; None where that depends on the picture."""
        size = self.crop or self.resize or {}
        return (size["height"], size["width"]) if "height" in size else None

    @classmethod
    def read(cls, folder: Path) -> ImagePreprocessor:
        """Read `preprocessor.json` of a bundle."""
        path = Path(folder) / FILE
        return parse(cls, read_json(path), str(path))

    def write(self, folder: Path) -> None:
        """Write `preprocessor.json` into a bundle's folder."""
        (Path(folder) / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")
