"""Which weights of a model are quantized, and how: once, in the model, so that all that follows sees what is shipped.

Calibration, the guard and the check of every graph run on the quantized model; exporting then finds which constants lie
on a grid (`grid.py`) and stores them as such, without any further loss.

The decoder's linear layers take the bits that were asked for. The head and the embedding table take 8: an error in a
logit changes a token at once, and an embedding is read by one row a token, so that fewer bits gain no time. Where both
are one weight, they are one in the file too. Left alone: the vision encoder and its projector, which run once an
image, on inputs of a wider range; norms, biases and whatever is small.

In float16 are all of them, the vision encoder's too, and their products are computed in it (`float16.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engines.weights import Embedding, pack
from export.weights import float16, nbits
from export.weights.float16 import digest
from export.weights.grid import LEAST_GROUP, LEAST_SIZE, Grid
from export.weights.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import onnx_ir as ir
    from torch import Tensor

    from export.graphs import Decoder

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
GROUPS = {"int4": 32, "int8": 128}


@dataclass(frozen=True)
class Weights:
    """How weights are stored.

    Attributes:
        dtype: `float32`, `float16`, `int8` or `int4`.
        group: columns of a row that share a scale, at most; 0: as measured best.
        islands: digests of the weights whose products float16 does not hold: they stay float32.
    """

    dtype: str = "float32"
    group: int = 0
    islands: frozenset[str] = frozenset()

    @property
    def bits(self) -> int:
        """Of a quantized weight; 0: none is."""
        return {"int8": 8, "int4": 4}.get(self.dtype, 0)

    @property
    def layers(self) -> Grid:
        """Of the decoder's layers."""
        return Grid(self.bits, self.group or GROUPS[self.dtype])

    @property
    def table(self) -> Grid:
        """Of the head and the embedding table."""
        return Grid(8, self.group or GROUPS["int8"])

    @property
    def grids(self) -> list[Grid]:
        """What a weight may lie on, the coarsest first."""
        return list(dict.fromkeys([self.layers, self.table])) if self.bits else []

    def sparing(self, islands: Iterable[Any]) -> Weights:
        """The same, but for these modules."""
        return replace(self, islands=frozenset(digest(module.weight) for module in islands))

    def quantize(self, decoder: Decoder, embedding: Tensor | None = None, encoder: nn.Module | None = None) -> None:
        """Move the weights onto their grids, in place and one by one; those that lie there already stay as they are."""
        if self.dtype == "float16":
            owners = [owner for owner in (decoder.language_model, decoder.head, encoder) if owner is not None]
            for weight in [*(() if embedding is None else [embedding]), *(m.weight for m in products(*owners))]:
                if not (self.islands and digest(weight) in self.islands):
                    weight.data.copy_(weight.data.half())
        if not self.bits:
            return
        done = set()
        tables = [] if embedding is None else [embedding]
        all_of = [(self.table, weight) for weight in (*tables, *_linear(decoder.head))]
        all_of += [(self.layers, weight) for weight in _linear(decoder.language_model)]
        for grid, weight in all_of:
            if weight.data_ptr() not in done and weight.numel() >= LEAST_SIZE and weight.shape[1] >= LEAST_GROUP:
                done.add(weight.data_ptr())
                weight.data.copy_(grid.nearest(weight.data))

    def nearest(self, table: Tensor) -> Tensor:
        """An embedding table as it will be stored."""
        if self.dtype == "float16":
            return table.half().float()
        return self.table.nearest(table) if self.bits else table

    def pack(self, model: ir.Model, kept: Kept | None = None) -> None:
        """Store a graph's constants as what they were found to be."""
        kept = kept or Kept()
        if self.dtype == "float16":
            float16.halve(model, self.islands, kept)
        nbits.pack(model, self.grids, kept)

    def store(self, table: Tensor, add: Callable[[bytes], int]) -> Embedding:
        """Write the embedding table; `add` writes bytes and tells their offset."""
        found = self.table.find(table) if self.bits else None
        if found is None:
            halved = table.half()
            stored = halved if self.dtype == "float16" and torch.equal(halved.float(), table) else table
            array = stored.contiguous().numpy()
            return Embedding(add(array.tobytes()), str(array.dtype), list(array.shape))
        codes, scales = pack(found[0].numpy(), self.table.bits), found[1].numpy()
        group = self.table.group_of(table.shape[1])
        return Embedding(add(codes.tobytes()), "uint8", list(table.shape), add(scales.tobytes()), group)


def products(*owners: nn.Module) -> Iterator[Any]:
    """The modules that multiply by a weight."""
    return (m for owner in owners for m in owner.modules() if isinstance(m, PRODUCTS))


def _linear(module: nn.Module) -> Iterator[Tensor]:
    return (m.weight for m in module.modules() if isinstance(m, nn.Linear))
