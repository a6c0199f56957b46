"""scripts/gpu_check.py, the kernels on the host standing in for a GPU: what it checks, and what it says of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_check
import gpu_timing
from engines import bundle as bundles
from engines import trt
from engines.errors import UserError
from engines.plugins import cuda_library, host_library
from engines.plugins.abi import Rows
from engines.plugins.roofline import Device
from export.kernel_check import AttentionCase
from tests.engines import cuda_standin
from tests.runtime import toy

BENCH = gpu_timing.Bench("cpu", Device("slow memory", 1e6, 1000, 1e12, "made up"), runs=2)
SMALL = ["--host", "--cases", "6", "--seeds", "1", "--seed", "0"]
compiler = pytest.mark.skipif(
    not any(map(shutil.which, host_library.COMPILERS)), reason="no C++ compiler is installed: apt install g++"
)


@pytest.fixture(autouse=True)
def _no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a developer has built, of whatever version, is not this test's."""
    monkeypatch.setattr(gpu_check, "BUNDLE", tmp_path / "no-bundle")


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, dict[str, str]], dict[str, Any]]:
    """Exit code, the parts by name, and all of the JSON file."""
    code = gpu_check.main([*SMALL, "--out", str(tmp_path / "gpu_check.json"), *options])
    values = json.loads((tmp_path / "gpu_check.json").read_text())
    return code, {part["name"]: part for part in values["parts"]}, values


@pytest.mark.parametrize(
    ("capability", "told"),
    [(None, "there is no NVIDIA GPU on this machine, or no driver for it"), ("sm_87", "there is a GPU (sm_87), but")],
)
def test_without_a_device_it_is_one_line(
    capability: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_check, "gpu", lambda: capability)
    assert gpu_check.main(["--out", str(tmp_path / "gpu_check.json")]) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith(f"no CUDA device: {told}")
    assert "nothing was checked" in printed.out
    assert printed.out.count("\n") == 1
    assert printed.err == ""
    assert not [*tmp_path.iterdir()]


@compiler
def test_the_host_build_passes_and_no_part_that_did_not_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, parts, values = run(tmp_path)
    assert code == 0
    passed = {name for name, part in parts.items() if part["state"] == "passed"}
    assert passed == {"kernels build", "QuantKVAttention, seed 0", "TopKGather, seed 0"}
    skipped = {name for name, part in parts.items() if part["state"] == "skipped"}
    plans = {f"bundle: {backend} plans" for backend in trt.BACKENDS}
    assert skipped == {"kernels timed", "memcheck", "racecheck", "arrays in GPU memory", "bundle: ONNX Runtime", *plans}
    assert all(part["detail"] for part in parts.values())
    assert values["device"] == "none: the kernels ran as host code"
    assert (values["timings"], values["gpu"], values["seed"]) == ([], None, 0)
    assert values["machine"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]
    printed = capsys.readouterr().out
    assert all(text in printed for text in (*parts, "skipped", "6 cases, up to 300 slots"))


@compiler
def test_planted_faults_fail_with_their_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, parts, _ = run(tmp_path, "--define", "TIE_SHIFT=1", "--define", "END_SHIFT=1")
    assert code == 1
    failed = {name: part["detail"] for name, part in parts.items() if part["state"] == "failed"}
    assert [*failed] == ["QuantKVAttention, seed 0", "TopKGather, seed 0"]
    for (name, detail), shape in zip(failed.items(), ("AttentionCase(", "TopKCase("), strict=True):
        assert f"the kernel of {name.split(',')[0]} is wrong" in detail
        assert shape in detail
    assert "failed" in capsys.readouterr().out


def test_kernels_that_do_not_build_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(out: Path, defines: Sequence[str]) -> None:
        raise UserError("no C++ compiler is installed")

    monkeypatch.setattr(host_library, "build", refused)
    code, parts, _ = run(tmp_path)
    assert code == 1
    assert (parts["kernels build"]["state"], parts["kernels build"]["detail"]) == (
        "failed",
        "no C++ compiler is installed",
    )
    for name in ("QuantKVAttention, seed 0", "TopKGather, seed 0", "memcheck", "kernels timed"):
        assert (parts[name]["state"], parts[name]["detail"]) == ("skipped", "the kernels were not built")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / host_library.NAME
    host_library.build(path)
    return path


@compiler
def test_a_given_library_is_checked_and_nothing_else(library: Path, tmp_path: Path) -> None:
    code, parts, _ = run(tmp_path, "--library", str(library))
    assert code == 0
    assert {part["state"] for part in parts.values()} == {"passed"}
    assert len(parts) == 3


