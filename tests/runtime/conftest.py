from pathlib import Path

import pytest

from tests.runtime import toy
from tests.runtime.asking import Recorder


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy bundle, never to be changed: tests that damage one copy it."""
    return toy.build(tmp_path_factory.mktemp("toy") / "bundle")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)
