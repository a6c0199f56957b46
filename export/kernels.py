"""The kernels that a bundle ships: compiled, and compared with the operators before anything relies on them."""

from __future__ import annotations

import ctypes
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engines import trt
from engines.bundle import Library
from engines.errors import UserError
from engines.plugins import cpu_library, cuda_library, host_library, store
from export.kernel_check import check_attention, check_topk_gather, cpu_kernels
from export.row_check import check_row_matmul

CASES, CPU_CASES = 20, 400  # random shapes on which a kernel is compared; the tests try hundreds
LONG, LONG_CASES = 5000, 3  # slots where a kernel cuts the store into several parts


@dataclass
class Kernels:
    """What a bundle's graphs run on, beside the function bodies in them.

    Attributes:
        cpu: the library for ONNX Runtime; None: function bodies.
        cuda: the library of TensorRT plugins; None: function bodies.
        libraries: both, as the manifest describes them.
        missing: why there is not one of them.
    """

    cpu: Path | None = None
    cuda: Path | None = None
    libraries: list[Library] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def architectures(backends: Sequence[str]) -> list[str]:
    """Compute capabilities that plugins are needed for: all that are known, or the GPU's that plans are timed on."""
    if not set(backends) & {*trt.BACKENDS}:
        return []
    elsewhere = any(backend in backends and row.targets for backend, row in trt.BACKENDS.items())
    return [*cuda_library.ARCHITECTURES] if elsewhere else trt.check("trt")


def prepare(folder: Path, choice: str, gpus: Sequence[str]) -> Kernels:
    """Put the libraries into the bundle's folder.

    Both are checked here, on random inputs; those for ONNX Runtime also with every graph that uses them.

    Args:
        choice: `auto` ships what can be compiled here, `always` insists, `never` ships none.
        gpus: compute capabilities of the plugins; none: no plans will be built.

    Raises:
        UserError: a kernel computes something else than its operator; or one is missing, and `always` was asked for.
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
    if kernels.cpu:
        check_cpu(kernels.cpu)
    if gpus:
        kernels.cuda = take(cuda_library.NAME, lambda: store.cuda(gpus))
    if kernels.cuda:
        check_cuda(kernels.cuda)
    return kernels


def check_cpu(library: Path) -> None:
    """Compare the kernels for ONNX Runtime with their operators, on every instruction path that this machine runs.

    A device may run a path that the graphs' own check here does not take, on sizes that this model does not have. Each
    runs in a process of its own: what crashes there must not take the build along without a word.

    Raises:
        UserError: they differ, with the path and the shape; or a kernel crashed.
    """
    loaded = ctypes.CDLL(str(library.resolve()))
    fork = multiprocessing.get_context("fork")  # no second import of PyTorch
    for path in (name for name in cpu_library.PATHS if loaded.unicache_cpu_runs(name.encode())):
        with ProcessPoolExecutor(1, fork) as pool:
            try:
                pool.submit(_check_path, library, path).result()
            except UserError as error:
                raise UserError(f"{library.name}, {path}: {error}") from error
            except BrokenProcessPool:
                raise UserError(f"{library.name}, {path}: a kernel crashed: build with  --kernels never") from None


def _check_path(library: Path, path: str) -> None:
    torch.set_num_threads(1)  # those of the process that was forked are gone
    loaded = ctypes.CDLL(str(library.resolve()))
    kernels = cpu_kernels(loaded, path)
    check_topk_gather(kernels, CASES, 0, "cpu")
    rounds = path in cpu_library.ROUNDING_PATHS
    check_attention(kernels, CPU_CASES, 0, "cpu", slots=700, rounds=rounds)
    check_attention(kernels, LONG_CASES, 1, "cpu", slots=LONG, rounds=rounds)
    check_row_matmul(loaded, path, CASES, 0)


def check_cuda(library: Path) -> None:
    """Compare CUDA kernels with their operators on random inputs: on the GPU; where there is none, built for the host.

    Raises:
        UserError: they differ; with the shape.
    """
    with tempfile.TemporaryDirectory(prefix="unicache-kernels-") as temporary:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            library = Path(temporary, host_library.NAME)
            host_library.build(library)
        kernels = ctypes.CDLL(str(library.resolve()))
        check_topk_gather(kernels, CASES, 0, device, tokens=1000)
        check_attention(kernels, CASES, 0, device, slots=200)
        check_attention(kernels, LONG_CASES, 1, device, slots=LONG)
