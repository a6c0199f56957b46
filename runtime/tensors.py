"""Arrays in one file, in the safetensors format, with a hash over every byte of it.

The format is a length, a JSON header and the arrays' bytes; the package that reads it would be the lean runtime's only
one beside those that it needs for answering.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from pathlib import Path

import numpy as np

from engines.bundle import check_outside
from engines.errors import UserError, one_line

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I8": "int8"}
NAMES = {np.dtype(name): code for code, name in TYPES.items()}
METADATA, HASH = "__metadata__", "sha256"
UNKNOWN = "0" * 64  # in the hash's place while it is computed
LENGTH, MOST_HEADER = 8, 100 << 20


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write the file, whole or not at all: a file that is there, or that a link leads to, is replaced at the end."""
    header: dict[str, object] = {METADATA: metadata | {HASH: UNKNOWN}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH)
    content = b"".join([len(text).to_bytes(LENGTH, "little"), text, *(array.tobytes() for array in arrays.values())])
    content = content.replace(UNKNOWN.encode(), hashlib.sha256(content).hexdigest().encode(), 1)
    try:
        target = path.resolve()
        check_outside(target)
        if target.exists() and not target.is_file():  # a device would be replaced too
            raise UserError(f"{path}: not a file")
        temporary = target.with_name(f".{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()  # not there if all went well
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the name; a link to itself
        why = getattr(error, "strerror", None) or one_line(error)  # without the other names
        raise UserError(f"{path}: cannot be written: {why}") from error


def read(path: Path, what: str, most: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays that may be written to, and metadata, of a file that `write` has written.

    Args:
        what: it should be, for the message.
        most: bytes that its arrays may have; a longer file is not read.

    Raises:
        UserError: it cannot be read, or one of its bytes is not as it was written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise UserError(f"{path}: not a file")
        if path.exists() and path.stat().st_size > most + MOST_HEADER:
            raise UserError(f"{path}: no {what}: it is too large for one")
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a zero byte in the name
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    try:
        return _parsed(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path}: no {what}, or damaged: {one_line(error)}") from error


def _parsed(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    size = int.from_bytes(content[:LENGTH], "little")
    if not 2 <= size <= min(len(content) - LENGTH, MOST_HEADER):
        raise ValueError("it has no header")
    text, data = content[LENGTH : LENGTH + size], memoryview(content)[LENGTH + size :]
    header = json.loads(text)
    metadata = header.pop(METADATA)
    known = metadata.pop(HASH)
    whole = content.replace(known.encode(), UNKNOWN.encode(), 1)
    if len(known) != len(UNKNOWN) or hashlib.sha256(whole).hexdigest() != known:
        raise ValueError("its hash is another one")
    arrays, end = {}, 0
    for name, entry in header.items():
        dtype, shape, (start, stop) = np.dtype(TYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > len(data):
            raise ValueError(f"{name} lies elsewhere")
        arrays[name] = np.frombuffer(data[start:stop], dtype).reshape(shape).copy()
        end = stop
    if end != len(data):
        raise ValueError("it is longer than its arrays")
    return arrays, metadata
