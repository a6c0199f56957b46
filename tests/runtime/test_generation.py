"""Sampling, stop strings, log-probabilities and cancellation through a bundle."""

from __future__ import annotations

import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from engines.errors import UserError, command
from runtime import monitor
from runtime.__main__ import main
from runtime.model import VLM
from runtime.monitor import Watch
from runtime.sampling import Sampling
from tests.runtime.asking import Recorder, ask, ids_of, image

LONG: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
QUESTION = "what is it"


@pytest.fixture(scope="module")
def vlm(bundle_path: Path) -> VLM:
    return runtime.open(bundle_path, level="tight", threads=1)


def seeded(vlm: VLM, seed: int | None, **options: Any) -> list[int]:
    sampling = Sampling(temperature=1.5, seed=seed, **options)
    return ask(vlm, QUESTION, [image(0)], **LONG, sampling=sampling).tokens


def test_a_seed_repeats_an_answer(vlm: VLM) -> None:
    assert seeded(vlm, 1) == seeded(vlm, 1)
    assert len({tuple(seeded(vlm, seed)) for seed in (1, 2, 3, None, None)}) == 5


def test_seeded_requests_side_by_side_answer_as_they_do_alone(vlm: VLM) -> None:
    samplings = [Sampling(1.5, seed=1), Sampling(1.5, seed=2), Sampling(), Sampling(1.5)]
    alone = [ask(vlm, QUESTION, [image(0)], **LONG, sampling=each).tokens for each in samplings[:3]]
    streams = [vlm.stream(QUESTION, [image(0)], **LONG, sampling=each) for each in samplings]
    while any([next(stream, None) is not None for stream in streams]):
        pass
    assert [stream.result.tokens for stream in streams[:3]] == alone


def test_requests_of_many_threads_answer_as_they_do_alone(vlm: VLM) -> None:
    alone = [seeded(vlm, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda seed: seeded(vlm, seed), range(8))) == alone


def test_one_token_to_draw_among_is_the_likeliest(vlm: VLM) -> None:
    greedy = ask(vlm, QUESTION, [image(0)], **LONG).tokens
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert seeded(vlm, 5, **options) == greedy


def test_a_penalty_counts_the_prompt_and_the_answer(vlm: VLM) -> None:
    """At the highest penalty every token of the first answers is a new one, until the vocabulary is used up."""
    result = ask(
        vlm, QUESTION, [image(0)], max_new_tokens=9, ignore_eos=True, sampling=Sampling(repetition_penalty=100)
    )
    said = [*ids_of(QUESTION, 1), *result.tokens]
    assert len(set(result.tokens)) == 9
    assert not set(result.tokens) & set(ids_of(QUESTION, 1))
    assert len(said) > 9


