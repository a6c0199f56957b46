"""Answers that share a batch are those of single runs, whatever the others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import UserError
from runtime.batch import Batch, Row
from runtime.generate import Result, TextStream
from runtime.model import VLM
from runtime.sampling import Sampling
from runtime.scheduler import Answering, Scheduler
from runtime.state import State
from tests.runtime import reference, toy
from tests.runtime.asking import Recorder, ids_of, image

WORDS = toy.WORDS[17:]


@dataclass(frozen=True)
class Asked:
    """A request, when it comes, and when its client leaves."""

    words: int = 3
    images: int = 1
    tokens: int = 12
    later: bool = False
    seed: int | None = None
    stop: str = ""
    comes: int = 0
    leaves: int | None = None

    @property
    def question(self) -> str:
        return " ".join(WORDS[(3 * i + self.words) % len(WORDS)] for i in range(self.words))

    def stream(self, vlm: VLM) -> TextStream:
        stop = [self.stop] if self.stop else []
        sampling = Sampling(0.0 if self.seed is None else 1.5, seed=self.seed, stop=stop, logprobs=2)
        pictures = [image(self.words + i) for i in range(self.images)]
        return vlm.stream(self.question, pictures, self.tokens, True, self.later and bool(pictures), sampling)


Models = Callable[[int, str], VLM]


@pytest.fixture(scope="module")
def models(of_batch: Callable[[int], Path]) -> Models:
    return cache(lambda batch, level: VLM.open(of_batch(batch), level=level, threads=1))


@pytest.fixture(scope="module")
def vlm(models: Models) -> VLM:
    return models(3, "tight")


def alone(vlm: VLM, asked: Asked) -> Result | str:
    """The answer, or what is wrong."""
    try:
        for _ in (stream := asked.stream(vlm)):
            pass
        return stream.result
    except UserError as error:
        return str(error)


def together(scheduler: Scheduler, requests: list[tuple[VLM, Asked]]) -> list[Answering]:
    """Submit each when it comes, and run all to the end."""
    answers: dict[int, Answering] = {}
    step = 0
    while len(answers) < len(requests) or not all(each.ended for each in answers.values()):
        for i, (vlm, asked) in enumerate(requests):
            if asked.comes == step:
                answers[i] = scheduler.submit(asked.stream(vlm))
            if asked.leaves == step and i in answers:
                answers[i].stream.cancel()
        scheduler.step()
        step += 1
        assert step < 1000
    return [answers[i] for i in range(len(requests))]


def check(answer: Answering, want: Result | str, cut: bool = False) -> None:
    """Token for token, and each with its log-probability; a cut answer is the beginning of the whole one."""
    if isinstance(want, str):
        assert str(answer.error) == want or (cut and answer.result.finish_reason == "cancelled")
        return
    got = answer.result
    assert "".join(answer.texts) == got.text
    if cut and got.finish_reason == "cancelled":
        assert got.tokens == want.tokens[: len(got.tokens)]
    else:
        assert got.tokens == want.tokens
        assert (got.text, got.stats.stop_reason) == (want.text, want.stats.stop_reason)
        assert (got.stats.compactions, got.stats.kv_bytes) == (want.stats.compactions, want.stats.kv_bytes)
        assert (got.stats.level, got.stats.bucket) == (want.stats.level, want.stats.bucket)
    for mine, its in zip(got.logprobs, want.logprobs, strict=False):
        assert mine.token == its.token
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


requests = st.builds(
    Asked,
    words=st.integers(1, 30),
    images=st.integers(0, 2),
    tokens=st.integers(1, 20),
    later=st.booleans(),
    seed=st.none() | st.integers(0, 9),
    stop=st.sampled_from(["", "red", "is it"]),
    comes=st.integers(0, 30),
    leaves=st.none() | st.integers(0, 60),
)


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(st.sampled_from(["tight", "loose", "thrifty"]), requests), min_size=1, max_size=8),
    batch=st.integers(1, 4),
    rows=st.integers(1, 6),
)
def test_any_schedule_gives_the_answers_of_single_runs(
    models: Models, asked: list[tuple[str, Asked]], batch: int, rows: int
) -> None:
    known = [(models(batch, level), each) for level, each in asked]
    scheduler = Scheduler(rows)
    for answer, (vlm, each) in zip(together(scheduler, known), known, strict=True):
        check(answer, alone(vlm, each), cut=each.leaves is not None)
    assert scheduler.nbytes == 0


@pytest.mark.parametrize("level", ["tight", "loose"])
def test_a_batch_says_what_the_judge_says(models: Models, level: str) -> None:
    vlm = models(4, level)
    asked = [Asked(words=2 + 3 * i, images=i % 3, tokens=9 + 2 * i, comes=2 * i) for i in range(5)]
    scheduler = Scheduler(4)
    for answer, each in zip(together(scheduler, [(vlm, each) for each in asked]), asked, strict=True):
        pictures = [image(each.words + i) for i in range(each.images)]
        ids = ids_of(each.question, each.images)
        assert answer.result.tokens == reference.answer(ids, pictures, level, each.tokens, ignore_eos=True).tokens


RAGGED = [
    Asked(words=2, tokens=20),
    Asked(words=9, tokens=20, seed=1, comes=3),
    Asked(words=5, images=2, tokens=20, comes=7),
    Asked(words=4, images=0, tokens=6),
]


def test_rows_are_ragged_and_come_and_go(models: Models, recorder: Recorder) -> None:
    vlm = VLM.open(models(3, "tight").bundle.path, level="tight", threads=1)
    answers = together(Scheduler(3), [(vlm, each) for each in RAGGED])
    for answer, each in zip(answers, RAGGED, strict=True):
        check(answer, alone(models(3, "tight"), each))
    batched = [feeds for name, feeds, _ in recorder.calls if name.endswith("x3")]
    assert len(batched) > 10
    assert any(len(set(feeds["position"][:, 0].tolist())) == 3 for feeds in batched)
    filled = [tuple((feeds["window_bias"] > -np.inf).sum(axis=1)) for feeds in batched]
    assert any(len(set(each)) == 3 for each in filled)  # so they are compacted at different times


def shifted(arrays: Any, name: str) -> np.ndarray:
    count = len(arrays._arrays[name])
    row = (arrays._row.start + 1) % count
    return arrays._arrays[name][row : row + 1]


def another_slot(state: State, outputs: Any, positions: Any, kinds: Any) -> None:
    if isinstance(state.arrays, Row):
        state.count = min(state.count + 1, state.window - 1)
    write(state, outputs, positions, kinds)


def not_into_the_row(arrays: Any, name: str, array: np.ndarray) -> None:
    if "window" not in name:
        put(arrays, name, array)


def of_the_first(batch: Batch, reads: Any) -> None:
    for each in reads:
        each.position = reads[0].position
    read(batch, reads)


write, put, read = State.write, Row.__setitem__, Batch.read


@pytest.mark.parametrize(
    ("of", "name", "fault"),
    [
        (Row, "__getitem__", shifted),
        (Row, "__setitem__", not_into_the_row),
        (State, "write", another_slot),
        (Batch, "read", of_the_first),
    ],
)
def test_a_row_at_another_rows_place_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, of: type, name: str, fault: Any
) -> None:
    vlm = models(3, "tight")
    want = [alone(vlm, each) for each in RAGGED]
    monkeypatch.setattr(of, name, fault)
    answers = together(Scheduler(3), [(vlm, each) for each in RAGGED])
    with pytest.raises(AssertionError):
        any(map(check, answers, want))


def test_a_row_that_is_no_number_is_nobody_elses(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves, another goes on, and a third gets its row."""
    asked = [Asked(words=3, tokens=4), Asked(words=4, tokens=30), Asked(words=5, tokens=8, comes=12)]
    want = [alone(vlm, each) for each in asked]
    seats: list[int] = []

    def poisoned(batch: Batch, reads: Any) -> None:
        read(batch, reads)
        for row in (each.context.state.arrays for each in reads):
            if not isinstance(row, Row):  # alone
                continue
            if not seats:
                row.update({name: np.full_like(a, np.nan) for name, a in row.items() if a.dtype.kind == "f"})
            seats.append(row._row.start)

    monkeypatch.setattr(Batch, "read", poisoned)
    answers = together(Scheduler(2), [(vlm, each) for each in asked])
    assert "not numbers" in str(answers[0].error)
    for answer, each in list(zip(answers, want, strict=True))[1:]:
        check(answer, each)
    assert seats[0] == 0
    assert seats.count(0) > 6
