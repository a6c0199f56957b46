"""CUDA kernels compiled for the host, by engines/plugins/simt.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "engines" / "plugins"
HOST = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-fPIC", "-shared", "-x", "c++"]
INVALID_VALUE, LAUNCH_FAILURE = 1, 719


def compiled(source: Path, folder: Path, *flags: str) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: apt install g++")
    library = folder / "kernel.so"
    subprocess.run(["g++", *HOST, f"-I{PLUGINS}", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
