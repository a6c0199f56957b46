"""scripts/accuracy.py: its arithmetic on answers made by hand, and the whole of it on the toy bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import accuracy
from accuracy import CHUNK, Cell, Outcome
from demo_vlm.suites import Item
from engines.errors import UserError
from tests.runtime import toy

IMAGE = np.zeros((8, 8, 3), np.uint8)
RIGHT, WRONG = Outcome(True, 25, 100), Outcome(False, 50, 100)


def items(count: int, kind: Any = "page") -> list[Item]:
    return [Item([IMAGE], f"what is {i} ?", str(i), kind) for i in range(count)]


class FakeVLM:
    """Answers with the number in the question, wrongly from `breaks_at` on; refuses questions about 7."""

    def __init__(self, breaks_at: int) -> None:
        self.breaks_at = breaks_at
        self.calls: list[dict[str, Any]] = []

    def generate(self, question: str, images: list[np.ndarray], max_new_tokens: int, **options: Any) -> SimpleNamespace:
        self.calls.append({"question": question, "images": len(images), "max_new_tokens": max_new_tokens, **options})
        number = int(question.split()[2])
        if number == 7:
            raise UserError("too long: 70 tokens")
        text = f" {number} \n" if number < self.breaks_at else "no idea"
        return SimpleNamespace(text=text, stats=SimpleNamespace(kv_bytes=number, kv_bytes_uncompressed=100))


def open_fake(level: str) -> Any:
    return FakeVLM({"off": 1000, "extreme": CHUNK + 3}[level])


def test_accuracy_and_its_binomial_error() -> None:
    cell = Cell("page1", "prompt", "off", [RIGHT, RIGHT, RIGHT, WRONG], 0)
    assert cell.accuracy == 0.75
    assert cell.standard_error == pytest.approx(sqrt(0.75 * 0.25 / 4))
    assert cell.change is None


def test_change_counts_only_answers_that_differ() -> None:
    reference = [RIGHT, RIGHT, WRONG, RIGHT, RIGHT]
    cell = Cell("page1", "prompt", "extreme", [WRONG, RIGHT, RIGHT, WRONG, RIGHT], 0, reference)
    differences = [-1, 0, 1, -1, 0]
    assert cell.change == pytest.approx((np.mean(differences), np.std(differences) / sqrt(5)))
    assert Cell("page1", "prompt", "light", reference, 0, reference).change == (0, 0)


def test_kv_ratio_mean_and_worst_leave_out_what_was_refused() -> None:
    cell = Cell("page1", "prompt", "off", [RIGHT, WRONG, Outcome(False, refused="too long")], 0)
    assert cell.kv_ratios == [0.25, 0.5]
    written = cell.as_json()
    assert (written["kv_ratio_mean"], written["kv_ratio_worst"], written["refused"]) == (0.375, 0.5, 1)
    assert written["kv_bytes_mean"] == 37.5
    assert written["accuracy"] == pytest.approx(1 / 3)


def test_answers_are_compared_stripped_and_in_lower_case() -> None:
    replies = {"a": " Red\n", "b": "red", "c": "blue", "d": "red shape"}

    def reply(question: str, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(text=replies[question], stats=SimpleNamespace(kv_bytes=1, kv_bytes_uncompressed=2))

    asked = [Item([IMAGE], question, "RED" if question == "b" else "red", "easy") for question in replies]
    outcomes = accuracy.ask(SimpleNamespace(generate=reply), asked, False)  # type: ignore[arg-type]
    assert [outcome.correct for outcome in outcomes] == [True, True, False, False]


def test_a_refused_question_is_wrong_and_says_why() -> None:
    model = FakeVLM(1000)
    outcomes = accuracy.ask(model, items(9), True)  # type: ignore[arg-type]
    assert [outcome.correct for outcome in outcomes] == [True] * 7 + [False, True]
    assert outcomes[7].refused == "too long: 70 tokens"
    assert {call["question_later"] for call in model.calls} == {True}


@pytest.mark.parametrize("processes", [1, 2])
def test_measure_pairs_every_level_with_off(processes: int) -> None:
    count = 2 * CHUNK + 5
    cells = accuracy.measure({"page1": items(count)}, ["prompt", "later"], ["off", "extreme"], open_fake, processes)
    assert [(cell.regime, cell.level) for cell in cells] == [
        ("prompt", "off"),
        ("prompt", "extreme"),
        ("later", "off"),
        ("later", "extreme"),
    ]
    for cell in cells:
        asked = [n for n in range(count) if n != 7]
        assert cell.kv_ratios == [n / 100 for n in asked]  # in the suite's order, whoever asked them
        right = count - 1 if cell.level == "off" else CHUNK + 2
        assert cell.accuracy == right / count
    assert cells[1].change is not None
    assert cells[1].change[0] == pytest.approx((CHUNK + 2 - (count - 1)) / count)


def test_each_level_is_opened_once() -> None:
    opened: list[str] = []

    def opener(level: str) -> Any:
        opened.append(level)
        return open_fake(level)

    accuracy.measure({"page1": items(3 * CHUNK), "page4": items(2)}, ["prompt"], ["off", "extreme"], opener, 1)
    assert sorted(opened) == ["extreme", "off"]


def test_table_shows_change_ratio_and_refusals() -> None:
    reference = [RIGHT, RIGHT, RIGHT, RIGHT]
    refused = [Outcome(False, refused="the prompt is too long")] * 4
    cells = [
        Cell("easy1", "prompt", "off", reference, 0.67, reference),
        Cell("easy1", "prompt", "extreme", [RIGHT, RIGHT, RIGHT, WRONG], 0.67, reference),
        Cell("page8", "later", "extreme", refused, 0.002),
    ]
    lines = accuracy.table(cells).splitlines()
    off, extreme, page = ([column.strip() for column in line.split("|")[1:-1]] for line in lines[2:5])
    assert off == ["easy1", "prompt", "off", "4", "100.0 ± 0.0", "", "0.250", "0.250", "67.0"]
    assert extreme == ["easy1", "prompt", "extreme", "4", "75.0 ± 21.7", "-25.0 ± 21.7", "0.312", "0.500", "67.0"]
    assert page == ["page8", "later", "extreme", "0", "-", "-", "-", "-", "0.2"]
    assert lines[-1] == "page8, later, extreme: 4 refused, for example: the prompt is too long"


@pytest.fixture
def toy_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy bundle, and a suite whose first answer is what it says at level `loose` and whose second never is."""
    import runtime

    bundle = toy.build(tmp_path / "bundle")
    answer = runtime.open(bundle, level="loose").generate("what is it", [IMAGE], accuracy.MAX_NEW_TOKENS).text
    suite = [Item([IMAGE], "what is it", answer, "page"), Item([IMAGE], "what is it", "never", "page")]
    monkeypatch.setattr(accuracy.held_out, "suites", lambda names, limit: {name: suite[:limit] for name in names})
    monkeypatch.setattr(accuracy.held_out, "fingerprint", lambda name: f"hash of {name}")
    return bundle


