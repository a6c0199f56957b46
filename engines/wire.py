"""An ONNX file without the onnx package, which is not needed on a device: protobuf's wire format.

https://github.com/onnx/onnx/blob/main/onnx/onnx.proto has the numbers of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator

GRAPH, OPSET = 7, 8  # fields of ModelProto
NODE, INITIALIZER = 1, 5  # of GraphProto
INPUT, OPERATOR, ATTRIBUTE, DOMAIN = 1, 4, 5, 7  # of NodeProto
DIMS, DATA_TYPE, NAME, EXTERNAL, LOCATION = 1, 2, 8, 13, 14  # of TensorProto
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def numbers(value: memoryview | int) -> Iterator[int]:
    """Numbers, packed or one by one."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield number


def all_of(message: memoryview, field: int) -> Iterator[memoryview]:
    """Values of one field that are bytes."""
    return (value for number, value in fields(message) if number == field and isinstance(value, memoryview))


def fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and value of each field, in order."""
    return ((number, value) for number, value, _ in spans(message))


def spans(message: memoryview) -> Iterator[tuple[int, memoryview | int, memoryview]]:
    """Number and value of each field, in order, and all its bytes.

    Raises:
        IndexError: this is no message.
    """
    at = 0
    while at < len(message):
        start = at
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
        yield key >> 3, value, message[start:at]


def written(number: int, value: bytes | int) -> bytes:
    """One field."""
    if isinstance(value, int):
        return _written(number << 3 | VARINT) + _written(value)
    return _written(number << 3 | BYTES) + _written(len(value)) + value


def _written(value: int) -> bytes:
    start = []
    while value > 127:
        start.append(value & 127 | 128)
        value >>= 7
    return bytes([*start, value])


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
