"""Typed dataclasses from and to plain JSON/TOML data, every key and type checked on load."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from engines.errors import UserError

T = TypeVar("T")


def read_json(path: Path) -> Any:
    """Load a JSON file.

    Raises:
        UserError: the file is missing, not readable, or not JSON.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> Any:
    """Decode JSON.

    Raises:
        UserError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError and UnicodeDecodeError
        raise UserError(f"{where}: not JSON: {error}") from error


def parse(kind: type[T], data: Any, where: str) -> T:
    """Build a `kind` (dataclass, list, dict, tuple, Optional, Literal or scalar) from plain data.

    Args:
        kind: the annotated type wanted.
        data: what `json.load` or `tomllib.load` gave.
        where: how the message names the place, for example `recipe.toml`.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None  # type: ignore[return-value]
        kinds = [a for a in args if a is not type(None)]
        if len(kinds) > 1 and isinstance(data, str):  # a method's name alone: with its defaults
            data = {"method": data}
        return parse(_choose(kinds, data, where), data, where)
    if origin is typing.Literal:
        if not any(type(arg) is type(data) and arg == data for arg in args):  # 2.0 is no 2, and True no 1
            raise UserError(f"{where}: {data!r} is none of {', '.join(map(repr, args))}")
        return data
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(kind, data, where)
    if origin in (list, tuple):
        if not isinstance(data, list | tuple):
            raise UserError(f"{where}: expected a list, got {data!r}")
        return origin(parse(args[0], value, f"{where}[{i}]") for i, value in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise UserError(f"{where}: expected a table, got {data!r}")
        return {k: parse(args[1], v, f"{where}.{k}") for k, v in data.items()}  # type: ignore[return-value]
    if kind is Any:
        return data
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        try:
            number = float(data)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):  # TOML and Python's JSON know inf and nan, and no setting is meant by them
            raise UserError(f"{where}: expected a finite number, got {data!r}")
        return number  # type: ignore[return-value]
    if kind is int and isinstance(data, int) and abs(data) >= 2**53:  # no size, count or offset that anybody has
        raise UserError(f"{where}: expected a smaller number, got {data}")
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise UserError(f"{where}: expected {kind.__name__}, got {data!r}")
    return data


def _choose(kinds: list[Any], data: Any, where: str) -> Any:
    """Of several dataclasses, each with a `method: Literal[name]`, the one that the data names, or the first."""
    known = {typing.get_args(_hints(kind)["method"])[0]: kind for kind in kinds} if len(kinds) > 1 else {}
    method = data.get("method", next(iter(known), None)) if isinstance(data, dict) else next(iter(known), None)
    if known and not (isinstance(method, str) and method in known):
        raise UserError(f"{where}: no method {method!r}: choose from {', '.join(known)}")
    return known.get(method, kinds[0])


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Annotations as types; asked once, since evaluating them is most of what parsing a manifest costs."""
    return typing.get_type_hints(kind)


def _parse_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a table, got {data!r}")
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    if unknown := sorted(set(data) - set(fields)):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(fields)}")
    values = {name: parse(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where}: missing key {missing[0]!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
