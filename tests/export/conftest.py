"""Models that the tests share: a tiny random one with grouped-query heads, and the demo checkpoint."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch.onnx._internal.exporter import _registration
from transformers import AutoModelForImageTextToText

from export import build as builder
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from tests.export import tiny

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo-vlm"
RECIPE = Path(__file__).with_name("small.toml")


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    """One thread, and the exporter's table of operators is made once: it is the same for every graph."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        apis = _registration.onnxscript_apis
        patch.setattr(apis, "get_torchlib_ops", functools.cache(apis.get_torchlib_ops))
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's folder, never to be changed: tests that damage one copy it."""
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return checkpoints.load(tiny_path)


@pytest.fixture(scope="session")
def reference(tiny_path: Path) -> Any:
    """The tiny model with Hugging Face's own eager attention."""
    return _hugging_face(tiny_path)


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    return checkpoints.load(DEMO)


@pytest.fixture(scope="session")
def demo_reference() -> Any:
    return _hugging_face(DEMO)


def _hugging_face(path: Path) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # the tests compare what comes after the end token too
    return model


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """What `make` writes at a path, atomically, made by whichever test process comes first and shared by all."""
    base = factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with FileLock(base / f"{name}.lock"):
        if not (base / name).exists():
            make(base / name)
    return base / name


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Path:
    """The tiny checkpoint's bundle with one level of every stage, never to be changed."""
    return once(
        tmp_path_factory, "tiny-bundle", lambda out: build(tiny_path, "--out", out, "--recipe", RECIPE, "--batch", 3)
    )


def build(*arguments: object, guard: str = "off") -> str:
    """Run export/build.py as a user does; its standard output. What random models lose tells nothing: no guard."""
    command = [sys.executable, ROOT / "export" / "build.py", "--guard", guard, *arguments]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(tiny_path, tmp_path / "checkpoint")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a build that must fail; the line it prints."""

    def run(*arguments: object) -> str:
        folder = tmp_path / "built"
        folder.mkdir()
        assert builder.main([*map(str, arguments), "--out", str(folder / "bundle")]) == 2
        assert list(folder.iterdir()) == []
        return one_line(capsys.readouterr().err)

    return run


def one_line(text: str) -> str:
    assert text.startswith("error: "), text
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    return text
