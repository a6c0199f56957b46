"""The monitor: its signs against the formulas told with loops, and what follows an alarm through the toy bundle."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime
from engines.errors import UserError
from runtime import backends, monitor
from runtime.admit import line
from runtime.generate import Result
from runtime.model import VLM
from runtime.monitor import Alarm, Jump, Monitor, Repetition, Watch, Watcher
from runtime.sampling import Sampling
from tests.runtime import toy
from tests.runtime.asking import Recorder, ask, image

SMALL = Watch(recent=3, period=4, repeats=3, repeated=6)  # for answers of 20 tokens
values = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


def probabilities(logits: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


@given(values, st.data())
def test_distance(logits: list[float], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.floats(-30, 30, width=32), min_size=len(logits), max_size=len(logits)))
    first, second = probabilities(logits), probabilities(others)
    likeliest = sorted(range(len(logits)), key=lambda i: -logits[i])[:20]
    if len(logits) > 20 and logits[likeliest[-1]] == sorted(logits)[-21]:
        return  # any of the equal ones
    wanted = sum(abs(math.log(first[i]) - math.log(second[i])) for i in likeliest) / len(likeliest)
    got = monitor.distance(np.array(logits, np.float32), np.array(others, np.float32))
    assert got == pytest.approx(wanted, abs=1e-3)
    shifted = np.array(logits, np.float32) + np.float32(4)  # logits that stand for the same
    assert monitor.distance(np.array(logits, np.float32), shifted) == pytest.approx(0, abs=1e-4)


@given(st.lists(st.floats(0, 11), max_size=40), st.integers(1, 6), st.floats(1, 3), st.floats(0, 3))
def test_jump(entropies: list[float], recent: int, ratio: float, margin: float) -> None:
    jump = Jump(Watch(recent=recent, ratio=ratio, margin=margin))
    for i, entropy in enumerate(entropies, 1):
        got, before = jump.add(entropy), entropies[: i - recent]
        wanted = False
        if i >= 2 * recent:
            limit = ratio * sum(before) / len(before) + margin
            mean = sum(entropies[i - recent : i]) / recent
            if abs(mean - limit) < 1e-9:
                return
            wanted = mean > limit
        assert got == wanted


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 6), st.integers(2, 4), st.integers(2, 12))
def test_repetition(tokens: list[int], period: int, repeats: int, repeated: int) -> None:
    repetition = Repetition(Watch(period=period, repeats=repeats, repeated=repeated))
    for i, token in enumerate(tokens, 1):
        wanted = False
        for length in range(1, period + 1):
            needed = max(repeats * length, repeated)
            tail = tokens[max(i - needed, 0) : i]
            wanted |= len(tail) == needed and all(tail[j] == tail[j - length] for j in range(length, needed))
        assert repetition.add(token) == wanted


def test_planted_signs_among_plain_text() -> None:
    """Ordinary ups and downs, and words that come back, are no alarm; a planted jump and a planted loop are."""
    rng = np.random.default_rng(0)
    entropies, tokens = rng.gamma(1.0, 1.0, 2000), rng.zipf(1.3, 2000) % 5000
    jump, repetition = Jump(Watch()), Repetition(Watch())
    early = [(jump.add(e), repetition.add(int(t))) for e, t in zip(entropies, tokens, strict=True)]
    assert early == [(False, False)] * 2000
    jumps = [jump.add(value) for value in rng.gamma(30.0, 0.15, 16)]
    assert jumps.index(True) < 16
    loops = [repetition.add(token) for token in [7, 8, 9, 10, 11, 12, 13] * 5]
    assert loops.index(True) == 4 * 7 - 1


def test_each_sign_alarms_once() -> None:
    watcher = Watcher(SMALL)
    new = [watcher.add(entropy, 1) for entropy in [0.0] * 10 + [math.log(4)] * 10]
    assert [alarm.sign for alarm in watcher.alarms] == ["repetition", "entropy"]
    assert sum(new) == 2
    assert watcher.tokens == 20
    assert watcher.entropy == pytest.approx(10 * math.log(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_alarm": "panic"}, "on_alarm must be none, lighter-next, retry, got 'panic'"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"period": 0.5}, "period must be a whole number"),
        ({"repeats": 1}, "repeats must be at least 2"),
        ({"ratio": 0.9}, "ratio must be at least 1"),
        ({"margin": -1}, "margin must be at least 0"),
        ({"blindness": math.nan}, "blindness must be a number"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Watch(**options)


Change = Callable[[int, np.ndarray], np.ndarray]


def loop(step: int, logits: np.ndarray) -> np.ndarray:
    """From the fifth token on, "yes no yes no"."""
    planted = np.where(np.arange(toy.VOCABULARY) == toy.WORDS.index(("yes", "no")[step % 2]), 20, 0)
    return planted[None].astype(np.float32) if step >= 4 else logits


def doubt(step: int, logits: np.ndarray) -> np.ndarray:
    """Sure of its words, and from the ninth token on of none."""
    return (logits * (0 if step >= 8 else 40)).astype(np.float32)


def sick(bundle_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, watch: Watch, level: str = "tight") -> VLM:
    """A model whose level `tight` is broken: its decoded logits are changed, by the step of the answer."""
    load, steps = backends.load, [0]

    def loading(bundle: Any, graph: str, *options: Any) -> Any:
        session: Any = load(bundle, graph, *options)
        run = session.run

        def changed(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            kind = graph.partition("_")[0]
            steps[0] = {"prefill": 0, "decode": steps[0] + 1}.get(kind, steps[0])
            outputs = run(feeds)
            if "tight" in graph and "logits" in outputs:
                outputs["logits"] = change(steps[0], outputs["logits"])
            return outputs

        session.run = changed
        return session

    monkeypatch.setattr(backends, "load", loading)
    vlm = runtime.open(bundle_path, level=level, threads=1)
    vlm.monitor = Monitor(watch)
    return vlm


def question(vlm: VLM, **options: Any) -> Result:
    return ask(vlm, "what is it", [image(0)], **{"max_new_tokens": 20, "ignore_eos": True, **options})


def healthy(bundle_path: Path, **options: Any) -> Result:
    return question(runtime.open(bundle_path, level="loose", threads=1), **options)


RETRY = Watch("retry", SMALL.recent, period=4, repeats=3, repeated=6)
NEXT = Watch("lighter-next", SMALL.recent, period=4, repeats=3, repeated=6)


def test_the_lighter_level_is_the_one_that_keeps_more(bundle_path: Path) -> None:
    manifest = runtime.open(bundle_path).bundle.manifest
    assert {level: line(manifest, level, False) for level in manifest.levels} == {
        "loose": ["tight", "loose"], **{level: [level, "loose"] for level in ("tight", *toy.ADAPTIVE)}
    }  # fmt: skip


@pytest.mark.parametrize(("change", "sign", "at"), [(loop, "repetition", 10), (doubt, "entropy", 9)])
def test_a_broken_answer_is_given_anew_at_the_lighter_level(
    change: Change, sign: Any, at: int, bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = sick(bundle_path, monkeypatch, change, RETRY)
    sampling = Sampling(0.7, seed=3, logprobs=1) if change is loop else Sampling(logprobs=1)
    result, wanted = question(vlm, sampling=sampling), healthy(bundle_path, sampling=sampling)
    assert (result.text, result.tokens, result.logprobs) == (wanted.text, wanted.tokens, wanted.logprobs)
    stats = result.stats
    assert (stats.level, stats.retries, stats.kv_bytes) == ("loose", 1, wanted.stats.kv_bytes)
    assert stats.stop_reason == wanted.stats.stop_reason
    assert stats.alarms[0].sign == sign
    assert at <= stats.alarms[0].tokens <= at + 3
    count = vlm.monitor.counters
    assert (count.requests, count.retries, count.lightened) == (1, 1, 0)
    assert count.tokens == 20 + stats.alarms[0].tokens
    assert getattr(count, f"{sign}_alarms") >= 1


def test_what_was_streamed_is_not_contradicted(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second answer once a piece was given; the next request is asked at the lighter level instead."""
    vlm = sick(bundle_path, monkeypatch, loop, RETRY)
    stream = vlm.stream("what is it", [image(0)], max_new_tokens=20, ignore_eos=True)
    pieces = list(stream)
    result = stream.result
    assert "".join(pieces) == result.text
    assert result.text.endswith("yes no yes no yes no")
    assert (result.stats.level, result.stats.retries) == ("tight", 0)
    assert [alarm.sign for alarm in result.stats.alarms] == ["repetition"]
    after = question(vlm)
    assert after.stats.level == "loose"
    assert after.tokens == healthy(bundle_path).tokens


