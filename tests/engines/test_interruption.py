"""Who interrupts a command while it still imports sees no stack trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

MODULES = ("runtime", "engines", "engines.plugins", "calibration")
COMMANDS = [*(["-m", name] for name in MODULES), ["export/build.py"], ["scripts/accuracy.py"]]


def started(line: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command that is interrupted when it imports the first package that all of them do."""
    (folder / "argparse.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *line, "--help"], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("line", COMMANDS, ids=" ".join)
def test_an_early_interruption_leaves_no_trace(line: list[str], tmp_path: Path) -> None:
    done = started(line, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interruption_that_is_ignored_stays_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert started(COMMANDS[0], tmp_path).returncode != -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


def test_importing_changes_no_signal() -> None:
    code = "import signal, runtime.__main__, engines.__main__; assert signal.getsignal(2) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
