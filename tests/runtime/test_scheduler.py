"""Whose turn it is, who waits how long, and what an answer's end leaves behind."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.errors import UserError
from runtime.memory import Cost, Memory, Need, Reservation
from runtime.model import VLM
from runtime.monitor import Monitor, Watch
from runtime.sampling import Sampling
from runtime.scheduler import Answering, Scheduler
from runtime.session import Session
from tests.runtime.asking import Recorder, image

Models = Callable[[int, str], VLM]
QUESTION, LONG = "what is it", " ".join(["big red one"] * 20)


@pytest.fixture(scope="module")
def models(of_batch: Callable[[int], Path]) -> Models:
    return cache(lambda batch, level: VLM.open(of_batch(batch), level=level, threads=1))


@pytest.fixture
def vlm(of_batch: Callable[[int], Path]) -> VLM:
    return VLM.open(of_batch(3), level="tight", threads=1)


def stream(vlm: VLM, seed: int = 0, tokens: int = 12, question: str = QUESTION, images: int = 1) -> Any:
    pictures = [image(seed + i) for i in range(images)]
    return vlm.stream(question, pictures, tokens, ignore_eos=True, sampling=Sampling(1.5, seed=seed))


@pytest.mark.parametrize(
    ("batch", "levels", "rows"), [(3, ["tight"], 2), (3, ["tight", "loose"], 3), (1, ["loose"], 3)]
)
def test_under_constant_load_nobody_waits_longer_than_is_told(
    models: Models, batch: int, levels: list[str], rows: int
) -> None:
    tokens, scheduler, line = 9, Scheduler(rows), 7
    turns = len(levels) if batch > 1 else rows
    answers: list[Answering] = []
    came: list[tuple[int, int]] = []  # step, and how many others were here
    begun: dict[int, int] = {}
    gaps: set[int] = set()
    said: dict[int, tuple[int, int]] = {}  # answer -> tokens, and the step of the last of them
    for step in range(300):
        while len(answers) - len(begun) < line:  # as many as come
            ahead = sum(not each.ended for each in answers)
            came.append((step, ahead))
            level = levels[len(answers) % len(levels)]
            answers.append(scheduler.submit(stream(models(batch, level), len(answers), tokens)))
        scheduler.step()
        for i, each in enumerate(answers):
            count = len(each.stream.answer.tokens)
            if count and i not in begun:
                begun[i] = step
            if count > said.get(i, (0, 0))[0]:
                if i in said:
                    gaps.add(step - said[i][1])
                said[i] = count, step
    bound = turns * tokens + rows
    assert len(begun) > 30
    assert list(begun) == sorted(begun)
    for i, (step, ahead) in enumerate(came):
        assert begun.get(i, 300) - step <= (ahead // rows + 1) * bound
    assert max(gaps) <= turns
    late = [begun[i] - step - (ahead // rows + 1) * bound for i, (step, ahead) in enumerate(came) if i in begun]
    assert max(late) > -bound  # it is no bound that says nothing


def test_running_answers_go_on_while_a_long_prompt_is_read(vlm: VLM, recorder: Recorder) -> None:
    scheduler = Scheduler(3)
    running = scheduler.submit(stream(vlm, tokens=40))
    scheduler.step()
    reading = scheduler.submit(stream(vlm, 1, question=LONG, images=2))
    scheduler.run([running, reading])
    names = [name for name, *_ in recorder.calls][2:]
    pieces = [i for i, name in enumerate(names) if name.startswith(("vision", "extend")) or name == "decode_tight_40"]
    begun = pieces[: next(i for i, at in enumerate(pieces) if names[at] == "decode_tight_40" and i > 12)]
    assert sum(names[at].startswith("extend") for at in begun) > 5
    for one, other in itertools.pairwise(begun):
        assert "decode_tight_16" in names[one:other], names


def test_an_answer_that_is_read_drives_the_others(vlm: VLM) -> None:
    scheduler, alone = Scheduler(3), [list(stream(vlm, seed)) for seed in range(4)]
    answers = [scheduler.submit(stream(vlm, seed)) for seed in range(4)]
    assert list(answers[1]) == alone[1]
    assert len(answers[0].texts) > 5
    with pytest.raises(UserError, match="not ended"):
        _ = answers[3].result
    for answer, texts in zip(answers, alone, strict=True):
        assert answer.result.text == "".join(texts) if answer.ended else "".join(answer) == "".join(texts)


def test_memory_is_that_of_the_manifest_and_is_given_back(vlm: VLM) -> None:
    manifest = vlm.bundle.manifest
    bucket = manifest.levels["tight"].buckets[0]
    scheduler = Scheduler(3)
    answers = [scheduler.submit(stream(vlm, seed, tokens=9 + seed)) for seed in range(2)]
    scheduler.step()
    assert scheduler.nbytes == 0  # one alone needs no batch
    scheduler.step()
    assert scheduler.nbytes == manifest.batch_bytes(bucket)
    state = answers[0].read.context.state  # type: ignore[union-attr]
    assert 3 * state.nbytes == scheduler.nbytes
    kept, state = weakref.ref(state), None
    scheduler.run(answers)
    assert scheduler.nbytes == 0
    assert kept() is None
    assert answers[0].result.stats.kv_bytes * 3 == manifest.batch_bytes(bucket)


@pytest.mark.parametrize("fits", [True, False])
def test_a_batch_is_reserved_in_the_budget_or_all_are_read_alone(
    vlm: VLM, fits: bool, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    asked: list[tuple[Need, weakref.ref[Reservation]]] = []

    class Budget(Memory):
        def reserve(self, need: Need, most: float = 1.0) -> Reservation | None:
            reserved = Reservation(need)
            asked.append((need, weakref.ref(reserved)))
            return reserved if fits else None

    alone = [list(stream(vlm, seed)) for seed in range(3)]
    graphs = vlm.bundle.manifest.graphs
    monkeypatch.setattr(vlm, "memory", Budget(1 << 40, {name: Cost(7, 5) for name in graphs}))
    scheduler = Scheduler(3)
    answers = scheduler.run([scheduler.submit(stream(vlm, seed)) for seed in range(3)])
    assert [list(answer) for answer in answers] == alone
    ((need, reserved),) = asked
    batch = vlm.bundle.manifest.batch_bytes(vlm.bundle.manifest.levels["tight"].buckets[0])
    assert need == Need(frozenset({"decode_tight_16x3"}), batch + 5)
    assert reserved() is None  # given back
    assert any(name.endswith("x3") for name, *_ in recorder.calls) == fits


def test_more_places_than_rows(vlm: VLM) -> None:
    alone = [list(stream(vlm, seed)) for seed in range(6)]
    scheduler = Scheduler(6)
    answers = scheduler.run([scheduler.submit(stream(vlm, seed)) for seed in range(6)])
    assert [list(answer) for answer in answers] == alone


def test_an_alarm_has_one_row_answered_anew(vlm: VLM) -> None:
    watch = Watch("retry", recent=3, ratio=1, margin=0.5)
    alone, void = [], []

    def restarting(seed: int) -> Any:
        options: dict[str, Any] = {"sampling": Sampling(1.5, seed=seed), "on_restart": lambda: void.append(seed)}
        return vlm.stream(QUESTION, [image(seed)], 16, ignore_eos=True, **options)

    for seed in range(6):
        vlm.monitor = Monitor(watch)
        for _ in (single := restarting(seed)):
            pass
        alone.append(single.result)
    again, void = void, []
    assert 0 < len(again) < 6
    vlm.monitor, scheduler = Monitor(watch), Scheduler(3)
    answers = scheduler.run([scheduler.submit(restarting(seed)) for seed in range(6)])
    assert sorted(void) == again
    for answer, one in zip(answers, alone, strict=True):
        assert answer.result.tokens == one.tokens
        assert "".join(answer) == one.text
        told = answer.result.stats
        assert (told.retries, told.level, told.alarms) == (one.stats.retries, one.stats.level, one.stats.alarms)


def test_a_failing_step_ends_those_that_it_was_for(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(2)
    scheduler.run([scheduler.submit(stream(vlm, seed)) for seed in range(2)])
    session = vlm._sessions["decode_tight_16x3"]
    with monkeypatch.context() as patch:

        def fails(feeds: dict[str, np.ndarray]) -> Any:
            raise RuntimeError("out of order")

        patch.setattr(session, "run", fails)
        answers = scheduler.run([scheduler.submit(stream(vlm, seed)) for seed in range(2)])
    for answer in answers:
        assert answer.texts
        with pytest.raises(RuntimeError, match="out of order"):
            list(answer)
        assert answer.stream.answer.stats.kv_bytes
    after = scheduler.run([scheduler.submit(stream(vlm, seed)) for seed in range(3)])
    assert [list(each) for each in after] == [list(stream(vlm, seed)) for seed in range(3)]


def test_a_stream_that_is_closed_leaves_its_row(vlm: VLM) -> None:
    scheduler = Scheduler(2)
    answers = [scheduler.submit(stream(vlm, seed)) for seed in range(3)]
    for _ in range(5):
        scheduler.step()
    answers[0].stream.close()
    scheduler.run(answers)
    assert answers[0].result.finish_reason == "cancelled"
    assert [list(answer) for answer in answers[1:]] == [list(stream(vlm, seed)) for seed in (1, 2)]


def test_a_sessions_turn_is_read_alone_among_the_others(vlm: VLM, recorder: Recorder) -> None:
    turns = []
    for others in (0, 2):
        scheduler, chat = Scheduler(3), Session(vlm)
        for text in (QUESTION, "how many"):
            asked = chat.stream(text, [image(0)], 9, ignore_eos=True)
            answers = [scheduler.submit(each) for each in (asked, *(stream(vlm, seed) for seed in range(others)))]
            turns.append(scheduler.run(answers)[0].result.tokens)
        assert chat.messages
    assert turns[:2] == turns[2:]
    for name, feeds, _ in recorder.calls:
        assert not name.endswith("x3") or len(np.unique(feeds["position"])) <= 3


def test_places_are_a_number() -> None:
    with pytest.raises(UserError, match="rows must be"):
        Scheduler(0)