def test_a_caller_may_allow_to_restart(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = sick(bundle_path, monkeypatch, loop, RETRY)
    pieces: list[str] = []
    void: list[str] = []

    def restart() -> None:
        void.extend(pieces)
        pieces.clear()

    stream = vlm.stream("what is it", [image(0)], max_new_tokens=20, ignore_eos=True, on_restart=restart)
    for piece in stream:
        pieces.append(piece)
    assert len(void) > 5
    assert "".join(pieces) == stream.result.text == healthy(bundle_path).text


def test_nothing_was_shown_yet_so_nothing_is_contradicted(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens show nothing: a stream may still begin anew after many of them."""

    def silent(step: int, logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(toy.VOCABULARY) == toy.END, 20, 0)[None].astype(np.float32)

    vlm = sick(bundle_path, monkeypatch, silent, RETRY)
    stream = vlm.stream("what is it", [image(0)], max_new_tokens=20, ignore_eos=True)
    assert "".join(stream) == stream.result.text == healthy(bundle_path).text
    assert stream.result.stats.retries == 1


def test_a_quiet_request_leads_back(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = sick(bundle_path, monkeypatch, loop, NEXT)
    levels = [question(vlm).stats.level for _ in range(5)]
    assert levels == ["tight", "loose", "tight", "loose", "tight"]
    count = vlm.monitor.counters
    assert (count.requests, count.repetition_alarms, count.lightened, count.retries) == (5, 3, 2, 0)


def test_by_default_it_only_tells(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = sick(bundle_path, monkeypatch, loop, SMALL)
    first, second = question(vlm), question(vlm)
    assert first.tokens == second.tokens
    assert {first.stats.level, second.stats.level} == {"tight"}
    assert [alarm.sign for alarm in first.stats.alarms] == ["repetition"]
    assert Monitor().watch.on_alarm == "none"


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("loose", {}),  # none is lighter
        ("tight", {"max_new_tokens": 22}),  # the lighter one never compacts, and has no room for the answer
    ],
)
def test_where_no_lighter_level_takes_the_request(
    level: str, options: dict[str, Any], bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = sick(bundle_path, monkeypatch, loop, RETRY, level)
    found = [question(vlm, **options).stats for _ in range(2)]
    assert [(stats.level, stats.retries) for stats in found] == [(level, 0)] * 2
    assert vlm.monitor.lighter == 0


def test_a_question_that_comes_later_has_its_own_lighter_level(tmp_path: Path, recorder: Recorder) -> None:
    """Level tight names loose for it: there is none lighter, while a known question may go to loose."""
    vlm = runtime.open(toy.build(tmp_path / "bundle", unknown="loose"), level="tight", threads=1)
    vlm.monitor = Monitor(NEXT, lighter=1)
    assert question(vlm, question_later=True).stats.level == "loose"
    vlm.monitor.lighter = 1
    assert question(vlm).stats.level == "tight"  # loose only takes another's place here


def test_the_entropy_of_an_answer(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    result = question(vlm)
    steps = [outputs["logits"][0] for _, _, outputs in recorder.of("prefill") + recorder.of("decode")]
    each = [-sum(p * math.log(p) for p in probabilities(logits.tolist()) if p > 0) for logits in steps]
    assert result.stats.entropy == pytest.approx(sum(each) / 20, abs=1e-4)
    assert vlm.monitor.counters.entropy == pytest.approx(sum(each), abs=1e-3)


def blind(vlm: VLM) -> None:
    """Make its level `tight` see nothing."""
    vlm.session("vision_tight", question(vlm).stats)
    session: Any = vlm._sessions["vision_tight"]
    run = session.run

    def darkened(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = run(feeds)
        kept = np.arange(outputs["kept"].size, dtype=outputs["kept"].dtype)[None]
        return outputs | {"visual_tokens": np.zeros_like(outputs["visual_tokens"]), "kept": kept}

    session.run = darkened


PROBE = Watch("retry", blindness=0.01)


def test_a_blind_model_is_asked_anew_before_anything_shows(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    blind(vlm)
    vlm.monitor = Monitor(PROBE)
    stream = vlm.stream("what is it", [image(0)], max_new_tokens=20, ignore_eos=True)
    assert "".join(stream) == stream.result.text == healthy(bundle_path).text
    assert stream.result.stats.alarms == [Alarm("blind", 0)]
    assert (stream.result.stats.level, vlm.monitor.counters.blind_alarms) == ("loose", 1)


def test_a_model_that_sees_is_not_blind(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    plain = question(vlm)
    recorder.calls.clear()
    vlm.monitor = Monitor(PROBE)
    result = question(vlm)
    assert (result.tokens, result.stats.alarms) == (plain.tokens, [])
    looks = [feeds["pixel_values"] for _, feeds, _ in recorder.of("vision")]
    assert [bool(look.any()) for look in looks] == [False, True]
    assert len(recorder.of("prefill")) == 2
    recorder.calls.clear()
    ask(vlm, "what is it", [], max_new_tokens=2)
    assert len(recorder.of("prefill")) == 1  # without an image there is nothing to be blind to


def test_cancelled_and_closed_answers_are_counted(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    for end in ("cancel", "close"):
        stream = vlm.stream("what is it", [image(0)], max_new_tokens=20, ignore_eos=True)
        next(stream)
        getattr(stream, end)()
        list(stream)
    assert vlm.monitor.counters.requests == 2
    assert vlm.monitor.counters.tokens == 2


def test_counters_of_many_threads(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    question(vlm)
    threads = [threading.Thread(target=lambda: [question(vlm) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vlm.monitor.counters.requests == 41
    assert vlm.monitor.counters.tokens == 41 * 20