@compiler
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_is_timed_by_the_bytes_that_it_moves(library: Path, bits: int) -> None:
    like = AttentionCase(slots=0, kv_heads=2, group=2, head_dim=32, window=8)
    row = gpu_timing.attention(ctypes.CDLL(str(library)), 64, bits, like, BENCH)
    store = 2 * 64 * 2 * 32 * bits // 8  # keys and values
    assert store < row.moved < 2 * store + 4096  # and scales, the window, biases, outputs
    assert (row.kernel, row.bits, row.tokens) == ("QuantKVAttention", bits, 64)
    assert min(row.seconds, row.peer_seconds) > 0
    # Bound by memory: the roofline counts no masses, and 16 numbers behind each output are only ours.
    assert 0.7 * row.moved / 1e6 < row.predicted < row.moved / 1e6
    assert row.of_copy == pytest.approx(row.moved / 1e6 / row.seconds)


@compiler
def test_a_selection_is_timed_by_the_bytes_that_it_moves(library: Path) -> None:
    like = AttentionCase(slots=0, kv_heads=2, head_dim=32)
    row = gpu_timing.topk_gather(ctypes.CDLL(str(library)), 64, like, BENCH)
    kept = 64 // gpu_timing.KEPT
    rows = 2 * kept * (2 * 32 * 2 + 4 + 2 + 8)  # heads; keys and values, positions, biases, indices
    assert 2 * 64 * 4 + 2 * rows <= row.moved < 2 * 64 * 4 + 2 * rows + 256
    assert 0.9 * row.moved / 1e6 < row.predicted < 1.1 * row.moved / 1e6
    assert min(row.seconds, row.peer_seconds) > 0


def test_a_copy_counts_what_it_reads_and_writes() -> None:
    assert 1e6 < gpu_timing.copy_bandwidth(3, "cpu", size=1 << 20) < 1e13


class FakeCuda:
    """Stands in for torch.cuda: a graph keeps what is called while it is captured, an event has the time."""

    L2_cache_size = 1000

    def __init__(self) -> None:
        self.milliseconds, self.captured = 0.0, False

    def synchronize(self) -> None: ...

    def get_device_properties(self, index: int) -> FakeCuda:
        return self

    def CUDAGraph(self) -> Any:
        return types.SimpleNamespace(replay=self.replay)

    def replay(self) -> None:
        assert self.captured
        self.milliseconds += 6.0

    @contextlib.contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        yield
        self.captured = True

    def Event(self, enable_timing: bool) -> Any:
        event = types.SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.milliseconds)
        event.elapsed_time = lambda end: end.at - event.at
        return event


def test_on_a_device_graphs_are_replayed_and_copies_outgrow_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    calls = []
    one, two = ([lambda name=name: calls.append(name)] * count for name, count in (("one", 2), ("two", 3)))
    assert gpu_timing.measure([one, two], 4, "cuda") == pytest.approx([0.006 / 2, 0.006 / 3])
    assert calls == ["one"] * 4 + ["two"] * 6  # each warms up, then is captured
    assert gpu_timing.copies(300, "cuda") * 300 > gpu_timing.COLD * FakeCuda.L2_cache_size


def on_gpu(tmp_path: Path, *options: str) -> gpu_check.Check:
    """A check that takes itself to run on a GPU, with kernels that are built."""
    check = gpu_check.Check(gpu_check._arguments([*SMALL, *options]), "cuda", tmp_path)
    check.library = ctypes.CDLL(None)
    return check


def outcome(check: gpu_check.Check, name: str, *arguments: str) -> tuple[str, str]:
    check.part("this", lambda: getattr(check, name)(*arguments))
    return check.parts[-1].state, check.parts[-1].detail


@pytest.mark.parametrize(
    ("script", "state", "told"),
    [
        ('echo "$*" >&2', "passed", "nothing found"),
        ('echo "========= Invalid __global__ read of size 4"; exit 9', "failed", "Invalid __global__ read of size 4"),
        ('shift 4; exec "$@"', "failed", "memcheck ended with 3"),  # the child finds no GPU: that is no pass
    ],
)
def test_the_sanitizer_judges_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, told: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the child runs")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "library.so").touch()
    result = outcome(on_gpu(tmp_path, "--library", str(tmp_path / "library.so")), "sanitize", "memcheck")
    assert result[0] == state
    assert told in result[1]


