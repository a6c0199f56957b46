import sys
import textwrap
from pathlib import Path

import pytest
from filelock import FileLock

from engines import trt
from engines.errors import UserError
from engines.plugins import cuda_library, store
from tests.conftest import shared
from tests.engines.small_bundle import write
from tests.engines.trt_builder import STAND_IN


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="session")
def plugin_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The TensorRT plugin library of this checkout, built once for all test processes and bundles."""
    try:
        cuda_library.find_nvcc(), cuda_library.find_headers()
    except UserError as error:
        pytest.skip(str(error))
    with FileLock(shared(tmp_path_factory, worker_id, "cuda.lock")):
        return store.cuda().path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `tensorrt` that builds nothing, on a machine with an Orin's GPU.

    Returns:
        Its record: process and graph, a line a build.
    """
    package = tmp_path / "package"
    package.mkdir()
    (package / "tensorrt.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.syspath_prepend(package)
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # undone last: whatever a test imports is gone after it
    monkeypatch.delitem(sys.modules, "tensorrt")
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.setattr(trt, "gpu", lambda: "sm_87")
    return tmp_path / "record"
