"""How a bundle stores weights: their dtypes, the embedding table, and the layout of quantized ones.

Quantized weights lie in `weights.bin` as rows of codes, and one scale a block of consecutive columns.

    weight[n, k] = (code[n, k] - 2 ** (bits - 1)) * scale[n, k // group]

The layout is that of ONNX Runtime's MatMulNBits: codes are uint8 [rows, blocks, group * bits / 8], the earlier of two
4-bit codes in the lower half of its byte; the last block is filled up where `group` does not divide a row.
numpy and the standard library only: export writes it, the runtime reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engines.guard import Guarded


def pack(values: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Signed values [rows, blocks, group] -> codes as they are stored."""
    codes = (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    return codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """The signed values, [rows, blocks, group]."""
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return (codes.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


@dataclass(frozen=True)
class Table:
    """A quantized table whose rows are computed when they are asked for, in float32: `table[ids]` as of an array."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.width

    def __getitem__(self, index: int | NDArray[np.int64]) -> NDArray[np.float32]:
        values = unpack(self.codes[index], self.bits) * np.asarray(self.scales[index])[..., None]
        return values.reshape(*values.shape[:-2], -1)[..., : self.width]


@dataclass(frozen=True)
class Embedding:
    """Where the token embedding table lies in `weights.bin`; [vocab_size, hidden_size].

    Attributes:
        dtype: `uint8`: 8-bit codes, as above.
        scales: offset of their scales, float32; `group`: columns that share one.
    """

    offset: int
    dtype: str
    shape: list[int]
    scales: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "uint8"):
            raise ValueError(f"embedding has dtype {self.dtype!r}")
        if min(self.offset, self.scales) < 0 or len(self.shape) != 2 or min(self.shape) < 0:
            raise ValueError(f"embedding must have offsets and two dimensions, got {self}")
        if (self.dtype == "uint8") != (self.group > 0):
            raise ValueError(f"codes, and nothing else, have groups that share a scale, got {self}")

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return -(-self.shape[1] // self.group) if self.group else 0

    @property
    def nbytes(self) -> int:
        """Of the table, without its scales."""
        width = self.blocks * self.group or self.shape[1]
        return self.shape[0] * width * np.dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        """Offset of the first byte behind the table and its scales."""
        return max(self.offset + self.nbytes, self.scales + self.shape[0] * self.blocks * 4)


@dataclass(frozen=True)
class StoredWeights:
    """How the weights are stored.

    Attributes:
        dtype: of the decoder's layers: float32, float16, int8 or int4.
        group: columns of a row that share a scale, at most; 0: they have none.
        parameters: of the whole model.
        guard: what they cost on held-out samples, beside float32 and before any level.
        islands: with float16, modules that stay float32, and why.
    """

    dtype: Literal["float32", "float16", "int8", "int4"] = "float32"
    group: int = 0
    parameters: int = 0
    guard: Guarded = field(default_factory=lambda: Guarded(note="as they were"))
    islands: dict[str, str] = field(default_factory=dict)

    def line(self, size: int) -> str:
        """For a person to read, `size` bytes in all."""
        grid = f" in groups of {self.group}, head and embedding table int8" if self.group else ""
        share = f", {size / (4 * self.parameters):.2f} of float32" if self.parameters else ""
        islands = f" but for {len(self.islands)} products that stay float32" if self.islands else ""
        return f"{self.dtype}{grid}{islands}; {size / 2**20:.1f} MiB{share}; {self.guard.line}"