def test_without_a_sanitizer_it_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    state, told = outcome(on_gpu(tmp_path), "sanitize", "racecheck")
    assert state == "skipped"
    assert "CUDA toolkit" in told


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    return bundles.read(toy.build(tmp_path_factory.mktemp("check") / "bundle"))


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("providers", "answers", "state", "told"),
    [
        ([CPU], [], "skipped", "no CUDA provider"),
        (
            [CUDA, CPU],
            [(CUDA, [3, 4]), (CPU, [3, 4])],
            "passed",
            "CUDAExecutionProvider gives the CPU's 2 tokens, and ",
        ),
        # What comes behind the end token is not compared.
        ([CUDA, CPU], [(CUDA, [3, 2, 5]), (CPU, [3, 2, 4])], "passed", "the CPU's 2 tokens, and went on to 3"),
        ([CUDA, CPU], [(CUDA, [3, 5]), (CPU, [3, 4])], "failed", "answers [3, 5], the CPU [3, 4]"),
        ([CUDA, CPU], [(CPU, [3, 4])], "failed", "did not use it"),
    ],
)
def test_a_bundle_answers_alike_on_the_gpu(
    bundle: bundles.Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    providers: list[str],
    answers: list[tuple[str, list[int]]],
    state: str,
    told: str,
) -> None:
    monkeypatch.setattr(gpu_check.ort, "providers", lambda: providers)
    following = iter(answers)
    monkeypatch.setattr(gpu_check, "ask", lambda bundle, backend: next(following))
    monkeypatch.setattr(gpu_check.ort, "device", object)
    result = outcome(on_gpu(tmp_path, "--bundle", str(bundle.path)), "onnx_runtime")
    assert result[0] == state
    assert told in result[1]


def test_the_question_is_asked_of_the_bundle(bundle: bundles.Bundle) -> None:
    provider, tokens = gpu_check.ask(bundle, "ort")
    assert provider.endswith("ExecutionProvider")
    assert tokens


def test_plans_are_run(bundle: bundles.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with TensorRT and a GPU, for which there is a stand-in."""
    cuda_standin.with_tensorrt(monkeypatch)
    planned = cuda_standin.with_plans(bundle.path, tmp_path / "planned")
    state, told = outcome(on_gpu(tmp_path, "--bundle", str(planned)), "plans", "trt")
    assert state == "passed"
    assert told.startswith("TensorRT 10.3.0, CUDA graph gives the CPU's ")
    monkeypatch.setattr(gpu_check, "ask", lambda bundle, backend: (backend, [3 if backend == "ort" else 4]))
    assert outcome(on_gpu(tmp_path, "--bundle", str(planned)), "plans", "trt") == (
        "failed",
        "trt answers [4], the CPU [3]",
    )


def test_arrays_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = on_gpu(tmp_path)
    assert outcome(check, "arrays")[0] == "skipped"
    standin = cuda_standin.machine(monkeypatch)
    assert outcome(check, "arrays")[0] == "passed"
    copy = standin.cudaMemcpy2DAsync

    def wrong(dst: int, *rest: Any) -> Any:
        to, *others = rest
        others[3] = max(others[3] - 1, 1)  # a row less
        return copy(dst, to, *others)

    monkeypatch.setattr(standin, "cudaMemcpy2DAsync", wrong)
    state, told = outcome(check, "arrays")
    assert state == "failed"
    assert "are not as numpy writes them" in told


def test_plans_that_cannot_run_here_are_skipped(bundle: bundles.Bundle, tmp_path: Path) -> None:
    state, told = outcome(on_gpu(tmp_path, "--bundle", str(bundle.path)), "plans", "trt")
    assert state == "skipped"
    assert told


def test_a_bundle_that_was_named_must_be_there(tmp_path: Path) -> None:
    state, told = outcome(on_gpu(tmp_path, "--bundle", str(tmp_path / "none")), "onnx_runtime")
    assert state == "failed"
    assert "none" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kv-heads", "5"], "--heads 32 is no multiple of --kv-heads 5"),
        (["--library", "none.so"], "--library none.so: there is no such file"),
        (["--out", "nowhere/x.json"], "nowhere is not a folder"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--host", *options]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("\n") == 1


def test_nvcc_builds_the_kernels_alone_where_tensorrt_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        cuda_library.find_nvcc()
    except UserError as error:
        pytest.skip(str(error))

    def missing() -> Path:
        raise UserError("no headers")

    monkeypatch.setattr(cuda_library, "find_headers", missing)
    monkeypatch.setattr(host_library, "kernels", lambda: [host_library.FOLDER / "topk_gather.cu"])  # the quicker one
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    told = gpu_check.build_for_gpu(tmp_path / "kernels.so", [])
    assert told == "for sm_86, the kernels alone, without plugins"
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    assert library.unicache_topk_gather(None, (Rows * 4)(), None, 1, 4, 5, None) == 1  # k beyond the tokens: refused
