"""Sessions: turns against the judge, forks, and what may go wrong; their files are in test_session_file.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from engines.errors import UserError
from runtime.model import VLM
from runtime.sampling import Sampling
from runtime.session import Session
from tests.runtime import reference, toy
from tests.runtime.asking import Recorder, ids_of, image

Turn = tuple[str, int]  # a question and its number of images


@pytest.fixture(scope="module", params=["loose", "tight"])
def vlm(request: pytest.FixtureRequest, bundle_path: Path) -> VLM:
    return runtime.open(bundle_path, level=request.param, threads=1)


def later_ids(question: str, images: int, before: int) -> list[int]:
    """What the template writes behind an answer."""
    places = "".join(f" image {before + k + 1} : <image>" for k in range(images))
    return [toy.WORDS.index(word) for word in f"</s> user :{places} {question} assistant :".split()]


def judged(level: str, turns: list[Turn], steps: list[int], answers: list[list[int]]) -> reference.Answer:
    """What the judge says to the last turn, behind these answers to the others."""
    ids, seen = ids_of(*turns[0]), turns[0][1]
    answered = [len(ids)]
    for (question, images), answer in zip(turns[1:], answers, strict=False):
        ids += answer + later_ids(question, images, seen)
        seen += images
        answered.append(len(ids))
    pictures = [image(k) for k in range(seen)]
    return reference.answer(ids, pictures, level, steps[-1], ignore_eos=True, answered=answered)


def talk(session: Session, turns: list[Turn], steps: list[int]) -> list[list[int]]:
    seen, answers = 0, []
    for (question, images), count in zip(turns, steps, strict=True):
        pictures = [image(seen + k) for k in range(images)]
        answers.append(session.ask(question, pictures, count, ignore_eos=True).tokens)
        seen += images
    return answers


CHATS: list[tuple[str, list[Turn], list[int]]] = [
    ("loose", [("what is it", 1), ("how many red", 0)], [4, 6]),
    ("loose", [("one two", 0), ("big", 1)], [1, 5]),
    ("tight", [("what is it", 1), ("how many red", 0), ("is it blue", 2), ("big", 0)], [6, 1, 5, 9]),
    ("tight", [("left right what", 2), ("red two red two red two red two", 1), ("big", 0)], [9, 3, 8]),
]


@pytest.mark.parametrize(("level", "turns", "steps"), CHATS)
def test_every_turn_is_the_judges(
    level: str, turns: list[Turn], steps: list[int], bundle_path: Path, recorder: Recorder
) -> None:
    session = Session(runtime.open(bundle_path, level=level, threads=1))
    answers: list[list[int]] = []
    for i in range(len(turns)):
        seen = sum(images for _, images in turns[:i])
        pictures = [image(seen + k) for k in range(turns[i][1])]
        result = session.ask(turns[i][0], pictures, steps[i], ignore_eos=True)
        judge = judged(level, turns[: i + 1], steps[: i + 1], answers)
        assert result.tokens == judge.tokens
        assert result.stats.compactions == len(judge.compacted_at)
        answers.append(result.tokens)
    assert session.context
    windows = [feeds["window_kinds"][0].tolist() for _, feeds, _ in recorder.of("compact")]
    assert windows == judge.full  # sentences begin where they do, in answers and in turns
    store = session.context.state
    assert store.nbytes == sum(array.nbytes for array in store.arrays.values())
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * (len(turns) - 1) + ["user"]


@pytest.mark.parametrize("end", [True, False])
def test_a_session_that_drops_nothing_is_one_prompt(end: bool, bundle_path: Path) -> None:
    """Where answers end by themselves and where they are cut off."""
    vlm = runtime.open(bundle_path, level="loose", threads=1)
    session, messages = Session(vlm), list[dict[str, Any]]()
    for i, question in enumerate(["what is it", "one two"]):
        parts = [{"type": "image"}] * (i == 0) + [{"type": "text", "text": question}]
        messages.append({"role": "user", "content": parts})
        alone = vlm.generate(messages, [image(0)], 5, ignore_eos=not end)
        turn = session.ask(question, [image(0)][i:], 5, ignore_eos=not end)
        assert turn.tokens == alone.tokens
        assert turn.stats.prompt_tokens == alone.stats.prompt_tokens
        messages.append({"role": "assistant", "content": turn.text})


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_an_answer_that_is_left_ends_where_it_is(pieces: int, tight: VLM) -> None:
    session = Session(tight)
    stream = session.stream("what is it", [image(0)], 20, ignore_eos=True)
    for _ in range(pieces):
        next(stream)
    said = [*stream.answer.tokens]
    assert len(said) == pieces
    got = session.ask("big", max_new_tokens=6, ignore_eos=True).tokens
    if pieces:
        assert got == judged("tight", [("what is it", 1), ("big", 0)], [20, 6], [said]).tokens
        assert list(stream) == []  # nothing more comes of it
        assert stream.result.stats.stop_reason == "cancelled"
    else:  # nothing was read
        assert got == judged("tight", [("big", 0)], [6], []).tokens


def test_forks_go_their_own_ways(vlm: VLM) -> None:
    system = {"role": "system", "content": "left"}
    session = Session(vlm)
    session.read([system, {"role": "user", "content": [{"type": "image"}]}], [image(0)])
    questions = ["what is it", "how many red", "is it blue"]
    forks = [session.fork() for _ in questions]
    streams = [f.stream(q, max_new_tokens=5, ignore_eos=True) for f, q in zip(forks, questions, strict=True)]
    for _ in range(6):
        for stream in streams:
            next(stream, None)
    for question, stream in zip(questions, streams, strict=True):
        alone = Session(vlm)
        alone.read([system, {"role": "user", "content": [{"type": "image"}]}], [image(0)])
        assert stream.result.tokens == alone.ask(question, max_new_tokens=5, ignore_eos=True).tokens
        if vlm.level == "loose":
            parts = [{"type": "image"}, {"type": "text", "text": question}]
            whole = vlm.generate([system, {"role": "user", "content": parts}], [image(0)], 5, ignore_eos=True)
            assert stream.result.tokens == whole.tokens
    assert forks[0].context
    assert session.context
    assert forks[0].context.position > session.context.position
    again = session.ask(questions[1], max_new_tokens=5, ignore_eos=True)
    assert again.tokens == streams[1].result.tokens


def test_a_fork_shares_the_store_until_one_of_them_compacts(tight: VLM) -> None:
    session = Session(tight)
    session.ask("what is it", [image(0)], 2, ignore_eos=True)
    fork = session.fork()
    assert session.context
    assert fork.context
    mine, its = session.context.state.arrays, fork.context.state.arrays
    assert {name for name in mine if np.shares_memory(mine[name], its[name])} == {n for n in mine if "window" not in n}
    before = {name: array.copy() for name, array in mine.items()}
    fork.ask("how many red", [image(1)], 9, ignore_eos=True)
    assert fork.context.state.compactions > session.context.state.compactions
    for name, array in before.items():
        np.testing.assert_array_equal(mine[name], array)


def test_sessions_in_threads_share_the_weights(tight: VLM) -> None:
    questions = ["what is it", "is it", "one two", "red"]
    turns: list[list[Turn]] = [[(question, k % 2), ("big", 1)] for k, question in enumerate(questions)]
    alone = [talk(Session(tight), chat, [5, 7]) for chat in turns]
    together: dict[int, list[list[int]]] = {}
    run: Callable[[int], None] = lambda i: together.update({i: talk(Session(tight), turns[i], [5, 7])})  # noqa: E731
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(turns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(turns))] == alone


def test_memory_stays_the_same(tight: VLM) -> None:
    session, sizes = Session(tight), set()
    for _ in range(6):
        session.ask("is it red", max_new_tokens=6, ignore_eos=True)
        assert session.context
        sizes.add(session.context.state.nbytes)
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("level", "room", "bucket"),
    [("tight", None, 16), ("tight", 17, 40), ("tight", 10**6, 40), ("loose", None, 40), ("loose", 5, 16)],
)
def test_room_chooses_the_bucket(level: str, room: int | None, bucket: int, bundle_path: Path) -> None:
    session = Session(runtime.open(bundle_path, level=level, threads=1), room).fork()
    session.ask("what is it", [image(0)], 2)
    assert session.context
    assert session.context.bucket.length == bucket


@pytest.mark.parametrize("room", ["a", -5, 0, 1.5, True])
def test_room_that_is_no_number_of_tokens_is_told(room: Any, tight: VLM) -> None:
    with pytest.raises(UserError, match="room must be "):
        Session(tight, room)


@pytest.mark.parametrize("question", ["what is it", "\ue0000\ue001 left \ue0001\ue001", "\ue000", "\ue001 \ue0000"])
def test_pieces_are_the_template_of_the_whole(question: str, tight: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is encoded, bit by bit, is every character that one prompt would have, spaces too."""
    session, said = Session(tight), list[str]()
    encode = tight.prompts.encode

    def recorded(text: str, *options: Any, **named: Any) -> list[int]:
        said.append(text)
        return encode(text, *options, **named)

    monkeypatch.setattr(tight.prompts, "encode", recorded)
    system = {"role": "system", "content": question}
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    session.read([system, {"role": "user", "content": parts[:1]}], [image(0)])
    session.fork().ask(question, max_new_tokens=2)
    whole = tight.prompts.text([system, {"role": "user", "content": parts}], tight.model.layouts)
    assert said[0].endswith("<image>")
    assert "".join(said) == whole
    session.ask(question, max_new_tokens=2)
    assert said[2] == said[1]


