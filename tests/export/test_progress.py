"""What a build tells of itself where nobody looks on: at once, not at its end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from export.progress import progress


def test_in_a_file_a_task_is_told_when_it_is_done_and_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = io.StringIO(), [0.0]
    with progress(Console(file=file)) as bar:
        monkeypatch.setattr(bar, "get_time", lambda: now[0])
        task = bar.add_task("guarding", total=4)
        told = []
        for now[0] in (30.0, 61.0, 90.0, 100.0):
            bar.advance(task)
            told.append([line.split()[-2] for line in file.getvalue().splitlines()])
        assert told == [[], ["2/4"], ["2/4"], ["2/4", "4/4"]]
    assert file.getvalue().count("guarding") == 2


def test_a_terminal_has_bars() -> None:
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=True)) as bar:
        bar.advance(bar.add_task("guarding", total=1))
    assert "\x1b[" in file.getvalue()
