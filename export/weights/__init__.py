"""How the decoder's weights are stored: float32, float16, or on grids of 8 or 4 bits."""

from export.weights.grid import Grid
from export.weights.weights import Weights

__all__ = ["Grid", "Weights"]
