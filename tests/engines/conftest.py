from pathlib import Path

import pytest
from filelock import FileLock

from engines.errors import UserError
from engines.plugins import cuda_library
from tests.engines.small_bundle import write


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="session")
def plugin_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The TensorRT plugin library of this checkout, built once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / cuda_library.NAME
    with FileLock(f"{shared}.lock"):
        if not shared.is_file():
            try:
                cuda_library.find_nvcc(), cuda_library.find_headers()
            except UserError as error:
                pytest.skip(str(error))
            cuda_library.build(shared)
    return shared
