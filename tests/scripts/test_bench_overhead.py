"""scripts/bench_overhead.py: what is the loop's time and what the graph's, and what the random decoder is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import bench_overhead
import figures
from engines import bundle as bundles
from runtime.sampling import Sampler
from tests.runtime import toy

BURNT = 0.02  # seconds of the processor's time


def burn() -> None:
    end = time.process_time() + BURNT
    while time.process_time() < end:
        pass


@pytest.fixture(scope="module")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("overhead") / "bundle")


def slower(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    quick = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        burn()
        return quick(*arguments)

    monkeypatch.setattr(owner, name, slow)


def test_report(toy_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkey = ["--level", "tight", "--tokens", "12", "--json", str(tmp_path / "overhead.json")]
    assert bench_overhead.main([str(toy_bundle), *monkey]) == 0
    rows = figures.read(tmp_path / "overhead.json").values["seconds"]
    assert [row["way"] for row in rows] == list(bench_overhead.WAYS)
    for row in rows:
        # 11 decodes; a window of 8 with 4 recent is compacted after the 4th and the 8th: no step begins with those
        assert row["steps"] == 11 - 1 - 2
        assert 0 < row["loop"] < row["step"]
        assert row["handing"] > 0
        assert row["overhead"] > 0
    out = capsys.readouterr().out
    assert all(f"| {way} " in out for way in bench_overhead.WAYS)


def test_time_between_the_graphs_is_the_loops(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, Sampler, "choose")
    for row in bench_overhead.measure(toy_bundle, "tight", 6):
        assert row.step >= row.loop >= BURNT
        assert row.overhead > 0.5


def test_time_in_the_graphs_is_not(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = bench_overhead.Clock

    class Slow:
        def __init__(self, session: Any) -> None:
            self.session = session

        def run(self, *arguments: Any) -> Any:
            burn()
            return self.session.run(*arguments)

    monkeypatch.setattr(bench_overhead, "Clock", lambda session, *rest: clock(Slow(session), *rest))
    for row in bench_overhead.measure(toy_bundle, "tight", 6):
        assert row.step - row.loop >= BURNT
        assert row.overhead < 0.5


def test_the_graph_that_computes_nothing_has_the_decode_graphs_tensors(toy_bundle: Path) -> None:
    graphs = bundles.read(toy_bundle).manifest.graphs
    assert bench_overhead.handing_over(graphs["decode_tight_16"]) > 0


def test_the_default_decoder_is_smollm2_135m() -> None:
    """134,515,008 parameters, as its model card counts them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(bench_overhead.configuration().text_config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


@pytest.mark.slow
def test_a_random_decoder_is_built_and_measured(tmp_path: Path) -> None:
    path = bench_overhead.build(tmp_path, bench_overhead.configuration(layers=1, words=300))
    rows = bench_overhead.measure(path, None, 6)
    assert [row.steps for row in rows] == [4, 4, 4]


def test_mistakes(toy_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_overhead.main([str(toy_bundle), "--keep", "somewhere"]) == 2
    assert bench_overhead.main([str(toy_bundle), "--level", "loose", "--tokens", "2"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "--keep is for a bundle that is built" in first
    assert "give more --tokens" in second
