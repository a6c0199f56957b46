"""scripts/bench_quality.py on a tiny model, and what it makes of figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_quality
from tests.export import test_text_only

WORDS = "the circle is red . what color is the large triangle ? the page has four digits . a blue shape .\n"
LEVELS = ["--levels", "light,dense-document"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a text and one sample."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("quality")
    test_text_only.save(folder / "tiny", "llama", max_position_embeddings=512)
    (folder / "text.txt").write_text(WORDS * 200)
    test_text_only.texts(folder / "samples")
    return folder


def options(folder: Path, *more: str) -> list[str]:
    own = ["--text", str(folder / "text.txt"), "--samples", str(folder / "samples"), "--quick"]
    return [str(folder / "tiny"), *own, *LEVELS, *more]


@pytest.fixture(scope="module")
def measured(folder: Path) -> Path:
    """The file of figures of a run that came to its end."""
    assert bench_quality.main(options(folder, "--json", str(folder / "quality.json"))) == 0
    return folder / "quality.json"


def test_figures(measured: Path) -> None:
    found = json.loads(measured.read_text())
    assert [row["passage"] for row in found["perplexity"]] == ["text 1/2", "text 2/2"]
    assert len(found["needles"]) == 2
    assert [*found["levels"]] == ["off", "light", "dense-document"]
    for row in found["perplexity"]:
        loss = row["loss"]
        assert loss["light"] == pytest.approx(loss["off"], rel=0.05)
        assert loss["light"] != loss["off"] != loss["dense-document"]
    assert found["levels"]["off"]["context"] == 1
    assert found["levels"]["dense-document"]["context"] < found["levels"]["light"]["context"]


def test_finished_figures_are_shown_without_the_model(
    folder: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_quality, "measure", None)
    assert bench_quality.main(options(folder, "--json", str(measured))) == 0
    shown = capsys.readouterr().out
    for level in ("off", "light", "dense-document"):
        assert shown.count(f"| {level} ") == 2
    assert "2 passages: 96 tokens are compressed, the 24 behind them are scored." in shown


def test_killed_it_goes_on_where_it_was(folder: Path, measured: Path, tmp_path: Path) -> None:
    whole = json.loads(measured.read_text())
    part = whole | {"perplexity": whole["perplexity"][:1], "needles": whole["needles"][:1]}
    part["perplexity"][0]["loss"]["off"] = 1.5  # kept, since it is not measured again
    (tmp_path / "quality.json").write_text(json.dumps(part))
    assert bench_quality.main(options(folder, "--json", str(tmp_path / "quality.json"))) == 0
    found = json.loads((tmp_path / "quality.json").read_text())
    assert found["perplexity"][0]["loss"]["off"] == 1.5
    assert found["perplexity"][1:] == json.loads(measured.read_text())["perplexity"][1:]
    assert found["needles"] == whole["needles"]


FOUND: dict[str, Any] = {
    "sizes": {"context": 10, "scored": 5, "haystacks": 1, "needle_context": 20},
    "levels": {
        "off": {"context": 1.0, "needle_context": 1.0, "guard": ""},
        "small": {"context": 0.25, "needle_context": 0.2, "guard": ""},
    },
    "perplexity": [
        {"passage": "a", "loss": {"off": 2.0, "small": 2.2}},
        {"passage": "b", "loss": {"off": 4.0, "small": 4.0}},
    ],
    "needles": [{"right": {"off": right, "small": i == 0}} for i, right in enumerate([True, True, True, False])],
    "seconds": 1.0,
}


def test_perplexity_is_of_all_passages_and_its_change_is_paired() -> None:
    *_, off, small = bench_quality.perplexities(FOUND)
    assert [cell.strip() for cell in off.split("|")[1:-1]] == ["off", "1.000", f"{math.exp(3):.2f}", ""]
    # the mean loss is 0.1 more; the passages' 0.2 and 0 have a standard error of 0.1
    assert [cell.strip() for cell in small.split("|")[2:-1]] == ["0.250", f"{math.exp(3.1):.2f}", "+10.5 ± 11.1"]


def test_peers_stand_beside_the_level_whose_bytes_they_take() -> None:
    peers = [{"method": "KeyDiff", "level": "small", "found": [True, True, False, False]}]
    head, _, off, small = bench_quality.retrieval(FOUND, peers)
    assert "kvpress KeyDiff, %" in head
    assert [cell.strip() for cell in off.split("|")[1:-1]] == ["off", "1.000", "75 ± 22", ""]
    assert [cell.strip() for cell in small.split("|")[1:-1]] == ["small", "0.200", "25 ± 22", "50 ± 25"]


def test_mistakes(folder: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ["--json", str(measured)]
    (tmp_path / "peers.json").write_text(json.dumps({"sizes": {}, "levels": {}, "rows": []}))
    tried = {
        "was measured with other sizes: give another --json": [*kept, "--scored", "25"],
        "is not of these prompts and bytes": [*kept, "--peers", str(tmp_path / "peers.json")],
        "recipe realtime-chat changes the model itself": ["--levels", "realtime-chat"],
        "texts of 600 tokens are wanted, and": ["--context", "576"],
        "is not a folder": ["--json", str(tmp_path / "no" / "quality.json")],
    }
    for told, more in tried.items():
        assert bench_quality.main(options(folder, *more)) == 2
        assert told in capsys.readouterr().err


def test_a_needle_is_found_if_every_token_is_the_likeliest() -> None:
    log_probs = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert bench_quality._found(log_probs, [1, 0])
    assert not bench_quality._found(log_probs, [1, 1])
