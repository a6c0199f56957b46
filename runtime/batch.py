"""Requests of one bucket that are decoded at once: the rows of one batch of states.

Only decode knows of the batch. A row is a contiguous part of every tensor, so that all other graphs, and decode for one
request alone, take it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from engines.cuda import Array
from runtime.memory import Need, Reservation
from runtime.state import REPLACES, Context, Read

if TYPE_CHECKING:
    from engines.bundle import Bucket
    from runtime.model import VLM


class Row(MutableMapping[str, Array]):
    """The arrays of a `State` that lies in a row of a batch: what is put here is copied there."""

    def __init__(self, arrays: dict[str, Array], row: int) -> None:
        self._arrays, self._row = arrays, slice(row, row + 1)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name][self._row]

    def __setitem__(self, name: str, array: Array) -> None:
        self._arrays[name][self._row] = array

    def __delitem__(self, name: str) -> None:
        raise TypeError("a row has the tensors of its batch")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Batch:
    """A bucket's requests that are answered now. Memory is taken when two of them are decoded together first.

    A free row holds zeros, or what was left in it. It is computed with the others, and none of them sees it.
    """

    def __init__(self, vlm: VLM, bucket: Bucket) -> None:
        self._vlm, self._bucket = vlm, bucket
        self._arrays: dict[str, Array] = {}
        self._rows: list[Context | None] = [None] * bucket.batch
        self._reserved: Reservation | None = None

    @property
    def nbytes(self) -> int:
        """What is allocated: nothing yet, or `Manifest.batch_bytes` of the bucket."""
        return sum(array.nbytes for array in self._arrays.values())

    def read(self, reads: Sequence[Read]) -> None:
        """Read a token of every request that is answered here, in one step; those not among them have left.

        A single one is left to the request itself, which costs less; so is one for which there is no row. What the step
        takes counts for each request.
        """
        if len(reads) == 1:
            return
        self._seat([read.context for read in reads])
        reads = [read for read in reads if read.context in self._rows]
        if not reads:
            return
        embedding = np.zeros((len(self._rows), 1, self._vlm.model.hidden_size), np.float32)
        position = np.zeros((len(self._rows), 1), np.int32)
        rows = [self._rows.index(read.context) for read in reads]
        for row, read in zip(rows, reads, strict=True):
            embedding[row], position[row] = read.embedding, read.position + read.context.shift
        decode = self._vlm.session(self._bucket.batched, reads[0].stats)
        feeds: dict[str, Array] = {"embedding": embedding, "position": position, **self._arrays}
        with ExitStack() as clocks:
            for read in reads:
                clocks.enter_context(read.stats.time("decode"))
            outputs = decode.run({name: feeds[name] for name in decode.inputs})
        for name in list(outputs):
            if (replaced := name.removeprefix(REPLACES)) in self._arrays:
                self._arrays[replaced] = outputs.pop(name)
        for row, read in zip(rows, reads, strict=True):
            own = {name: array[row : row + 1] for name, array in outputs.items()}
            read.context.state.write(own, np.array([read.position]), np.array([read.kind]))
            read.context.logits, read.stats.provider, read.done = own["logits"], decode.provider, True

    def _seat(self, contexts: list[Context]) -> None:
        """Free the rows of those that have left, and move those that are new into free ones."""
        if self._rows and not self._arrays:
            self._open()
        self._rows = [context if context in contexts else None for context in self._rows]
        for context in contexts:
            if context not in self._rows and None in self._rows:
                row = self._rows.index(None)
                arrays = Row(self._arrays, row)
                arrays.update(context.state.arrays)
                context.state.arrays, self._rows[row] = arrays, context

    def _open(self) -> None:
        """Take the memory; where the budget has no room for it, there are no rows, and all are read alone."""
        manifest, memory, bucket = self._vlm.bundle.manifest, self._vlm.memory, self._bucket
        if memory:
            needed = manifest.batch_bytes(bucket) + memory.costs[bucket.batched].running
            self._reserved = memory.reserve(Need(frozenset({bucket.batched}), needed))
            if not self._reserved:
                self._rows = []
                return
        specs = [spec for spec in manifest.graphs[bucket.prefill].outputs if spec.name != "logits"]
        self._arrays |= self._vlm.place({s.name: np.zeros((bucket.batch, *s.shape[1:]), s.dtype) for s in specs})
