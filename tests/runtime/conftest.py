from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import runtime
from engines import bundle as bundles
from engines.bundle import Bundle
from runtime import memory, probe
from runtime.memory import MIB, Cost
from runtime.model import VLM
from runtime.session import Session
from tests.runtime import toy
from tests.runtime.asking import Recorder, image
from tests.runtime.budgeted import bare


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


@pytest.fixture(scope="session")
def opened(bundle_path: Path) -> Bundle:
    return bundles.read(bundle_path)


@pytest.fixture(scope="session")
def costs(opened: Bundle) -> dict[str, Cost]:
    """Of the toy's graphs, as if they were large: what they take is what the test says, not what was measured."""
    return {name: Cost(20 * MIB, 10 * MIB) for name in opened.manifest.graphs}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process of 100 MiB that holds what the test says."""
    state = SimpleNamespace(resident=100 * MIB)
    monkeypatch.setattr(memory, "resident", lambda: state.resident)
    bare(monkeypatch)
    return state


@pytest.fixture
def limited(
    bundle_path: Path, costs: dict[str, Cost], process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., VLM]:
    """Opens the toy with a budget of so many MiB; each loaded graph takes 20 of them."""
    monkeypatch.setattr(probe, "costs", lambda *_: costs)
    return lambda mib, level="loose": runtime.open(bundle_path, level=level, threads=1, memory_budget=f"{mib}MiB")
