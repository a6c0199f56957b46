"""Devices that `plan` knows, each number with its source: devices.toml, or a file of your own."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from engines.config import parse
from engines.errors import UserError

KNOWN = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True)
class Figure:
    """A number and where it stands."""

    value: float
    source: str = ""

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError(f"value must be above 0, got {self.value}")


@dataclass(frozen=True)
class Device:
    """What a device can do at best.

    Attributes:
        name: as a person says it.
        memory: bytes that its system reports.
        bandwidth: of the memory, bytes/s.
        fp16, int8: dense operations/s, a multiply-add counted as two.
    """

    name: str
    memory: Figure
    bandwidth: Figure
    fp16: Figure
    int8: Figure


def devices() -> dict[str, Device]:
    """The known ones by what the command line calls them."""
    return parse(dict[str, Device], _read(KNOWN), KNOWN.name)


def find(name_or_file: str) -> Device:
    """A device by its name, or its tables (`name`, `memory.value` and so on) from a .toml file.

    Raises:
        UserError: no such device or file, a missing or ill-typed number.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml":
        return parse(Device, _read(path), path.name)
    if name_or_file not in (known := devices()):
        raise UserError(
            f"no device {name_or_file!r}: choose from {', '.join(known)}, or give a .toml file with its numbers"
        )
    return known[name_or_file]


def _read(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"device file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"device file {path} cannot be read: {error}") from error
