"""scripts/bench_compact.py: compactions are told from steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import bench_compact
import figures
from runtime.state import State
from tests.runtime import toy


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("compact") / "bundle")


def measured(bundle: Path, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    file = tmp_path / "compact.json"
    assert bench_compact.main([str(bundle), "--tokens", "40", "--times", "1", "--json", str(file), *options]) == 0
    return list(figures.read(file).values["rows"])


def test_a_slow_compaction_has_its_share_and_takes_no_step_longer(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compacted = State.compacted

    def slow(state: State, outputs: Any) -> None:
        time.sleep(0.05)
        compacted(state, outputs)

    monkeypatch.setattr(State, "compacted", slow)
    (row,) = measured(bundle, tmp_path, "--levels", "tight")
    assert row["between"] == row["window"] - row["recent"]
    assert row["compactions"] == pytest.approx(40 / row["between"], abs=2)
    assert row["compaction"] > 0.05
    assert row["step"] < 0.05
    assert 0.5 < row["share"] < 1
    assert "| tight " in capsys.readouterr().out


def test_levels_that_never_compact_are_left_out(bundle: Path, tmp_path: Path) -> None:
    assert "loose" not in {row["level"] for row in measured(bundle, tmp_path)}


def test_too_few_tokens_are_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_compact.main([str(bundle), "--levels", "tight", "--tokens", "3", "--times", "1"]) == 2
    assert "tell nothing: give more --tokens" in capsys.readouterr().err
