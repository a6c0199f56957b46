"""The CPU kernels by other compilers and for other machines: NEON is compiled here and run under an emulator."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.plugins import abi, cpu_library
from tests.engines.attention_inputs import address, arguments, exact, in_types, inputs, rounding

ARM = "aarch64-linux-gnu-g++"
# GCC 12 warns of what its own headers leave undefined on purpose.
QUIET = ("uninitialized", "maybe-uninitialized", "unknown-warning-option")
STRICT = ["-Wall", "-Wextra", "-Werror", *(f"-Wno-{name}" for name in QUIET)]
SCALE = 0.3
TYPES, BLOCKS = ("float32", "float16"), (1, 3, 7, 32, 10**6)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "FLAGS", [*cpu_library.FLAGS, *STRICT])


def test_gcc_compiles_without_a_warning(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    assert all(Path(each).is_file() for each in cpu_library.compiled(["g++"], tmp_path))


def test_clang_builds_what_runs_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("clang++"):
        pytest.skip("clang++ is not installed: apt install clang")
    monkeypatch.setenv("CXX", "clang++")
    library = tmp_path / cpu_library.NAME
    for path in cpu_library.build(library):
        check(functools.partial(call, ctypes.CDLL(str(library)), path), rounds=path in cpu_library.ROUNDING_PATHS)


def test_arm_without_a_warning(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator or not shutil.which(ARM):
        pytest.skip("no Arm compiler or emulator: apt install g++-aarch64-linux-gnu qemu-user")
    driver = tmp_path / "driver"
    source = Path(__file__).with_name("cpu_driver.cc")
    objects = cpu_library.compiled([ARM], tmp_path)
    subprocess.run([ARM, *cpu_library.FLAGS, "-static", str(source), *objects, "-o", str(driver)], check=True)
    for path in ("neon", "plain"):
        check(functools.partial(emulate, [emulator, str(driver)], tmp_path / "calls", path))
        subprocess.run([emulator, str(driver), "rows", path], check=True)


def test_peaks_of_this_processor(tmp_path: Path) -> None:
    """The program whose figures avx2_words.h cites."""
    if not shutil.which("g++") or " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and a processor with AVX2")
    source = Path(cpu_library.FOLDER).parents[2] / "scripts" / "cpu_peaks.cc"
    subprocess.run(["g++", "-O2", *STRICT, str(source), "-o", str(tmp_path / "peaks")], check=True)
    shown = subprocess.run([str(tmp_path / "peaks")], capture_output=True, text=True, check=True).stdout
    rows = [line.strip("| ").split("|") for line in shown.splitlines()[2:]]
    assert len(rows) == 9
    assert all(float(row[1]) > 0.1 for row in rows)


def call(library: ctypes.CDLL, path: str, cases: list[Case]) -> None:
    for case in cases:
        assert library.unicache_cpu_quant_kv_attention(ctypes.byref(case.arguments()), path.encode(), None) == 0


class Case:
    """Inputs of a random shape and types, and outputs that start as NaN."""

    def __init__(self, rng: np.random.Generator) -> None:
        def of(choices: Sequence[Any]) -> Any:
            return tuple(choices[i] for i in rng.integers(0, len(choices), 2))

        self.bits = of((8, 4))
        batch, kv_heads, group, queries, window = rng.integers(1, (3, 3, 9, 5, 41))
        slots, head_dim = int(rng.integers(1, 200)), of((5, 32, 64, 80, 96, 100, 128))[0]
        blocks, shared = (of(BLOCKS), of(BLOCKS)), bool(rng.integers(2))
        x = inputs(rng, batch, kv_heads, group, queries, slots, window, head_dim, 0.8, self.bits, blocks, shared)
        self.inputs = in_types(x, of(TYPES)[0], of(TYPES), of(TYPES))
        shapes = x["query"].shape, x["store_bias"].shape, x["key_window"].shape[:3]
        self.outputs = [np.full(each, np.nan, self.inputs["query"].dtype) for each in shapes]

    def arguments(self, place: Callable[[np.ndarray], int] = address) -> abi.Attention:
        return arguments(self.inputs, SCALE, self.bits, [*self.outputs], place)


def check(run: Callable[[list[Case]], None], rounds: bool = False) -> None:
    """The kernel = the operator, for calls of many shapes and types; `rounds`: queries and weights to 16 bits."""
    rng = np.random.default_rng(0)
    cases = [Case(rng) for _ in range(60)]
    run(cases)
    for case in cases:
        near = 6e-4 if case.outputs[0].dtype == np.float16 else 1e-5
        want, rounded = exact(case.inputs, SCALE, case.bits), rounding(case.inputs, SCALE, case.bits)
        for ours, theirs, lost in zip(case.outputs, want, rounded, strict=True):
            assert (np.abs(ours - theirs) <= 1e-5 + near * np.abs(theirs) + (lost if rounds else 0)).all()


def emulate(command: list[str], file: Path, path: str, cases: list[Case]) -> None:
    """Run the cases in the driver: see cpu_driver.cc for what lies in the file."""
    blob = bytearray(8 + len(cases) * ctypes.sizeof(abi.Attention))
    places: dict[int, int] = {}

    def place(array: np.ndarray) -> int:
        blob.extend(bytes(-len(blob) % 64))
        places[id(array)] = len(blob)
        blob.extend(array.tobytes())
        return places[id(array)]

    asked = b"".join(bytes(case.arguments(place)) for case in cases)
    blob[: 8 + len(asked)] = len(cases).to_bytes(8, "little") + asked
    file.write_bytes(blob)
    subprocess.run([*command, str(file), path], check=True)
    done = file.read_bytes()
    for case in cases:
        for output in case.outputs:
            output[:] = np.frombuffer(done, output.dtype, output.size, places[id(output)]).reshape(output.shape)
