"""The demo bundle, built once for all test processes by the command that the README names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
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

# Tests run with nohup, or in the background of a script, inherit signals that are ignored, and so do their children.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Kernels that bundles ship are compiled once, and nothing is put into the home of whoever tests.
os.environ.setdefault(store.FOLDER, str(ROOT / "build" / "libraries"))


def shared(factory: pytest.TempPathFactory, worker_id: str, name: str) -> Path:
    """A path that is the same for all test processes."""
    base = factory.getbasetemp()
    return (base if worker_id == "master" else base.parent) / name


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Bundle:
    """The default bundle of the demo model: levels off, balanced, extreme and chat."""
    path = shared(tmp_path_factory, worker_id, "demo-vlm")
    with FileLock(f"{path}.lock"):
        if not path.is_dir():
            command = [sys.executable, str(ROOT / "export" / "build.py"), "--out", str(path)]
            subprocess.run(command, check=True, timeout=1500)
    return bundles.read(path)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser without a window, see tests/browser.py."""
    yield from browser.started(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def operator_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The ONNX Runtime library of our operators' CPU kernels, built once for all test processes and bundles."""
    try:
        cpu_library.compiler()
    except UserError as error:
        pytest.skip(str(error))
    with FileLock(shared(tmp_path_factory, worker_id, "cpu.lock")):
        return store.cpu().path
