"""The libraries that a bundle ships: what can be compiled, and what is said of the rest."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines import trt
from engines.errors import UserError
from engines.plugins import cpu_library, cuda_library, host_library, store
from export import build, kernels
from tests.export.conftest import RECIPE

SMALL = ["--recipe", str(RECIPE), "--images", "1", "--text-tokens", "8", "--jobs", "1", "--guard", "off"]
GPUS = ["sm_87", "sm_90"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    (tmp_path / "bundle").mkdir()
    return tmp_path / "bundle"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers that write a few bytes; what the CUDA kernels compute is compared all the same."""

    def cpu(out: Path) -> list[str]:
        out.write_bytes(b"cpu")
        return ["plain"]

    monkeypatch.setattr(cpu_library, "build", cpu)
    monkeypatch.setattr(cuda_library, "build", lambda out, architectures: out.write_bytes(b"cuda"))
    monkeypatch.setattr(kernels, "check_cpu", lambda library: None)


def refuse(*_: Any) -> Any:
    raise UserError("no compiler: install one")


def test_plugins_are_for_the_gpu_that_plans_are_built_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "check", lambda backend: ["sm_87"])
    assert kernels.architectures(["ort"]) == []
    assert kernels.architectures(["ort", "trt"]) == ["sm_87"]
    assert kernels.architectures(["ort", "trt-rtx", "trt"]) == [*cuda_library.ARCHITECTURES]


def test_never_ships_nothing(folder: Path) -> None:
    assert kernels.prepare(folder, "never", GPUS) == kernels.Kernels()
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("gpus", [[], GPUS])
def test_libraries_lie_in_the_bundle_and_are_described(folder: Path, quick: None, gpus: list[str]) -> None:
    made = kernels.prepare(folder, "auto", gpus)
    files = [cpu_library.NAME, cuda_library.NAME] if gpus else [cpu_library.NAME]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert [library.file for library in made.libraries] == files
    assert made.libraries[-1].architectures == (gpus or ["plain"])
    assert made.cpu == folder / cpu_library.NAME
    assert made.cuda == (folder / cuda_library.NAME if gpus else None)
    assert made.missing == []


@pytest.mark.parametrize(("module", "gpus"), [(cpu_library, []), (cuda_library, GPUS)])
def test_without_a_compiler_the_bundle_says_so(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch, module: Any, gpus: list[str]
) -> None:
    monkeypatch.setattr(module, "build", refuse)
    made = kernels.prepare(folder, "auto", gpus)
    assert made.missing == [f"{module.NAME}: no compiler: install one"]
    assert not (folder / module.NAME).exists()
    with pytest.raises(UserError, match="no compiler"):
        kernels.prepare(folder, "always", gpus)


@pytest.mark.parametrize("fault", ["TIE_SHIFT", "END_SHIFT"])
def test_a_cuda_kernel_with_an_error_by_one_blocks_the_bundle(
    tmp_path: Path,
    tiny_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13")
    monkeypatch.setattr(host_library, "build", partial(host_library.build, defines=[f"{fault}=1"]))
    out = tmp_path / "built" / "bundle"
    assert build.main([str(tiny_path), "--out", str(out), *SMALL, "--backend", "trt-rtx"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"the kernel of {'TopKGather' if fault == 'TIE_SHIFT' else 'QuantKVAttention'} is wrong" in error
    assert [*out.parent.iterdir()] == []


def test_a_kernel_that_crashes_is_told_and_the_build_lives(
    operator_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(kernels, "check_topk_gather", crash)
    with pytest.raises(UserError, match=rf"{cpu_library.NAME}, \w+: a kernel crashed: .*--kernels never"):
        kernels.check_cpu(operator_library)


def test_kernels_are_compared_on_every_instruction_path(
    operator_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared = tmp_path / "compared"

    def note(made: object, *_: object, **__: object) -> None:
        with compared.open("a") as file:
            file.write(f"{os.getpid()}\n")

    for name in ("check_topk_gather", "check_attention"):
        monkeypatch.setattr(kernels, name, note)
    kernels.check_cpu(operator_library)
    library = ctypes.CDLL(str(operator_library))
    runs = [path for path in cpu_library.PATHS if library.unicache_cpu_runs(path.encode())]
    processes = compared.read_text().split()
    assert len(processes) == 3 * len(runs)
    assert len(set(processes) - {str(os.getpid())}) == len(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "told"),
    [
        ("topk_gather.cc", "index[kept++] = i;", "index[kept++] = i ? i - 1 : i;", "the kernel of TopKGather is wrong"),
        (
            "row_matmul_path.h",
            "k < start + stride; k++",
            "k + 1 < start + stride; k++",
            "the kernel of RowMatMul is wrong",
        ),
        ("plain.cc", "return a * b + c;", "return a * b + c + 1;", "plain: the kernel of QuantKVAttention is wrong"),
        (
            "ort.cc",
            "arguments.window = window,",
            "arguments.window = window - 1,",
            f"decode_32.onnx with the kernels of {cpu_library.NAME}",
        ),
    ],
)
def test_a_kernel_with_an_error_by_one_blocks_the_bundle(
    tmp_path: Path,
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    right: str,
    wrong: str,
    told: str,
) -> None:
    """The library for ONNX Runtime is compiled from a copy of its sources in which one place is changed."""
    copy = shutil.copytree(cpu_library.FOLDER.parent, tmp_path / "sources")
    monkeypatch.setattr(cpu_library, "FOLDER", copy / cpu_library.FOLDER.name)
    source = cpu_library.FOLDER / file
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    monkeypatch.setattr(cpu_library, "FLAGS", [flag.replace("-O3", "-O1") for flag in cpu_library.FLAGS])  # sooner
    out = tmp_path / "built" / "bundle"
    assert build.main([str(tiny_path), "--out", str(out), *SMALL, "--kernels", "always"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error
    assert [*out.parent.iterdir()] == []
    if file == "ort.cc":
        assert build.main([str(tiny_path), "--out", str(out), *SMALL, "--kernels", "never"]) == 0
