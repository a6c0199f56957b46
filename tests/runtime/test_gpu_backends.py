"""Whole answers on backends with a GPU, through stand-ins for it: the same tokens as ONNX Runtime on the CPU.

The stand-ins (tests/engines/cuda_standin.py) run the graphs where their tensors lie; a real GPU is for
scripts/gpu_check.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from demo_vlm.data import make_page
from engines import bundle as bundles
from engines import cuda, ort
from engines.bundle import Bundle
from engines.cuda import DeviceArray
from engines.errors import UserError
from runtime import tensors
from runtime.batch import Batch
from runtime.generate import Result
from runtime.model import VLM
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler
from runtime.session import Session
from tests.engines import cuda_standin
from tests.engines.cuda_standin import Cuda
from tests.runtime.asking import ask, image

QUESTION = "what is it red blue one two how many"


@pytest.fixture(scope="module")
def planned(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy bundle, with plans."""
    return cuda_standin.with_plans(bundle_path, tmp_path_factory.mktemp("planned") / "bundle")


MACHINES = {"trt": cuda_standin.with_tensorrt, "ort": cuda_standin.with_onnxruntime}
GPU = pytest.mark.parametrize("backend", MACHINES)


def both(backend: str, bundle: Path, level: str, use: Callable[[Any], Any]) -> tuple[Any, Any, Cuda]:
    """What comes of it on the CPU, and on the backend's stand-in."""
    expected = use(runtime.open(bundle, "ort", level))
    with pytest.MonkeyPatch.context() as monkeypatch:
        standin = MACHINES[backend](monkeypatch)
        return expected, use(runtime.open(bundle, backend, level)), standin


def told(result: Result) -> tuple[Any, ...]:
    """The same of every backend; what is computed to the last digits but one."""
    stats, near = result.stats, partial(pytest.approx, rel=1e-4, abs=1e-5)
    return (
        result.tokens, result.text, stats.kv_bytes, stats.compactions, stats.patches, stats.stop_reason, stats.bucket,
        near(stats.entropy), [(each.token, near(each.logprob)) for each in result.logprobs],
    )  # fmt: skip


@GPU
@pytest.mark.parametrize("level", ["loose", "tight", "frugal"])
@pytest.mark.parametrize("later", [False, True])
def test_the_same_answers(backend: str, level: str, later: bool, planned: Path) -> None:
    """With compaction, and at `question_later` with extend and tokens that are decoded one by one."""
    drawn = Sampling(temperature=1.0, seed=3, logprobs=2)

    def use(vlm: Any) -> list[Any]:
        options: dict[str, Any] = {"ignore_eos": True, "question_later": later, "max_new_tokens": 16}
        first = ask(vlm, QUESTION, [image(0)], **options)
        return [told(first), told(ask(vlm, "how many", [image(seed) for seed in range(3)], sampling=drawn, **options))]

    expected, found, _ = both(backend, planned, level, use)
    assert found == expected


@GPU
@pytest.mark.parametrize("level", ["loose", "tight"])
def test_sessions_fork_save_and_load(backend: str, level: str, planned: Path, tmp_path: Path) -> None:
    def use(vlm: Any) -> list[Any]:
        session = Session(vlm)
        answers = [session.ask("what is it", [image(1)], 4, ignore_eos=True).tokens]
        fork = session.fork()
        answers.append(fork.ask("how", (), 3, ignore_eos=True).tokens)
        session.save(tmp_path / "session")
        answers.append(session.ask("is it small", [image(2)], 5, ignore_eos=True).tokens)
        loaded = Session.load(vlm, tmp_path / "session")
        answers.append(loaded.ask("is it small", [image(2)], 5, ignore_eos=True).tokens)
        if level == "tight":  # the other one's window is full
            answers.append(fork.ask("left or right", [image(3)], 9, ignore_eos=True).tokens)
        return answers

    expected, found, _ = both(backend, planned, level, use)
    assert found == expected
    assert found[2] == found[3]


@GPU
def test_a_session_file_is_the_same_whoever_wrote_it(backend: str, planned: Path, tmp_path: Path) -> None:
    files = iter([tmp_path / "cpu", tmp_path / "gpu"])

    def use(vlm: Any) -> Any:
        session, file = Session(vlm), next(files)
        session.ask("what is it", [image(1)], 9, ignore_eos=True)
        session.save(file)
        return tensors.read(file, "session", 2**20)

    (expected, facts), (found, told), _ = both(backend, planned, "tight", use)
    assert told == facts
    assert [*found] == [*expected]
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(found[name], array, 1e-4, 1e-5, err_msg=name)