def test_a_stop_string_was_read_and_is_not_shown(tight: VLM) -> None:
    first, *others = Session(tight).ask("what is it", [image(0)], 6, ignore_eos=True).text.split()
    stop, session = next(word for word in others if word != first), Session(tight)
    got = session.ask("what is it", [image(0)], 6, ignore_eos=True, sampling=Sampling(stop=[stop]))
    assert tight.tokenizer.decode(got.tokens[-1:]) == stop
    then = session.ask("big", max_new_tokens=4, ignore_eos=True)
    assert stop not in session.messages[1]["content"]
    assert then.tokens == judged("tight", [("what is it", 1), ("big", 0)], [6, 4], [got.tokens]).tokens


def test_what_does_not_fit_is_told_and_nothing_is_lost(bundle_path: Path) -> None:
    loose = Session(runtime.open(bundle_path, level="loose", threads=1))
    loose.ask("what is it", [image(0)], 3, ignore_eos=True)
    fork = loose.fork()
    with pytest.raises(
        UserError, match=r"not fit into the window of 24 tokens, .* compacts: begin a new session, or ch"
    ):
        loose.ask("red " * 20)
    assert len(loose.messages) == len(fork.messages) == 2
    options: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    assert loose.ask("big", **options).tokens == fork.ask("big", **options).tokens
    tight = Session(runtime.open(bundle_path, level="tight", threads=1))
    tight.ask("red " * 100, max_new_tokens=1)
    with pytest.raises(UserError, match=r"the session has 12\d tokens, and the level only 120: begin anew"):
        tight.ask("red " * 10)
    mistakes: list[Any] = [("", []), ("what", "a.png"), ("what <image>", []), ([{"role": "user"}], [])]
    for question, images in mistakes:
        with pytest.raises(UserError):
            tight.ask(question, images)
    assert len(tight.messages) == 2


def test_a_turn_that_broke_off_while_it_was_read_is_told(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    session = Session(vlm)
    session.ask("what is it", [image(0)], 3, ignore_eos=True)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vlm, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.ask("big")
    with pytest.raises(UserError, match="broke off, and the session is lost: load a saved one, or begin anew"):
        session.ask("big")
    for way in (lambda: session.save("nowhere"), session.fork, lambda: session.read("big")):
        with pytest.raises(UserError, match="broke off"):
            way()
