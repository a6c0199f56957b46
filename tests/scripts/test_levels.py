"""What the levels promise, on the built demo bundle: bytes exactly, accuracy on a sample of the held-out suites."""

from __future__ import annotations

import pytest

import runtime
from demo_vlm.suites import suites
from engines.bundle import Bundle

QUESTIONS = 40  # a sample: the figures in docs/accuracy.md come from scripts/accuracy.py on all of them


@pytest.fixture(scope="module")
def asked(demo_bundle: Bundle) -> dict[tuple[str, str], tuple[float, float]]:
    """(level, suite) -> share of exact answers, largest share of the fp16 KV bytes."""
    held_out, result = suites(), {}
    for level in demo_bundle.manifest.levels:
        vlm = runtime.open(demo_bundle.path, level=level, threads=1)
        for suite in ("easy1", "page1", "easy4", "page4"):
            right, ratio = 0, 0.0
            for item in held_out[suite][:QUESTIONS]:
                answer = vlm.generate(item.question, images=list(item.images), max_new_tokens=8)
                right += answer.text.strip() == item.answer
                ratio = max(ratio, answer.stats.kv_bytes / answer.stats.kv_bytes_uncompressed)
            result[level, suite] = (right / QUESTIONS, ratio)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("level", "limit"), [("balanced", 1 / 4), ("extreme", 1 / 10)])
@pytest.mark.parametrize("suite", ["easy1", "page1", "easy4", "page4"])
def test_a_level_keeps_its_bytes_and_its_accuracy(asked, level: str, limit: float, suite: str) -> None:
    accuracy, ratio = asked[level, suite]
    assert ratio <= limit
    assert accuracy >= asked["off", suite][0] - 0.1  # four questions of forty; a broken level loses most of them


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["easy1", "page1", "easy4", "page4"])
def test_a_question_that_comes_later_is_answered_from_a_fifth_of_the_bytes(asked, demo_bundle, suite: str) -> None:
    vlm = runtime.open(demo_bundle.path, level="extreme", threads=1)
    items = suites([suite])[suite][:QUESTIONS]
    answers = [vlm.generate(item.question, list(item.images), 8, question_later=True) for item in items]
    assert {answer.stats.level for answer in answers} == {"chat"}
    assert max(answer.stats.kv_bytes / answer.stats.kv_bytes_uncompressed for answer in answers) <= 1 / 5
    right = sum(answer.text.strip() == item.answer for answer, item in zip(answers, items, strict=True))
    assert right / QUESTIONS >= asked["off", suite][0] - 0.1
