"""The small interface behind which ONNX Runtime and TensorRT look alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from engines.cuda import Array

Tensors = dict[str, tuple[np.dtype, tuple[int, ...]]]  # name -> dtype and shape


class Session(Protocol):
    """One loaded static-shape graph.

    Attributes:
        inputs, outputs: as the graph declares them.
    """

    inputs: Tensors
    outputs: Tensors

    @property
    def provider(self) -> str:
        """What really runs it, for example "CPUExecutionProvider"."""
        ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Run the graph once; every input by name in, every output by name out, on the host if it is wanted there."""
        ...


def check_feeds(title: str, inputs: Tensors, feeds: Mapping[str, Array]) -> None:
    """Raise a `ValueError` unless a graph gets what it declares."""
    if feeds.keys() != inputs.keys():
        missing, unknown = sorted(inputs.keys() - feeds.keys()), sorted(feeds.keys() - inputs.keys())
        raise ValueError(f"{title}: inputs missing: {missing}, unknown: {unknown}")
    for name, (dtype, shape) in inputs.items():
        array = feeds[name]
        if array.dtype != dtype or array.shape != shape:
            got = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{title}: input {name!r} must be {dtype} {list(shape)}, got {got}")


@dataclass(frozen=True)
class Status:
    """Whether a backend can run a bundle here, and why not if it cannot."""

    name: str
    available: bool
    reason: str
