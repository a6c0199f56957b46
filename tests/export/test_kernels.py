"""The libraries that a bundle ships: what can be compiled, and what is said of the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UserError
from engines.plugins import cpu_library, store
from export import build, kernels
from tests.export.conftest import RECIPE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    (tmp_path / "bundle").mkdir()
    return tmp_path / "bundle"


def compile_quickly(out: Path) -> list[str]:
    out.write_bytes(b"native code")
    return ["plain"]


def refuse(*_: Any) -> Any:
    raise UserError("no compiler: install one")


def test_never_ships_nothing(folder: Path) -> None:
    assert kernels.prepare(folder, "never") == kernels.Kernels()
    assert [*folder.iterdir()] == []


def test_a_library_lies_in_the_bundle_and_is_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "build", compile_quickly)
    made = kernels.prepare(folder, "auto")
    assert made.cpu == folder / cpu_library.NAME
    assert made.cpu.read_bytes() == b"native code"
    assert [(library.file, library.architectures) for library in made.libraries] == [(cpu_library.NAME, ["plain"])]
    assert made.missing == []


def test_without_a_compiler_the_bundle_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "build", refuse)
    made = kernels.prepare(folder, "auto")
    assert made == kernels.Kernels(missing=[f"{cpu_library.NAME}: no compiler: install one"])
    with pytest.raises(UserError, match="no compiler"):
        kernels.prepare(folder, "always")


@pytest.mark.parametrize(
    ("file", "right", "wrong", "operator"),
    [
        ("topk_gather.cc", "index[kept++] = i;", "index[kept++] = i ? i - 1 : i;", "prefill"),
        ("ort.cc", "arguments.window = window,", "arguments.window = window - 1,", "decode"),
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
    operator: str,
) -> None:
    """The library for ONNX Runtime is compiled from a copy of its sources in which one place is changed."""
    copy = shutil.copytree(cpu_library.FOLDER.parent, tmp_path / "sources")
    monkeypatch.setattr(cpu_library, "FOLDER", copy / cpu_library.FOLDER.name)
    source = cpu_library.FOLDER / file
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    out = tmp_path / "built" / "bundle"
    small = ["--recipe", str(RECIPE), "--images", "1", "--text-tokens", "8", "--jobs", "1"]
    assert build.main([str(tiny_path), "--out", str(out), *small, "--kernels", "always"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{operator}" in error
    assert f"with the kernels of {cpu_library.NAME}" in error
    assert [*out.parent.iterdir()] == []
    assert build.main([str(tiny_path), "--out", str(out), *small, "--kernels", "never"]) == 0
