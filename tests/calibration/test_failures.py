"""The three failure modes: each detector catches its plant, says nothing of healthy output, and names the remedy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from calibration.failures import CASES, GRAM, STEPS, STRETCH, TIMES, Failure, blindness, drift, loop, loops

TOKENS = st.lists(st.integers(0, 3), max_size=30)


def repeats(tokens: list[int]) -> set[tuple[int, int]]:
    """Every n-gram that stands so often in a row that it is a loop, by comparing all slices with it."""
    found = set()
    for gram, start in itertools.product(range(1, GRAM + 1), range(len(tokens))):
        unit, length = tokens[start : start + gram], 0
        while start + length < len(tokens) and tokens[start + length] == unit[length % gram]:
            length += 1
        if len(unit) == gram and length >= TIMES * gram and length >= STRETCH:
            found.add((gram, length // gram))
    return found


@given(TOKENS)
def test_a_loop_is_an_n_gram_that_stands_there_again_and_again(tokens: list[int]) -> None:
    want, found = repeats(tokens), loop(tokens)
    assert (found is None) == (not want)
    assert found is None or (found in want and found[0] == min(gram for gram, _ in want))


@given(TOKENS, st.lists(st.integers(0, 9), min_size=1, max_size=GRAM), st.integers(0, 5))
def test_a_planted_loop_is_found_wherever_it_stands(before: list[int], unit: list[int], more: int) -> None:
    assert loop([*before, *unit * (max(TIMES, STRETCH) + more), 99]) is not None


def test_healthy_answers_do_not_loop() -> None:
    assert loop([]) is None
    assert loop([7] * (STRETCH - 1)) is None  # "0 0 0"
    assert loop([*range(10), *range(10)]) is None  # twice is no loop
    found = loops([[1, 2, 3]] * 4, [[1, 2, 3]] * 4, 0.0)
    assert (found.found, found.figure, found.remedy) == (False, 0.0, "")


def test_only_loops_that_compression_made_count() -> None:
    looping = [4, 5] * 6
    assert loops([looping, [1, 2]], [[1, 2], looping], 0.0).found is False
    found = loops([looping, [1, 2], [1, 2], [1]], [looping, looping, [1, 2], [1]], 0.0)
    assert (found.found, found.figure, found.cases) == (True, 0.25, 4)
    assert found.detail == "2 of 4 answers repeat themselves, uncompressed 1; the first 6 times the same 2 tokens"
    assert "merge_above" in found.remedy
    assert loops([[1, 2]], [looping], 1.0).found is False  # the limit is settable


def changed(*rows: str) -> list[np.ndarray]:
    return [np.array([letter == "x" for letter in row]) for row in rows]


def test_blind_is_what_another_image_no_longer_changes() -> None:
    whole = changed("xxx.", "xxx.", "xxx.")
    seeing = blindness(whole, whole, 0.5)
    assert (seeing.found, seeing.figure, seeing.remedy) == (False, 0.0, "")
    # The first token comes from prefill and sees the image; of the 6 later ones, 5 do not any more.
    blind = blindness(whole, changed("x...", "x..x", "xx.."), 0.5)
    assert (blind.found, blind.cases) == (True, 6)
    assert blind.figure == pytest.approx(5 / 6)
    assert "later tokens" in blind.detail
    assert "discount" in blind.remedy
    assert blindness(whole, changed("x...", "x..x", "xx.."), 0.9).found is False
    first = blindness(changed(*"xxxxx."), changed(*"....xx"), 0.5)
    assert (first.found, first.figure, first.cases) == (True, 0.8, 5)


def test_too_few_images_that_matter_say_nothing() -> None:
    found = blindness(changed("x.", "x.", "xx"), changed("..", "..", ".."), 0.5)
    assert (found.found, found.figure) == (None, None)
    assert blindness([], [], 0.5).found is None


def of(rows: list[list[float]], limit: float = 2.0) -> Failure:
    return drift(rows, 0.05, limit)


@given(st.integers(STEPS, 20), st.integers(CASES, 8), st.floats(0.1, 2), st.integers(0, 99))
def test_a_divergence_that_grows_with_the_step_is_drift(steps: int, answers: int, slope: float, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(0, 0.1 * slope, (answers, steps))
    rows = (slope * np.arange(1, steps + 1) + noise).tolist()
    found = of(rows)
    assert found.found is True
    third = steps // 3
    late, early = np.mean([row[-third:] for row in rows]), np.mean([row[:third] for row in rows])
    assert found.figure == pytest.approx(late / early)
    assert "deep_rate" in found.remedy
    assert of(rows, limit=100.0).found is False
    assert of([row[::-1] for row in rows]).found is False  # it gets nearer


@given(st.lists(st.lists(st.floats(0, 0.05), min_size=8, max_size=12), min_size=CASES, max_size=8))
def test_what_does_no_harm_is_no_drift(rows: list[list[float]]) -> None:
    assert of(rows).found is False


@given(st.integers(0, 999))
def test_a_divergence_without_a_trend_is_no_drift(seed: int) -> None:
    rows = np.random.default_rng(seed).uniform(1, 1.9, (20, 12))
    assume(rows[:, -4:].mean() < 2 * rows[:, :4].mean())
    assert of(rows.tolist()).found is False
    assert of([[1.0] * 9] * CASES).found is False


def test_short_answers_tell_no_trend() -> None:
    found = of([[0.0, 1.0, 2.0]] * 50)
    assert (found.found, found.figure) == (None, None)
    assert "the longest for 3" in found.detail
    assert of([]).found is None
