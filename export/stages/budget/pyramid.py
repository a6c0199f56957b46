"""More slots where attention is spread out: PyramidKV (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.budget.budget import PROPORTIONS, Budget, check_per_layer


@dataclass(eq=False)
class Pyramid(Budget):
    """A straight line from the first to the last layer, or in proportion to each layer's attention entropy.

    PyramidKV gives the last of L layers b_last = mean / β and the first b_first = 2 · mean - b_last; between them
    layer l gets b_first - (b_first - b_last) · l / (L - 1). VL-Cache (arXiv 2410.23317) measures what the line assumes:
    the less sparse a layer's attention, the more it keeps.

    Attributes:
        ratio: β of the paper: the mean layer's slots to the last one's. 1 is uniform; below it deep layers keep more.
        entropy: of each layer's attention as calibrated, H = -Σ a log a; when given, it takes the line's place.
        measure: whether a build measures `entropy` on the samples; until then the line holds.
    """

    ratio: float = 20.0
    entropy: list[float] | None = None
    measure: bool = False
    method: Literal["pyramid"] = "pyramid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.ratio <= PROPORTIONS[1]:
            most = f"{PROPORTIONS[1]:g}"
            raise ValueError(f"ratio must be above 0.5 and at most {most}, got {self.ratio}")

    @property
    def needs_entropy(self) -> bool:  # type: ignore[override]
        return self.measure and self.entropy is None

    def profile(self, layers: int) -> list[float]:
        if self.entropy is not None:
            return check_per_layer("entropy", self.entropy, layers)
        if layers == 1:
            return [1.0]
        last = 1 / self.ratio
        first = 2 - last
        return [first + (last - first) * layer / (layers - 1) for layer in range(layers)]
