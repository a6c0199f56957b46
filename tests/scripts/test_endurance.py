"""scripts/endurance.py, and what it is for: nothing grows with the tokens of a session, asked without a clock."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

import endurance
import runtime
from endurance import Part, verdict
from runtime.session import Session
from tests.runtime import toy, toy_graphs

PART = 40


@pytest.fixture(scope="module")
def long_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with more positions, and the weights that belong to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "POSITIONS", 5000)
        for seed, name in enumerate(("position", "segment")):
            patch.setitem(toy.WEIGHTS, name, toy_graphs.drawn(toy.POSITIONS, toy.HIDDEN, seed=seed))
        return toy.build(tmp_path_factory.mktemp("long") / "bundle")


def test_nothing_grows_with_the_tokens(long_toy: Path) -> None:
    """Neither the state nor what Python holds: an array a step would be 200 bytes, a token and its text are 20."""
    session = Session(runtime.open(long_toy, level="tight", threads=1))
    shapes, held = set[object](), list[int]()
    tracemalloc.start()
    try:
        stream = session.stream("what is it", (), 4000, ignore_eos=True)
        while len(stream.answer.tokens) < 4000 and next(stream, None) is not None:
            assert session.context
            arrays = session.context.state.arrays.items()
            shapes.add(tuple((name, array.shape, array.dtype) for name, array in arrays))
            if len(stream.answer.tokens) > 1000 * (1 + len(held)):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(shapes) == 1
    assert held[-1] - held[0] < 64 * 2000


def test_report(
    long_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endurance, "PART", PART)
    vlm = runtime.open(long_toy, level="tight", threads=1)
    parts, fresh = endurance.measure(vlm, 4 * PART, PART)
    assert [part.tokens for part in parts] == [PART, 2 * PART, 3 * PART, 4 * PART]
    assert fresh.tokens == PART
    state = Session(vlm)
    state.ask(endurance.QUESTION, max_new_tokens=1)
    assert state.context
    for part in (*parts, fresh):
        assert part.kv_bytes == (state.context.state.nbytes,) * 2
        assert part.step
        assert part.compacting  # a window of 8 with 4 recent is compacted at every fourth token
    file = tmp_path / "endurance.json"
    asked = [str(long_toy), "--level", "tight", "--tokens", str(2 * PART), "--json", str(file)]
    code = endurance.main(asked)
    told = json.loads(file.read_text())
    assert code == (not told["held"])
    assert (told["level"], len(told["parts"]), told["fresh"]["tokens"]) == ("tight", 2, PART)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == [str(PART), str(2 * PART)]


def test_what_grows_or_gets_slower_is_told() -> None:
    first = Part(1000, 0.001, 0.002, (500, 500), 10**6)
    last = replace(first, tokens=2000)
    assert verdict([first, last], first)[1]
    assert verdict([first, replace(last, compacting=0.009)], first)[1]
    for change in ({"step": 0.00111}, {"kv_bytes": (500, 501)}, {"process_bytes": 1_020_001}):
        assert not verdict([first, replace(last, **change)], first)[1]
    assert "ratio 1.050" in verdict([first, replace(last, step=0.00105)], first)[0]


def test_mistakes(long_toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ("--tokens 1500", "--tokens 1000", "--level tight --tokens 6000", "--level loose", "--level a"):
        assert endurance.main([str(long_toy), *options.split()]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in said] == ["error:"] * 5
    assert "--tokens must be 2000, 3000, ..., got 1500" in said[0]
    assert "(max_positions), and level tight has 5000 positions: give fewer" in said[2]
    assert "(window_full), and level loose has" in said[3]
