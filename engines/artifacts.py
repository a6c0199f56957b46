"""What lies in a bundle to be run: graphs, plans of them, libraries of kernels. numpy and the standard library only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype and static shape of a graph's input or output."""

    name: str
    dtype: str
    shape: list[int]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name} has dtype {self.dtype!r}, which is none of {', '.join(DTYPES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name} has a negative dimension: {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Graph:
    """One static-shape ONNX graph of the bundle.

    Attributes:
        operators: of domain `unicache`, and how many nodes of each.
    """

    kind: Literal["vision", "prefill", "decode", "extend", "compact"]
    file: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    operators: dict[str, int] = field(default_factory=dict)

    def expect(self, **shapes: list[int]) -> None:
        """Raise a `ValueError` unless these inputs or outputs are there with these shapes."""
        known = {spec.name: spec.shape for spec in (*self.inputs, *self.outputs)}
        for name, shape in shapes.items():
            if known.get(name) != shape:
                raise ValueError(f"{self.file}: {name} should be {shape}, and is {known.get(name, 'missing')}")


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan of one graph.

    Attributes:
        plugins: operators that run as plugin layers, and how many; the others run as their function bodies.
    """

    graph: str
    file: str
    backend: str
    version: str
    compute_capabilities: list[str]
    plugins: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Library:
    """Kernels of the operators that the bundle ships. Never loaded from there: see `engines.plugins.store`.

    Attributes:
        file: `libunicache_ort.so` for ONNX Runtime on a CPU, `libunicache_trt.so` for TensorRT.
        platform: system and machine that it was compiled for, for example `linux-aarch64`.
        architectures: instruction sets, or compute capabilities.
        operators: whose kernels it holds.
    """

    file: str
    platform: str
    architectures: list[str]
    operators: list[str]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"libunicache_[a-z]+\.so", self.file):
            raise ValueError(f"{self.file!r} is no name of a library")
