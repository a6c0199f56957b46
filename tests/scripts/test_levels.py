"""What the levels promise, on the built demo bundle: bytes exactly, accuracy on a sample of the held-out suites."""

from __future__ import annotations

import pytest

import runtime
from demo_vlm.suites import suites
from engines.bundle import Bundle

QUESTIONS = 40  # a sample: the figures in the README come from scripts/accuracy.py on all of them


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