@GPU
@pytest.mark.parametrize("level", ["loose", "tight"])
def test_the_state_stays_on_the_gpu_and_a_step_allocates_nothing(
    backend: str, level: str, planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = MACHINES[backend](monkeypatch)
    vlm = runtime.open(planned, backend, level)
    counts = []
    step = vlm.advance

    def counted(context: Any, *arguments: Any) -> Any:
        assert all(isinstance(array, DeviceArray) for array in context.state.arrays.values())
        reason = yield from step(context, *arguments)
        assert isinstance(context.logits, np.ndarray)
        counts.append(standin.allocations)
        return reason

    monkeypatch.setattr(vlm, "advance", counted)
    for _ in range(2):
        ask(vlm, QUESTION, [image(0)], max_new_tokens=20, ignore_eos=True)
    first, second = counts[: len(counts) // 2], counts[len(counts) // 2 :]
    assert len(second) == 19
    assert second == [first[-1]] * 19  # nothing at all, prefill and vision included
    assert len(set(first[-8:])) == 1


@GPU
@pytest.mark.parametrize("level", ["loose", "tight"])
def test_a_batch_lies_on_the_gpu_too(
    backend: str, level: str, of_batch: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rows = Batch.read, set[type]()

    def seen(batch: Batch, reads: Any) -> None:
        read(batch, reads)
        rows.update(type(array) for array in batch._arrays.values())

    def use(vlm: VLM) -> list[list[int]]:
        monkeypatch.setattr(Batch, "read", seen)
        scheduler, lengths = Scheduler(3), (9, 18, 12, 15)
        streams = [vlm.stream(QUESTION, [image(n)], n, ignore_eos=True) for n in lengths]
        return [each.result.tokens for each in scheduler.run(map(scheduler.submit, streams))]

    expected, found, standin = both(backend, cuda_standin.with_plans(of_batch(3), tmp_path / "bundle"), level, use)
    assert found == expected
    assert rows == {np.ndarray, DeviceArray}
    assert standin.allocations > 0


def test_decoding_becomes_a_few_cuda_graphs(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin = cuda_standin.with_tensorrt(monkeypatch)
    vlm = runtime.open(planned, "trt", "tight")
    result = ask(vlm, QUESTION, [image(0)], max_new_tokens=60, ignore_eos=True)
    assert result.stats.provider == "TensorRT 10.3.0, CUDA graph"
    assert standin.launches > 40
    decode = vlm._sessions[vlm.bundle.manifest.levels["tight"].buckets[1].decode]
    assert 2 <= len(decode._graphs) <= 12  # type: ignore[attr-defined]
    before = standin.launches
    ask(vlm, QUESTION, [image(1)], max_new_tokens=30, ignore_eos=True)
    assert standin.launches - before > 25  # most addresses of a new request are those of the last


def test_a_graph_that_cannot_be_captured_is_run_without_and_said(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(runtime.open(planned, "ort", "tight"), QUESTION, [image(0)], max_new_tokens=20, ignore_eos=True)
    standin = cuda_standin.with_tensorrt(monkeypatch, refuses_capture=True)
    result = ask(runtime.open(planned, "trt", "tight"), QUESTION, [image(0)], max_new_tokens=20, ignore_eos=True)
    assert result.tokens == expected.tokens
    assert standin.launches == 0
    assert "TensorRT 10.3.0, no CUDA graph (decode_tight_" in result.stats.provider
    assert "could not run it" in result.stats.provider


def test_many_sessions_keep_no_more_graphs_than_are_allowed(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin = cuda_standin.with_tensorrt(monkeypatch)
    vlm = runtime.open(planned, "trt", "tight")
    sessions = [Session(vlm) for _ in range(8)]
    for words in ("what is it", "how many"):
        for session in sessions:
            session.ask(words, (), 8, ignore_eos=True)
    decode = vlm._sessions[vlm.bundle.manifest.levels["tight"].buckets[0].decode]
    from engines.trt_session import GRAPHS

    assert len(decode._graphs) == GRAPHS  # type: ignore[attr-defined]
    assert len([works for works in standin.graphs.values() if works]) <= GRAPHS


def test_onnx_runtime_without_cudas_package_passes_tensors_through_the_host(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise UserError("no cuda-bindings")

    monkeypatch.setattr(ort, "providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(cuda, "device", missing)
    assert ort.ort_status().reason.endswith("tensors pass through the host (no cuda-bindings)")
    assert ort.device() is None


@pytest.mark.slow
def test_the_demos_graphs_give_the_same_answers(demo_bundle: Bundle, tmp_path: Path) -> None:
    """int8 stores, float16 windows, six layers: what `export/build.py` makes."""
    page = make_page(np.random.default_rng(0))[0]
    question = "what is the number in row 1 column 1 ?"
    planned = cuda_standin.with_plans(demo_bundle.path, tmp_path / "planned")

    def use(vlm: Any) -> Any:
        result = vlm.generate(question, [page], max_new_tokens=40, ignore_eos=True)
        session = Session(vlm)
        session.ask(question, [page], 3, ignore_eos=True)
        fork, asked = session.fork(), "what is the number in row 2 column 1 ?"
        assert result.stats.compactions > 0
        later = [each.ask(asked, (), 9, ignore_eos=True).tokens for each in (session, fork)]
        return result.tokens, result.stats.patches, result.stats.kv_bytes, later

    expected = use(runtime.open(planned, "ort", "balanced", threads=1, kernels=False))
    for backend, machine in MACHINES.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            machine(monkeypatch)
            assert use(runtime.open(planned, backend, "balanced", threads=1)) == expected


def test_a_state_keeps_to_its_dtypes(planned: Path) -> None:
    """On the GPU a row is copied as it is, so a graph must return what the window holds."""
    manifest = bundles.read(planned).manifest
    for level in manifest.levels.values():
        for bucket in level.buckets:
            state = {spec.name: spec.dtype for spec in manifest.graphs[bucket.prefill].outputs}
            rows = {spec.name: spec.dtype for spec in manifest.graphs[bucket.decode].outputs}
            assert (rows["new_key"], rows["new_value"]) == (state["key_window"], state["value_window"])