def test_logprobs_are_those_of_the_models_logits(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    sampling = Sampling(0.7, 5, 0.9, seed=3, repetition_penalty=1.3, logprobs=4)
    result = ask(vlm, QUESTION, [image(0)], **LONG, sampling=sampling)
    steps = [outputs["logits"][0] for _, _, outputs in recorder.of("prefill") + recorder.of("decode")]
    assert [each.token for each in result.logprobs] == result.tokens
    assert len(result.logprobs) == len(steps) == 24
    for logits, each in zip(steps, result.logprobs, strict=True):
        total = sum(np.exp(float(value)) for value in logits)
        assert each.logprob == pytest.approx(np.log(np.exp(float(logits[each.token])) / total), abs=1e-4)
        assert [token for token, _ in each.top] == np.argsort(-logits)[:4].tolist()
        assert [value for _, value in each.top] == pytest.approx(
            np.log(np.exp(np.sort(logits)[:-5:-1]) / total), abs=1e-4
        )
    assert ask(vlm, QUESTION, [image(0)], **LONG).logprobs == []


def test_overflown_logits_are_told_when_drawing(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = runtime.open(bundle_path, threads=1)
    ask(vlm, "what", [], max_new_tokens=1)
    session = vlm._sessions["prefill_loose_16"]
    run = session.run
    monkeypatch.setattr(session, "run", lambda feeds: run(feeds) | {"logits": np.full((1, 32), np.inf, np.float32)})
    with pytest.raises(UserError, match="not numbers"):
        ask(vlm, "what", [], max_new_tokens=1, sampling=Sampling(1.0))


@pytest.mark.parametrize("within", [1, 2, 5])
def test_a_stop_string_over_tokens_ends_the_answer_and_never_shows(vlm: VLM, within: int) -> None:
    whole = ask(vlm, QUESTION, [image(0)], **LONG)
    start = whole.text.index(" ", 12) - 2  # from within a word on, over several
    stop = whole.text[start : start + 4 + within]
    cut = whole.text.index(stop)
    stream = vlm.stream(QUESTION, [image(0)], **LONG, sampling=Sampling(stop=["never there", stop]))
    shown = ""
    for piece in stream:
        shown += piece
        assert whole.text[:cut].startswith(shown)
    result = stream.result
    assert result.text == shown == whole.text[:cut]
    assert (result.finish_reason, result.stats.stop_reason) == ("stop", "stop_string")
    assert result.tokens == whole.tokens[: len(result.tokens)]
    said = vlm.tokenizer.decode(result.tokens)
    assert stop in said
    assert stop not in vlm.tokenizer.decode(result.tokens[:-1])  # no token after the one that completed it


def test_the_beginning_of_a_stop_string_is_given_at_the_end(vlm: VLM) -> None:
    whole = ask(vlm, QUESTION, [image(0)], **LONG)
    stop = whole.text[-5:] + " and more"
    assert ask(vlm, QUESTION, [image(0)], **LONG, sampling=Sampling(stop=stop)).text == whole.text


@pytest.mark.parametrize(
    ("level", "options", "reason"),
    [("tight", {"max_new_tokens": 3}, "length"), ("loose", {"max_new_tokens": 99}, "length"),
     ("tight", {"max_new_tokens": 999}, "length")],
)  # fmt: skip
def test_limits_finish_by_length(level: str, options: dict[str, Any], reason: str, bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level=level, threads=1)
    assert ask(vlm, QUESTION, [image(0)], ignore_eos=True, **options).finish_reason == reason


def test_the_end_token_finishes_by_stop(vlm: VLM) -> None:
    finished = {ask(vlm, QUESTION, [image(seed)], max_new_tokens=100).finish_reason for seed in range(20)}
    assert "stop" in finished


def test_cancelled_from_another_thread(vlm: VLM) -> None:
    """The reader blocks in the stream; the other thread cancels after the second piece."""
    whole = ask(vlm, QUESTION, [image(0)], max_new_tokens=60, ignore_eos=True)
    stream = vlm.stream(QUESTION, [image(0)], max_new_tokens=60, ignore_eos=True)
    second, cancelled, pieces = threading.Event(), threading.Event(), []

    def cancel() -> None:
        second.wait()
        stream.cancel()
        cancelled.set()

    other = threading.Thread(target=cancel)
    other.start()
    for piece in stream:
        pieces.append(piece)
        if len(pieces) == 2:
            second.set()
            cancelled.wait()
    other.join()
    result = stream.result
    assert (result.finish_reason, result.stats.stop_reason) == ("cancelled", "cancelled")
    assert result.text == "".join(pieces)
    assert result.tokens == whole.tokens[:2]
    assert result.stats.generated_tokens == 2
    assert result.stats.kv_bytes == whole.stats.kv_bytes
    assert list(stream) == []


def test_cancelled_before_it_is_read(bundle_path: Path, recorder: Recorder) -> None:
    stream = runtime.open(bundle_path, threads=1).stream("what", max_new_tokens=5)
    stream.cancel()
    assert list(stream) == []
    assert recorder.calls == []
    assert (stream.result.text, stream.result.tokens, stream.result.finish_reason) == ("", [], "cancelled")


def test_cancelled_while_a_long_prompt_is_read(
    bundle_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no more than the chunk that is being read."""
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    stream = vlm.stream("red " * 70, max_new_tokens=5)
    step, steps = vlm._step, []

    def cancelling(*arguments: Any) -> None:
        step(*arguments)
        steps.append(1)
        if len(steps) == 2:
            stream.cancel()

    monkeypatch.setattr(vlm, "_step", cancelling)
    assert list(stream) == []
    assert len(steps) == 2
    assert (stream.result.tokens, stream.result.finish_reason) == ([], "cancelled")


@pytest.mark.parametrize("read", [0, 1, 3])
def test_closed(bundle_path: Path, recorder: Recorder, read: int) -> None:
    stream = runtime.open(bundle_path, threads=1).stream("what", max_new_tokens=9, ignore_eos=True)
    pieces = [next(stream) for _ in range(read)]
    ran = len(recorder.calls)
    stream.close()
    assert list(stream) == []
    assert len(recorder.calls) == ran  # nothing runs any more
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text == "".join(pieces)
    assert len(stream.result.tokens) == stream.result.stats.generated_tokens == ran  # each run gave one


def test_closing_what_has_ended_changes_nothing(vlm: VLM) -> None:
    stream = vlm.stream(QUESTION, [image(0)], max_new_tokens=4, ignore_eos=True)
    assert "".join(stream) == stream.result.text
    stream.close()
    assert stream.result.finish_reason == "length"
    assert len(stream.result.tokens) == 4


def test_closed_by_another_thread_while_it_is_read(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = runtime.open(bundle_path, threads=1)
    stream, step, steps = vlm.stream("what", max_new_tokens=9, ignore_eos=True), vlm._step, list[int]()

    def closing(*arguments: Any) -> None:
        steps.append(1)
        if len(steps) == 2:
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join()
        step(*arguments)

    monkeypatch.setattr(vlm, "_step", closing)
    assert "".join(stream) == stream.result.text
    assert stream.result.finish_reason == "cancelled"
    assert len(steps) == 2


@pytest.mark.parametrize("way", ["close", "forget"])
def test_a_stream_that_is_left_frees_its_state(vlm: VLM, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states, read = [], vlm.read

    def reading(*arguments: Any) -> Any:
        context = yield from read(*arguments)
        states.append(weakref.ref(context.state))
        return context

    monkeypatch.setattr(vlm, "read", reading)
    stream = vlm.stream(QUESTION, [image(0)], **LONG)
    next(stream)
    assert states[0]() is not None
    if way == "close":
        stream.close()
    else:
        del stream
    assert states[0]() is None


@pytest.mark.parametrize("sampling", [None, {"temperature": 1}, 0.7])
def test_what_is_no_sampling(vlm: VLM, sampling: Any) -> None:
    with pytest.raises(UserError, match=r"must be a runtime\.sampling\.Sampling"):
        vlm.generate(QUESTION, [image(0)], sampling=sampling)


def cli(bundle: Path, *options: object) -> int:
    return command(main)(["ask", str(bundle), "what is it", "--max-new-tokens", "8", *map(str, options)])


def test_options_of_the_command_line(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: tuple[object, ...] = (
        "--temperature",
        0.8,
        "--top-k",
        6,
        "--top-p",
        0.95,
        "--min-p",
        0.01,
        "--repetition-penalty",
        1.2,
    )
    options += ("--seed", 4, "--logprobs", 2, "--stop", "no such words", "--stop", "neither these")
    assert cli(bundle_path, *options, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    sampling = Sampling(0.8, 6, 0.95, 0.01, 1.2, ["no such words", "neither these"], 4, 2)
    wanted = ask(runtime.open(bundle_path), "what is it", [], max_new_tokens=8, sampling=sampling)
    assert (values["answer"], values["tokens"]) == (wanted.text, wanted.tokens)
    assert values["finish_reason"] == wanted.finish_reason
    assert [each["token"] for each in values["logprobs"]] == wanted.tokens
    assert values["logprobs"][0]["logprob"] == wanted.logprobs[0].logprob
    assert [tuple(pair) for pair in values["logprobs"][0]["top"]] == wanted.logprobs[0].top


def test_log_probabilities_for_people(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(bundle_path, "--logprobs", 1) == 0
    out, err = capsys.readouterr()
    words = out.split()
    assert words
    lines = err.splitlines()
    assert len(lines) == len(words) + 2  # which backend and why, and the statistics
    for word, line in zip(words, lines, strict=False):
        assert line.startswith(f"'{word}' -")


class Third:
    """Calls the third token a repetition."""

    def __init__(self, watch: Watch) -> None:
        self.tokens = 0

    def add(self, token: int) -> bool:
        self.tokens += 1
        return self.tokens == 3


def test_alarms_are_told(
    bundle_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "Repetition", Third)
    for options in ([], ["--on-alarm", "retry"]):
        assert cli(bundle_path, "--level", "tight", *options) == 0
        err = capsys.readouterr().err
        assert "; alarm: repetition at token 3]" in err  # and not answered anew: a part was printed
    assert cli(bundle_path, "--level", "tight", "--on-alarm", "retry", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["level"], values["retries"], values["alarms"][0]) == (
        "loose",
        1,
        {"sign": "repetition", "tokens": 3},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--blindness", -1], "blindness must be at least 0, got -1.0"),
        (["--on-alarm", "lighter-next"], "invalid choice: 'lighter-next'"),
        (["--top-k", 3], "--top-k: at temperature 0 nothing is drawn: add  --temperature 1"),
        (["--seed", 3, "--min-p", 0.1], "--min-p, --seed: at temperature 0"),
        (["--temperature", 1, "--top-p", 2], "top_p must be from 0 to 1, got 2.0"),
        (["--temperature", "warm"], "invalid float value: 'warm'"),
        (["--stop", ""], "none of them empty"),
    ],
)
def test_mistakes_of_the_command_line(
    options: list[Any], message: str, bundle_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(bundle_path, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert " ".join(message.split()) in err
    assert err.count("\n") == 1
