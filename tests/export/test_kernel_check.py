"""export/kernel_check.py: right kernels pass, wrong ones are named with the shape that shows it."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from engines.errors import UserError
from engines.plugins import host_library
from export.kernel_check import check_topk_gather

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, host_library.COMPILERS)), reason="no C++ compiler is installed: apt install g++"
)


def library(folder: Path, *defines: str) -> ctypes.CDLL:
    host_library.build(folder / host_library.NAME, defines)
    return ctypes.CDLL(str(folder / host_library.NAME))


@pytest.mark.parametrize("defines", [(), ("SIMT_BACKWARDS",)], ids=["forwards", "backwards"])
def test_topk_gather_is_its_operator(tmp_path: Path, defines: tuple[str, ...]) -> None:
    check_topk_gather(library(tmp_path, *defines), 30, 0, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == [host_library.NAME]


def test_a_wrong_tie_is_caught_with_its_shape(tmp_path: Path) -> None:
    wrong = library(tmp_path, "TIE_SHIFT=1")
    with pytest.raises(UserError, match=r"kernel of TopKGather is wrong: its \w+ is not .*tokens=\d+, k=\d+.*seed 7"):
        check_topk_gather(wrong, 30, 7, "cpu")


class Harmful:
    """Stands in for a library whose kernel fails, or writes where nobody asked."""

    def __init__(self, right: ctypes.CDLL, error: int) -> None:
        self.right, self.error = right, error

    def unicache_topk_gather(self, score, rows, index, heads, tokens, k, stream) -> int:
        done = self.right.unicache_topk_gather(score, rows, index, heads, tokens, k, stream)
        ctypes.memset(index.value + 8 * heads * k, 0, 1)
        return self.error or done


@pytest.mark.parametrize(("error", "told"), [(700, "it ended with CUDA error 700"), (0, "it wrote behind its output")])
def test_a_kernel_that_fails_or_writes_too_far_is_wrong(tmp_path: Path, error: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_topk_gather(Harmful(library(tmp_path), error), 1, 0, "cpu")  # type: ignore[arg-type]


def test_sources_that_do_not_compile_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot compile the CUDA kernels for the host: .*error.*") as caught:
        host_library.build(tmp_path / host_library.NAME, ["TIE_SHIFT=)"])
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"no C\+\+ compiler is installed.*apt install g\+\+"):
        host_library.build(tmp_path / host_library.NAME)
