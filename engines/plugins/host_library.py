"""The CUDA kernels compiled for the host, by a C++ compiler alone: the same sources, through `simt.h`.

Exact and slow, a CUDA thread being a fiber: it shows what the kernels compute, where there is no GPU to show it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from engines.errors import UserError, one_line

NAME = "libunicache_host.so"
FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++")
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-x", "c++")


def kernels() -> list[Path]:
    """The CUDA sources: one file a kernel."""
    return sorted(FOLDER.glob("*.cu"))


def sources() -> list[Path]:
    """All files that go into the library."""
    return [*kernels(), *sorted(FOLDER.glob("*.h")), *sorted(FOLDER.glob("*.cuh"))]


def build(out: Path, defines: Sequence[str] = ()) -> None:
    """Compile the kernels into the library `out`.

    Args:
        defines: macros, as "NAME" or "NAME=value"; SIMT_BACKWARDS runs the threads in the opposite order.

    Raises:
        UserError: there is no compiler, or it refuses the sources.
    """
    if (compiler := next(filter(None, map(shutil.which, COMPILERS)), None)) is None:
        raise UserError("no C++ compiler is installed, so the kernels cannot be checked on the host: apt install g++")
    part = out.with_name(f".{out.name}.part")
    try:
        command = [compiler, *FLAGS, *(f"-D{define}" for define in defines), *map(str, kernels()), "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
            raise UserError(
                f"{compiler} cannot compile the CUDA kernels for the host: {one_line(Exception(complaint))}"
            )
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