def test_toy_bundle_from_command_to_json(toy_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    options = {"levels": "loose,tight", "suites": "page1", "regimes": "prompt", "processes": "1", "json": str(out)}
    command = [str(toy_bundle), *(part for name, value in options.items() for part in (f"--{name}", value))]
    assert accuracy.main(command) == 0
    assert "| page1 | prompt   | loose" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {cell["level"]: cell["questions"] for cell in written["cells"]} == {"loose": 2, "tight": 2}
    loose = written["cells"][0]
    assert (loose["correct"], loose["change"], loose["blind"]) == (1, None, 0)
    assert loose["kv_ratio_mean"] > written["cells"][1]["kv_ratio_mean"] > 0
    assert written["suites_sha256"] == {"page1": "hash of page1"}
    assert set(written["versions"]) == {"python", *accuracy.PACKAGES}
    assert list(tmp_path.glob(".*.tmp")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda bundle: [bundle, "--levels", "loose,none"], "no level 'none': choose from loose,tight"),
        (lambda bundle: [bundle, "--suites", "page3"], "no suite 'page3'"),
        (lambda bundle: [bundle, "--regimes", "never"], "no regime 'never'"),
        (lambda bundle: [bundle, "--levels", ","], "no level given"),
        (lambda bundle: [bundle, "--json", f"{bundle}/nowhere/a.json"], "nowhere is not a folder"),
        (lambda bundle: [bundle, "--json", f"{bundle}/a.json"], "a.json lies in the bundle "),
        (lambda bundle: [f"{bundle}/nowhere"], "not a folder"),
        (lambda bundle: [bundle, "--backend", "abacus"], "unknown backend 'abacus'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: Callable[[Path], list[Any]], message: str, toy_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy.main([*map(str, arguments(toy_bundle)), "--processes", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
