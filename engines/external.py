"""Weights that an ONNX file takes from a file beside it, mapped once for all graphs that take them.

ONNX Runtime maps them for each session anew. The onnx package, which would read the file, is not needed on a device.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines import wire
from engines.products import PRODUCTS
from engines.wire import (
    DATA_TYPE,
    DIMS,
    EXTERNAL,
    GRAPH,
    INITIALIZER,
    INPUT,
    LOCATION,
    NAME,
    NODE,
    OPERATOR,
)

DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 10: "float16"}
OUTSIDE = 1  # LOCATION of a tensor in another file


@dataclass(frozen=True)
class External:
    """A weight in another file.

    Attributes:
        file: its name, in the folder of the graph.
        offset: of its first byte there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def externals(path: Path) -> list[External]:
    """What products multiply by, of the graph itself, not of graphs inside it.

    Without those of other types, or not in the same folder.

    Raises:
        ValueError: this is no ONNX file.
    """
    found = []
    try:
        for graph in wire.all_of(memoryview(path.read_bytes()), GRAPH):
            factors = _factors(graph)
            found += [each for t in wire.all_of(graph, INITIALIZER) if (each := _external(t)) and each.name in factors]
    except (IndexError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no ONNX file") from error
    return found


def _factors(graph: memoryview) -> set[str]:
    """What products multiply by, and nothing else reads.

    ONNX Runtime transposes other weights in its own copy of the graph, where it moves a Transpose behind an Add, but
    not those that it was given (1.32): it then adds arrays of different shapes.
    """
    factors, others = set[bytes](), set[bytes]()
    for node in wire.all_of(graph, NODE):
        inputs = [bytes(name) for name in wire.all_of(node, INPUT)]
        product = any(bytes(name) in PRODUCTS for name in wire.all_of(node, OPERATOR))
        factors.update(inputs[1:2] if product else ())
        others.update((*inputs[:1], *inputs[2:]) if product else inputs)
    return {name.decode() for name in factors - others}


def mapped(path: Path) -> dict[str, np.ndarray]:
    """Name -> array on the mapped file; each file is mapped once, for as long as any of its arrays is there.

    Raises:
        ValueError: this is no ONNX file.
    """
    arrays = {}
    for each in externals(path):
        file = path.parent / each.file
        if file.is_file() and each.nbytes > 0 and each.offset + each.nbytes <= file.stat().st_size:
            data = _file(file)[each.offset : each.offset + each.nbytes]
            arrays[each.name] = data.view(each.dtype).reshape(each.shape)
    return arrays


_FILES: weakref.WeakValueDictionary[tuple[Path, int, int, int], np.memmap] = weakref.WeakValueDictionary()


def _file(path: Path) -> np.memmap:
    about = path.stat()
    key = path.resolve(), about.st_ino, about.st_size, about.st_mtime_ns
    if (found := _FILES.get(key)) is None:
        found = _FILES[key] = np.memmap(path, np.uint8, "r")
    return found


def _external(tensor: memoryview) -> External | None:
    fields: dict[int, Any] = dict(wire.fields(tensor))
    if fields.get(LOCATION) != OUTSIDE or fields.get(DATA_TYPE) not in DTYPES:
        return None
    entries: list[dict[int, Any]] = [
        dict(wire.fields(entry)) for entry in wire.all_of(tensor, EXTERNAL)
    ]  # a key and a value each
    place = {bytes(entry[1]).decode(): bytes(entry[2]).decode() for entry in entries}
    if Path(place["location"]).name != place["location"]:
        return None
    shape = tuple(size for number, value in wire.fields(tensor) if number == DIMS for size in wire.numbers(value))
    name, dtype = bytes(fields[NAME]).decode(), DTYPES[fields[DATA_TYPE]]
    return External(name, dtype, shape, place["location"], int(place.get("offset", "0")))
