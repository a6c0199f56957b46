"""Weights that an ONNX file takes from a file beside it, mapped once for all graphs that take them.

ONNX Runtime maps them for each session anew. The onnx package, which would read the file, is not needed on a device:
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, in protobuf's wire format.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 10: "float16"}
GRAPH, NODE, INITIALIZER = 7, 1, 5  # fields of ModelProto, and of GraphProto
INPUT, OPERATOR = 1, 4  # of NodeProto
PRODUCTS = (b"MatMul", b"Gemm")
DIMS, DATA_TYPE, NAME, EXTERNAL, LOCATION = 1, 2, 8, 13, 14  # of TensorProto
OUTSIDE = 1  # LOCATION of a tensor in another file
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


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
        for graph in _all(memoryview(path.read_bytes()), GRAPH):
            factors = _factors(graph)
            found += [each for t in _all(graph, INITIALIZER) if (each := _external(t)) and each.name in factors]
    except (IndexError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no ONNX file") from error
    return found


def _factors(graph: memoryview) -> set[str]:
    """What products multiply by, and nothing else reads.

    ONNX Runtime transposes other weights in its own copy of the graph, where it moves a Transpose behind an Add, but
    not those that it was given (1.32): it then adds arrays of different shapes.
    """
    factors, others = set[bytes](), set[bytes]()
    for node in _all(graph, NODE):
        inputs = [bytes(name) for name in _all(node, INPUT)]
        product = any(bytes(name) in PRODUCTS for name in _all(node, OPERATOR))
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
    fields: dict[int, Any] = dict(_fields(tensor))
    if fields.get(LOCATION) != OUTSIDE or fields.get(DATA_TYPE) not in DTYPES:
        return None
    entries: list[dict[int, Any]] = [dict(_fields(entry)) for entry in _all(tensor, EXTERNAL)]  # a key and a value each
    place = {bytes(entry[1]).decode(): bytes(entry[2]).decode() for entry in entries}
    if Path(place["location"]).name != place["location"]:
        return None
    shape = tuple(size for number, value in _fields(tensor) if number == DIMS for size in _sizes(value))
    name, dtype = bytes(fields[NAME]).decode(), DTYPES[fields[DATA_TYPE]]
    return External(name, dtype, shape, place["location"], int(place.get("offset", "0")))


def _sizes(value: memoryview | int) -> Iterator[int]:
    """Numbers, packed or one by one."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield number


def _all(message: memoryview, field: int) -> Iterator[memoryview]:
    return (value for number, value in _fields(message) if number == field and isinstance(value, memoryview))


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and value of each field, in order."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: memoryview | int
        if key % 8 == VARINT:
            value, at = _varint(message, at)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(key % 8)
            if size is None and key % 8 == BYTES:
                size, at = _varint(message, at)
            if size is None or at + size > len(message):
                raise IndexError(at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and where the next one begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError(at)
