"""A runtime with M-RoPE and DeepStack against the toy's judge: prompts, sessions and batches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from engines.errors import UserError
from engines.mrope import MRope
from runtime.model import VLM
from runtime.prompt import lay_out
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler
from runtime.session import Session
from tests.runtime import mrope_toy, toy
from tests.runtime.asking import ask, ids_of, image
from tests.runtime.mrope_toy import Judge
from tests.runtime.test_session import later_ids

Open = Callable[..., VLM]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, of_batch: Callable[[int], Path]) -> Open:
    """The toy with M-RoPE, at a level."""
    path = mrope_toy.build(tmp_path_factory.mktemp("mrope") / "bundle", of_batch(3))
    return lambda level="tight": runtime.open(path, level=level, threads=1)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    return Judge(monkeypatch)


@pytest.mark.parametrize("level", ["tight", "thrifty", "frugal"])
@pytest.mark.parametrize(("question", "images"), [("what is it", 0), ("what is it", 1), ("red two one", 3), ("big", 4)])
@pytest.mark.parametrize("later", [False, True])
def test_answers_are_the_judges(
    level: str, question: str, images: int, later: bool, opened: Open, judge: Judge
) -> None:
    """Pruned images, text behind them read by prefill or by extend, and windows that are compacted on the way."""
    if later and not images:
        return
    pictures = [image(k) for k in range(images)]
    got = ask(opened(level), question, pictures, max_new_tokens=20, ignore_eos=True, question_later=later)
    wanted = judge.answer(ids_of(question, images), pictures, level, 20, ignore_eos=True, question_later=later)
    assert got.tokens == wanted.tokens
    assert got.stats.compactions == len(wanted.compacted_at) > 0


def test_an_image_behind_the_bucket_is_never_decoded(opened: Open, judge: Judge) -> None:
    """A visual token has three ids, and decode takes one: extend reads it, however few there are."""
    vlm, pictures = opened(), [image(k) for k in range(8)]
    for before in range(1, 4):  # tokens that move the images behind the bucket: one of theirs would be read alone
        content = [{"type": "text", "text": "red " * before}, *[{"type": "image"}] * 8]
        messages = [{"role": "user", "content": content}]
        got = vlm.generate(messages, pictures, 6, ignore_eos=True, sampling=Sampling(logprobs=0))
        said = "<s> user : " + "red " * before + " ".join(f"image {k + 1} : <image>" for k in range(8)) + " assistant :"
        ids = [toy.WORDS.index(word) for word in said.split()]
        wanted = judge.answer(ids, pictures, "tight", 6, ignore_eos=True)
        assert got.tokens == wanted.tokens
        for told, logits in zip(got.logprobs, wanted.logits[-6:], strict=True):
            assert told.logprob == pytest.approx(logits[told.token] - np.log(np.exp(logits).sum()), abs=1e-4)


TURNS = [("what is it", 1), ("how many red", 0), ("is it blue", 2), ("big", 0)]
STEPS = [6, 1, 5, 9]


def test_every_turn_of_a_session_is_the_judges(opened: Open, judge: Judge, tmp_path: Path) -> None:
    """Ids go on where they were: in the same session, in a fork and in one that was saved."""
    vlm = opened()
    session, seen, answered, ids = Session(vlm), 0, list[int](), list[int]()
    for (question, images), steps in zip(TURNS, STEPS, strict=True):
        ids += later_ids(question, images, seen) if ids else ids_of(question, images)
        answered.append(len(ids))
        pictures = [image(seen + k) for k in range(images)]
        seen += images
        if session.context:
            session.save(tmp_path / "chat.safetensors")
            others = [session.fork(), Session.load(vlm, tmp_path / "chat.safetensors")]
        else:
            others = []
        told = [each.ask(question, pictures, steps, ignore_eos=True).tokens for each in (session, *others)]
        wanted = judge.answer(ids, [image(k) for k in range(seen)], "tight", steps, ignore_eos=True, answered=answered)
        assert told == [wanted.tokens] * len(told)
        ids += wanted.tokens
    assert session.context
    assert session.context.shift == -2 * seen  # two positions less an image


def test_a_file_with_another_shift_than_images_make_is_refused(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(opened())
    session.ask("what is it", [image(0)], 2)
    assert session.context
    for shift in (1, -session.context.position):
        monkeypatch.setattr(session.context, "shift", shift)
        session.save(tmp_path / "chat.safetensors")
        with pytest.raises(UserError, match="shift is out of range"):
            Session.load(opened(), tmp_path / "chat.safetensors")


def test_rows_of_a_batch_have_ids_of_their_own(opened: Open) -> None:
    vlm, scheduler = opened(), Scheduler(rows=3)
    asked: list[tuple[str, int]] = [("what is it", 1), ("red two one", 3), ("how many red", 0)]
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    alone = [ask(vlm, question, [image(k) for k in range(n)], **options).tokens for question, n in asked]
    streams = [vlm.stream(question, [image(k) for k in range(n)], **options) for question, n in asked]
    answers = scheduler.run([scheduler.submit(stream) for stream in streams])
    assert scheduler.tokens > scheduler.steps  # some were decoded together
    assert [each.result.tokens for each in answers] == alone


def test_rows_keep_the_ids_that_they_had_before_pruning() -> None:
    """Two images of 2 x 3 tokens; by hand."""
    kept = [np.array([1, 5]), np.array([0])]
    ids, grids = [7, *[4] * 6, 8, *[4] * 6, 9], [[1, 4, 6]] * 2
    rows = lay_out(ids, kept, [6, 6], 4, start=10, shift=-3, mrope=MRope(2), grids=grids)
    assert rows.positions.tolist() == [10, 12, 16, 17, 18, 24]
    assert rows.position_ids.T.tolist() == [[7] * 3, [8, 8, 9], [8, 9, 10], [11] * 3, [12] * 3, [15] * 3]
    assert (rows.total, rows.shift) == (25, 16 - 25)
    assert rows.position_ids.dtype == np.int32


def test_a_manifest_whose_grid_is_another_is_refused(opened: Open) -> None:
    model = opened().model
    for grid in (list[int](), [1, 4, 2]):
        layouts = [dataclasses.replace(layout, grid=grid) for layout in model.layouts]
        with pytest.raises(ValueError, match=f"4 tokens has no grid {re.escape(str(grid))}"):
            dataclasses.replace(model, layouts=layouts)
