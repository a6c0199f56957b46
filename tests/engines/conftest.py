from pathlib import Path

import pytest

from tests.engines.small_bundle import write


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "bundle")
    return tmp_path / "bundle"
