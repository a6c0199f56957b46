"""The small interface behind which ONNX Runtime and TensorRT look alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Session(Protocol):
    """One loaded static-shape graph."""

    provider: str  # what really runs it, for example "CPUExecutionProvider"

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the graph once; every input by name in, every output by name out."""
        ...


@dataclass(frozen=True)
class Status:
    """Whether a backend can run a bundle here, and why not if it cannot."""

    name: str
    available: bool
    reason: str
