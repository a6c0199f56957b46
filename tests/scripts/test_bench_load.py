"""scripts/bench_load.py: starts of a process are told part by part; what is no bundle or checkpoint is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_load
import figures
from tests.export import tiny
from tests.runtime import toy


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("load") / "bundle")


def test_the_parts_of_a_start(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    options = ["--question", "what is it", "--tokens", "3", "--quick", "--json", str(file)]
    assert bench_load.main([str(bundle), *options]) == 0
    starts = figures.read(file).values["starts"]
    assert {*starts} == {"warm", "cold"}
    for state in starts.values():
        (one,) = state["runtime"]
        seconds = [one["marks"][part]["seconds"] for part in ("python", "import", "open", "first token", "end")]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        memory = one["marks"]["end"]
        assert memory["anonymous"] <= memory["resident"] <= memory["peak"]
        assert len(one["tokens"]) <= 3
        assert one["kv_bytes"] > 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| runtime")]
    assert [row.split("|")[2].strip() for row in rows] == ["warm", "cold"]
    assert {row.split("|")[6].strip() for row in rows} == {"1.0"}


@pytest.mark.slow
def test_transformers_beside_it(bundle: Path, tmp_path: Path) -> None:
    """Another model than the bundle's, which is no matter for what is tested: that both are started and told."""
    file, checkpoint = tmp_path / "load.json", tiny.save(tmp_path / "checkpoint")
    options = ["--question", "what is it", "--tokens", "3", "--quick", "--json", str(file)]
    assert bench_load.main([str(bundle), "--checkpoint", str(checkpoint), *options]) == 0
    found = figures.read(file)
    (theirs,) = found.values["starts"]["warm"]["transformers"]
    (ours,) = found.values["starts"]["warm"]["runtime"]
    assert len(theirs["tokens"]) == 3
    assert theirs["marks"]["import"]["seconds"] > ours["marks"]["import"]["seconds"]
    assert theirs["marks"]["end"]["peak"] > ours["marks"]["end"]["peak"]
    assert {"torch", "transformers"} < {*found.versions}


def test_mistakes(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_load.main([str(tmp_path)]) == 2
    assert bench_load.main([str(bundle), "--checkpoint", str(tmp_path)]) == 2
    assert bench_load.main([str(bundle), "--quick", "--level", "none"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "is no checkpoint" in told[1]
    assert "no level 'none'" in told[2]
