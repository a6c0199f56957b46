"""The demo bundle, built once for all test processes by the command that the README names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from engines import bundle as bundles
from engines.bundle import Bundle

ROOT = Path(__file__).resolve().parents[1]

# A busy machine is no failure; and CI tries the same examples every time, so that a red run is a change's own doing.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")


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
