"""scripts/kvpress_needles.py without kvpress: what is asked at which bytes, and what is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpress_needles
from engines.errors import UserError
from kvpress_needles import NOTHING
from needles import Needle
from tests.scripts.test_needles import TEXT, Letters

SIZES = {"haystacks": 2, "needle_context": 2000, "needles": 2}
LEVELS = {"off": 1.0, "balanced": 0.2, "extreme": 0.1}


class Reader:
    """Finds what lies in the second half, unless nine in ten tokens are dropped."""

    tokenizer = Letters()
    read_texts = 0

    def read(self, ids: list[int], before: Any = None) -> tuple[Any, int]:
        self.read_texts += before is None
        return "seen", ids[-1]

    def finds(self, needle: Needle, seen: Any, first: int, press: float | None) -> bool:
        assert (seen, first) == ("seen", needle.tail[-1])
        return needle.depth > 0.5 and (press is None or press < 0.85)


@pytest.fixture(autouse=True)
def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A press is the share that it drops."""
    monkeypatch.setattr(kvpress_needles, "presses", lambda: {"KeyDiff": float})


def test_levels_are_compared_with_their_share_of_the_tokens() -> None:
    found: dict[str, Any] = {"sizes": SIZES, "levels": LEVELS, "rows": []}
    kept: list[str] = []
    reader = Reader()
    keep = lambda: kept.append(json.dumps(found["rows"]))  # noqa: E731
    kvpress_needles.measure(reader, found, {"lines": TEXT}, ["KeyDiff"], keep)  # type: ignore[arg-type]
    assert [(row["method"], row["level"], row["share"], row["found"]) for row in found["rows"]] == [
        (NOTHING, "off", 1.0, [False, True, False, True]),
        ("KeyDiff", "balanced", 0.2, [False, True, False, True]),
        ("KeyDiff", "extreme", 0.1, [False, False, False, False]),
    ]
    assert reader.read_texts == 2
    # killed after the first haystack, it goes on with the second
    begun = found | {"rows": json.loads(kept[0])}
    again = Reader()
    kvpress_needles.measure(again, begun, {"lines": TEXT}, ["KeyDiff"], lambda: None)  # type: ignore[arg-type]
    assert again.read_texts == 1
    assert begun == found


def test_other_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"sizes": SIZES, "levels": {name: {"needle_context": share} for name, share in LEVELS.items()}}
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    (tmp_path / "peers.json").write_text(json.dumps({"sizes": {}, "levels": LEVELS, "rows": []}))
    files = ["--ours", str(tmp_path / "ours.json"), "--json", str(tmp_path / "peers.json")]
    assert kvpress_needles.main([str(tmp_path), *files]) == 2
    assert "is of other prompts or bytes" in capsys.readouterr().err


def test_without_kvpress_it_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(UserError, match="an environment of its own"):
        kvpress_needles.presses()


def test_levels_of_a_method_share_its_scores() -> None:
    scored: list[tuple[int, str]] = []

    class Press:
        def __init__(self, dropped: float):
            self.dropped = dropped

        def score(self, module: Any, hidden: str) -> str:
            scored.append((module.layer_idx, hidden))
            return f"{hidden} in layer {module.layer_idx}"

    make = kvpress_needles.scoring_once(Press)
    layers = [SimpleNamespace(layer_idx=index) for index in range(2)]
    for hidden in ("one", "other"):
        for dropped in (0.5, 0.9):
            press = make(dropped)
            assert press.dropped == dropped
            assert [press.score(layer, hidden) for layer in layers] == [f"{hidden} in layer {i}" for i in range(2)]
    assert scored == [(0, "one"), (1, "one"), (0, "other"), (1, "other")]
