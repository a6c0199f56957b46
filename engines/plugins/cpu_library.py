"""Builds the ONNX Runtime custom-operator library from `cpu/`: a C++ compiler is all it takes, for a few seconds."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.errors import UserError, one_line

NAME = "libunicache_ort.so"
FOLDER = Path(__file__).parent / "cpu"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
OWN_FLAGS = {  # of an instruction path on x86
    "avx2.cc": AVX2,
    "avx512.cc": AVX512,
    "avx512vnni.cc": [*AVX512, "-mavx512vnni"],
}
PATHS = ("avx512vnni", "avx512", "avx2", "neon", "plain")  # instruction paths, fastest first
ROUNDING_PATHS = {"avx512vnni", "avx2"}  # multiply queries and weights that are rounded to 16 bits


def sources() -> list[Path]:
    """Every file that the library is made of."""
    return [FOLDER.parent / "kernels.h", *(f for kind in ("h", "cc", "map") for f in sorted(FOLDER.glob(f"*.{kind}")))]


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, else g++, else clang++."""
    chosen = os.environ.get("CXX")
    try:
        command = shlex.split(chosen or shutil.which("g++") or shutil.which("clang++") or "")
    except ValueError:  # a quotation that does not end
        command = []
    if not command or not shutil.which(command[0]):
        missing = f"$CXX is {chosen!r}, which is no command" if chosen else "there is no C++ compiler"
        raise UserError(f"{missing}: install one (apt install g++) or name it (CXX=clang++)")
    return command


def build(out: Path) -> list[str]:
    """Compile the library to `out`.

    Returns:
        The instruction paths in it that this machine runs, fastest first.

    Raises:
        UserError: there is no compiler, or it fails.
    """
    command = compiler()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        library = Path(folder) / NAME
        shown = f"-Wl,--version-script={FOLDER / 'library.map'}"
        _run([*command, "-shared", "-pthread", shown, *compiled(command, Path(folder)), "-o", str(library)])
        try:
            kernels = ctypes.CDLL(str(library.resolve()))
        except OSError as error:
            raise UserError(f"what {command[0]} makes does not load on this machine: {one_line(error)}") from error
        os.replace(library, out)
    return [path for path in PATHS if kernels.unicache_cpu_runs(path.encode())]


def compiled(command: list[str], folder: Path) -> list[str]:
    """Object files of all sources, in `folder`, for the machine that the compiler is for."""
    x86 = _run([*command, "-dumpmachine"]).startswith("x86_64")
    units = [file for file in sources() if file.suffix == ".cc"]
    objects = [str(folder / f"{unit.stem}.o") for unit in units]

    def compile_unit(unit: Path, target: str) -> None:
        own = OWN_FLAGS.get(unit.name, []) if x86 else []
        _run([*command, *FLAGS, *own, "-c", str(unit), "-o", target])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_unit, units, objects))
    return objects


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise UserError(f"{NAME} cannot be built by {command[0]}: {errors[0] if errors else done.returncode}")
    return done.stdout
