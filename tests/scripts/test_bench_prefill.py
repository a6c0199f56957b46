"""scripts/bench_prefill.py: levels that differ in their visual tokens alone, measured in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_prefill
import figures
from bench_prefill import Turn
from tests.runtime import toy


@pytest.mark.slow
def test_the_smoke_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prefill.json"
    assert bench_prefill.main(["--quick", "--json", str(file)]) == 0
    rows = figures.read(file).values["rows"]
    assert [(row["images"], row["pruned"], row["tokens"]) for row in rows] == [(1, 0, 16), (1, 75, 4)]
    for row in rows:
        assert row["tokens"] < row["bucket"] < row["tokens"] + 100
        assert 0 < row["prefill"] < row["first"]
        assert row["vision"] > row["selecting"] >= 0
    assert {row["prefill_ratio"] for row in rows if row["pruned"] == 0} == {1.0}
    assert "pruned, %" in capsys.readouterr().out


def test_ratios_are_of_the_same_turn() -> None:
    whole = [Turn(1.0, 8.0, 10.0), Turn(1.0, 80.0, 100.0), Turn(1.0, 4.0, 6.0)]
    pruned = [Turn(1.5, 2.0, 5.0), Turn(1.5, 20.0, 50.0), Turn(1.5, 1.0, 3.0)]
    row = bench_prefill.row(8, "pruned-75", [512, 540], pruned, whole)
    assert (row.pruned, row.tokens, row.bucket) == (75, 512, 540)
    assert (row.prefill_ratio, row.first_ratio) == (4.0, 2.0)
    assert row.selecting == 0.5
    assert row.share == pytest.approx(0.5 / 2.5)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(toy.build(tmp_path / "bundle"))
    for options in ([bundle, "--keep", "x"], [bundle], ["--pruned", "100"], ["--images", "0"]):
        assert bench_prefill.main(options) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 4
    assert "was not built by this script" in told[1]
