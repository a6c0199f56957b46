"""export/kernel_check.py: right kernels pass, wrong ones are named with the shape that shows it."""

from __future__ import annotations

import ctypes
import random
import shutil
from pathlib import Path

import pytest
import torch

from engines.errors import UserError
from engines.plugins import host_library
from export.kernel_check import HEAD_DIMS, SCORES, attention_case, check_attention, check_topk_gather, topk_case

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, host_library.COMPILERS)), reason="no C++ compiler is installed: apt install g++"
)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library(tmp_path_factory.mktemp("right"))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Keeps the wrong tie, and leaves out a token."""
    return library(tmp_path_factory.mktemp("wrong"), "TIE_SHIFT=1", "END_SHIFT=1")


def library(folder: Path, *defines: str) -> ctypes.CDLL:
    host_library.build(folder / host_library.NAME, defines)
    assert [path.name for path in folder.iterdir()] == [host_library.NAME]
    return ctypes.CDLL(str(folder / host_library.NAME))


def test_kernels_are_their_operators(right: ctypes.CDLL) -> None:
    check_topk_gather(right, 30, 0, "cpu")
    assert 0 < check_attention(right, 18, 0, "cpu", slots=150) <= 1


def test_kernels_are_their_operators_in_the_other_order(tmp_path: Path) -> None:
    """Where a barrier is missing, the results differ in one of the two."""
    backwards = library(tmp_path, "SIMT_BACKWARDS")
    check_topk_gather(backwards, 30, 1, "cpu")
    assert 0 < check_attention(backwards, 18, 1, "cpu", slots=150) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_token_left_out_is_caught_with_its_shape(wrong: ctypes.CDLL, seed: int) -> None:
    with pytest.raises(UserError, match=rf"kernel of QuantKVAttention is wrong: .*slots=\d+, .*seed {seed}"):
        check_attention(wrong, 12, seed, "cpu", slots=150)


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_tie_is_caught_with_its_shape(wrong: ctypes.CDLL, seed: int) -> None:
    match = rf"kernel of TopKGather is wrong: its \w+ is not .*tokens=\d+, k=\d+.*seed {seed}"
    with pytest.raises(UserError, match=match):
        check_topk_gather(wrong, 30, seed, "cpu")


class Harmful:
    """Stands in for a library whose kernel fails, or writes where nobody asked."""

    def __init__(self, right: ctypes.CDLL, error: int) -> None:
        self.right, self.error = right, error

    def unicache_topk_gather(self, score, rows, index, heads, tokens, k, stream) -> int:
        done = self.right.unicache_topk_gather(score, rows, index, heads, tokens, k, stream)
        ctypes.memset(index.value + 8 * heads * k, 0, 1)
        return self.error or done

    unicache_quant_kv_attention_workspace = staticmethod(lambda arguments: 64)

    def unicache_quant_kv_attention(self, arguments, workspace, stream) -> int:
        return self.error


@pytest.mark.parametrize(("error", "told"), [(700, "it ended with error 700"), (0, "it wrote behind its output")])
def test_a_kernel_that_fails_or_writes_too_far_is_wrong(right: ctypes.CDLL, error: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_topk_gather(Harmful(right, error), 1, 0, "cpu")  # type: ignore[arg-type]


def test_sources_that_do_not_compile_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "kernels", lambda: [host_library.FOLDER / "topk_gather.cu"])
    with pytest.raises(UserError, match=r"cannot compile the CUDA kernels for the host: .*error.*") as caught:
        host_library.build(tmp_path / host_library.NAME, ["TIE_SHIFT=)"])
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"no C\+\+ compiler is installed.*apt install g\+\+"):
        host_library.build(tmp_path / host_library.NAME)


def test_an_attention_that_fails_or_writes_nothing_is_wrong(right: ctypes.CDLL) -> None:
    for error, told in ((700, "it ended with error 700"), (0, "its output is not finite")):
        with pytest.raises(UserError, match=told):
            check_attention(Harmful(right, error), 1, 0, "cpu")  # type: ignore[arg-type]


def test_every_kind_of_case_is_drawn() -> None:
    """The shapes that the check promises are among its first hundred cases, whatever the seed."""
    for seed in range(3):
        cases = [attention_case(random.Random(1000 * seed + i), i, 300) for i in range(100)]
        assert {case.head_dim for case in cases} >= {*HEAD_DIMS}
        assert {case.bits for case in cases} == {(8, 8), (8, 4), (4, 8), (4, 4)}
        assert {case.queries for case in cases} == {*range(1, 9)}
        assert {case.dtype for case in cases} == {torch.float16, torch.float32}
        assert {0, 300} <= {case.slots for case in cases}
        assert 0 in {case.window for case in cases}
        assert {0.0, 0.5, 1.0} == {case.filled for case in cases}
        assert {1, 2} == {case.batch for case in cases}
        assert {True, False} == {case.masses for case in cases} == {case.seen for case in cases}
        assert all(case.slots + case.window > 0 for case in cases)
        kept = [topk_case(random.Random(1000 * seed + i), i, 5000) for i in range(100)]
        assert {case.scores for case in kept} == {*SCORES}
        assert max(case.k for case in kept) > 3840  # where TensorRT's own TopK ends
