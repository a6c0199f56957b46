"""The kernels that a bundle ships: compiled, and compared with the operators before anything relies on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engines.bundle import Library
from engines.errors import UserError
from engines.plugins import cpu_library, store

CHOICES = ("auto", "always", "never")


@dataclass
class Kernels:
    """What a bundle's graphs run on, beside the function bodies in them.

    Attributes:
        cpu: the library for ONNX Runtime; None: function bodies.
        libraries: as the manifest describes them.
        missing: why there is not one of them.
    """

    cpu: Path | None = None
    libraries: list[Library] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def prepare(folder: Path, choice: str) -> Kernels:
    """Put the libraries into the bundle's folder.

    The kernels for ONNX Runtime are checked with every graph that uses them.

    Args:
        choice: `auto` ships what can be compiled here, `always` insists, `never` ships none.

    Raises:
        UserError: there are none, and `always` was asked for.
    """
    kernels = Kernels()
    if choice == "never":
        return kernels

    def take(name: str, make: Callable[[], store.Stored]) -> Path | None:
        try:
            built = make()
        except UserError as error:
            if choice == "always":
                raise
            kernels.missing.append(f"{name}: {error}")
            return None
        shutil.copyfile(built.path, folder / name)
        kernels.libraries.append(built.described())
        return folder / name

    kernels.cpu = take(cpu_library.NAME, store.cpu)
    return kernels
