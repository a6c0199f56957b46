"""scripts/soak.py: a short one is right, a wrong answer, a forgotten refusal and growing memory are found."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import soak
from runtime.model import VLM
from soak import MALFORMED, Outcome, Turn, malformed, quarters, refused, verdict
from tests.runtime import toy

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
MIB = 2**20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("soak") / "bundle")


def run(bundle: Path, *options: Any) -> int:
    line = [bundle, "--level", "tight", "--requests", 60, "--chats", 6, *options]
    return soak.main([str(each) for each in line])


def test_a_short_soak(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bundle, "--json", tmp_path / "soak.json") == 0
    told = capsys.readouterr().out
    values = json.loads((tmp_path / "soak.json").read_text())
    kinds = Counter(each["kind"] for each in values["requests"])
    assert len(values["requests"]) == sum(kinds.values()) == 60
    assert kinds.keys() == {"answered", "leaves", "malformed"}
    assert {each["verdict"] for each in values["requests"]} == {"right"}
    assert f"| answered  | {kinds['answered']} " in told
    assert "60 requests, 0 wrong" in told
    assert min(each["resident"] for each in values["requests"]) > 20 * MIB


def test_an_answer_that_differs_is_found(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = soak.chats

    def other(*given: Any) -> list[Turn]:
        return [Turn(turn.body, f"no {turn.expected}") for turn in chats(*given)]

    monkeypatch.setattr(soak, "chats", other)
    assert run(bundle) == 1
    assert "wrong: answered: " in capsys.readouterr().out


def outcomes(sizes: list[int], kinds: str = "right") -> list[Outcome]:
    return [Outcome("answered", kinds, "", 0.1, size) for size in sizes]


def test_memory_is_judged_by_the_last_quarter() -> None:
    flat = outcomes([10, 50, 100, 100, 100, 100, 102, 102])
    assert quarters(flat) == [30, 100, 100, 102]
    assert verdict(flat)[1]
    assert not verdict(outcomes([10, 50, 100, 100, 100, 100, 103, 103]))[1]
    assert verdict(outcomes([10, 50, 100, 100, 100, 100, 60, 60]))[1]
    assert not verdict(outcomes([100] * 8, "wrong"))[1]
    assert verdict(outcomes([100] * 8, "refused for memory"))[1]


def test_what_is_right_to_refuse() -> None:
    assert refused("malformed", 400, {"error": {}})[0] == "right"
    assert refused("malformed", 200, {"choices": []})[0] == "wrong"
    assert refused("malformed", 500, {"error": {}})[0] == "wrong"
    assert refused("answered", 400, {"error": {"message": "no"}})[0] == "wrong"
    assert refused("answered", 503, {"error": {"code": "memory_in_use"}})[0] == "refused for memory"
    assert refused("answered", 503, {"error": {"code": "shutting_down"}})[0] == "wrong"


def test_chats_are_as_mixed_as_they_are_said_to_be(bundle: Path) -> None:
    turns = soak.chats(VLM.open(bundle, level="tight", threads=1), "bundle", 25, random.Random(1))
    users = [sum(message["role"] == "user" for message in turn.body["messages"]) for turn in turns]
    assert {*users} >= {1, 2, 3, 4}
    contents = [[m["content"] for m in turn.body["messages"] if isinstance(m["content"], list)] for turn in turns]
    images = [sum(part["type"] == "image_url" for content in each for part in content) for each in contents]
    assert {*images} >= {1, 2, 3, 5, 8}
    dice = random.Random(0)
    assert len({malformed(turns[0], dice) for _ in range(200)}) > 7
    assert 0 < MALFORMED < 0.06
