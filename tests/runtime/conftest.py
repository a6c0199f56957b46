from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import runtime
from runtime.model import VLM
from runtime.session import Session
from tests.runtime import toy
from tests.runtime.asking import Recorder, image


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy bundle, never to be changed: tests that damage one copy it."""
    return toy.build(tmp_path_factory.mktemp("toy") / "bundle")


@pytest.fixture(scope="session")
def of_batch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The toy bundle that decodes so many requests at once."""

    @cache
    def build(batch: int) -> Path:
        return toy.build(tmp_path_factory.mktemp("toy") / "bundle", batch=batch)

    return build


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture(scope="session")
def tight(bundle_path: Path) -> VLM:
    """The toy at the level that compacts."""
    return runtime.open(bundle_path, level="tight", threads=1)


@pytest.fixture(scope="session")
def saved(tight: VLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session's file, never to be changed."""
    session = Session(tight)
    session.ask("what is it", [image(0)], 6, ignore_eos=True)
    path = tmp_path_factory.mktemp("saved") / "chat.safetensors"
    session.save(path)
    return path
