"""The demo bundle, built once for all test processes by the command that the README names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

from engines import bundle as bundles
from engines.bundle import Bundle
from engines.errors import UserError
from engines.plugins import cpu_library, store
from tests import browser

ROOT = Path(__file__).resolve().parents[1]

# A busy machine is no failure; and CI tries the same examples every time, so that a red run is a change's own doing.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")

# Kernels that bundles ship are compiled once, and nothing is put into the home of whoever tests.
os.environ.setdefault(store.FOLDER, str(ROOT / "build" / "libraries"))


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Bundle:
    """The default bundle of the demo model: levels off, balanced, extreme and chat."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "demo-vlm"
    with FileLock(f"{shared}.lock"):
        if not shared.is_dir():
            command = [sys.executable, str(ROOT / "export" / "build.py"), "--out", str(shared)]
            subprocess.run(command, check=True, timeout=1500)
    return bundles.read(shared)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser without a window, see tests/browser.py."""
    yield from browser.started(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def operator_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The ONNX Runtime library of our operators' CPU kernels, built once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    library = (base if worker_id == "master" else base.parent) / cpu_library.NAME
    try:
        cpu_library.compiler()
    except UserError as error:
        pytest.skip(str(error))
    with FileLock(f"{library}.lock"):
        if not library.is_file():
            cpu_library.build(library)
    return library
