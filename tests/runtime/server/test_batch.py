"""Several answers at once: equal to single ones, each at its own pace, with places that are given up and taken."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import bundle as bundles
from runtime import memory, probe
from runtime.memory import MIB, Cost
from runtime.model import VLM
from runtime.server.levels import Levels
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, question, serving
from tests.runtime.server.test_queue import left, until


@pytest.fixture
def served(of_batch: Callable[[int], Path]) -> Iterator[Served]:
    with serving(Levels(VLM.open(of_batch(3), level="tight", threads=1))) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


def metrics(served: Served) -> dict[str, float]:
    text = served.ask("GET", "/metrics")[2].decode()
    return {name: float(value) for name, value in re.findall(r"^unicache_(\w+) (\S+)$", text, re.MULTILINE)}


def endless(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer ends by itself before the model's positions do."""
    vlm = served.levels.open("tight")
    monkeypatch.setattr(vlm, "model", replace(vlm.model, eos_token_ids=[]))


def test_answers_of_a_batch_are_those_of_single_requests(served: Served, pool: ThreadPoolExecutor) -> None:
    models = ["bundle", "bundle", "bundle:loose", "bundle:thrifty"]
    bodies = [
        question("what is it", *map(png, map(image, range(n % 3))), max_tokens=12, temperature=(n % 2) * 1.5, seed=n)
        | {"model": models[n % 4], "logprobs": True}
        for n in range(16)
    ]

    def answered(body: dict[str, Any]) -> Any:
        choice = served.chat(body)[2]["choices"][0]
        told = choice.pop("logprobs")["content"]
        return choice, [each["token"] for each in told], [each["logprob"] for each in told]

    alone = [answered(body) for body in bodies]
    before = metrics(served)
    assert before["decode_tokens_total"] == before["decode_steps_total"] > 0
    assert (before["rows"], before["rows_in_use"], before["queue_length"]) == (3, 0, 0)
    for (*said, logprobs), (*single, its) in zip(pool.map(answered, bodies), alone, strict=True):
        assert said == single
        assert logprobs == pytest.approx(its, abs=1e-4)
    after = metrics(served)
    more = {name: after[name] - before[name] for name in ("decode_tokens_total", "decode_steps_total")}
    assert more["decode_tokens_total"] == before["decode_tokens_total"]
    assert more["decode_steps_total"] < before["decode_steps_total"]


def test_answers_stream_side_by_side(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients who each wait for the other two, and a fourth who waits for a place."""
    endless(served, monkeypatch)
    together = threading.Barrier(3, timeout=20)
    with ThreadPoolExecutor(4) as pool:

        def read(number: int, tokens: int) -> str:
            from openai import OpenAI

            client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
            messages: Any = question("what is it", png(image(number)))["messages"]
            stream = client.chat.completions.create(
                model="bundle", messages=messages, max_tokens=tokens, stream=True, temperature=1.5, seed=number
            )
            text = ""
            for chunk in stream:
                piece = chunk.choices[0].delta.content
                if piece and not text and number < 3:
                    together.wait()
                text += piece or ""
            return text

        first = [pool.submit(read, number, 80) for number in range(3)]
        last = pool.submit(read, 3, 5)
        assert all(len(each.result()) > 20 for each in first)
        assert last.result()
    assert not together.broken


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_row_to_one_that_waits(
    served: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    endless(served, monkeypatch)
    reading, step = threading.Event(), served.worker.scheduler.step
    monkeypatch.setattr(served.worker.scheduler, "step", lambda: (reading.wait(0.02), step()))  # answers take seconds
    with left(served, stream, read=False):
        until(lambda: served.worker.running == 1)
        others = [pool.submit(served.chat, question("what is it", max_tokens=n)) for n in (90, 91)]
        until(lambda: served.worker.running == 3)
        waits = pool.submit(served.chat, question("what is it", max_tokens=2))
        until(lambda: served.worker.waiting == 1)
        assert not any(each.done() for each in others)
    assert waits.result()[0] == 200
    assert not any(each.done() for each in others)
    reading.set()
    assert [each.result()[0] for each in others] == [200, 200]


def test_what_finds_no_room_beside_others_waits_for_them(
    of_batch: Callable[[int], Path], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of 300 MiB, of which 100 are in use, and answers that take more than 100 each."""
    graphs = bundles.read(of_batch(3)).manifest.graphs
    monkeypatch.setattr(probe, "costs", lambda *_: {name: Cost(MIB, 100 * MIB) for name in graphs})
    monkeypatch.setattr(memory, "resident", lambda: 100 * MIB)
    monkeypatch.setattr(memory, "settle", lambda: None)
    vlm = VLM.open(of_batch(3), level="tight", threads=1, memory_budget="300MiB")
    with serving(Levels(vlm)) as served:
        endless(served, monkeypatch)
        step = served.worker.scheduler.step
        monkeypatch.setattr(served.worker.scheduler, "step", lambda: (threading.Event().wait(0.01), step()))
        answers = [pool.submit(served.chat, question("what is it", max_tokens=n)) for n in (50, 40, 30)]
        until(lambda: served.worker.waiting == 2 and metrics(served)["memory_refused_total"] == 1)
        assert served.worker.running == 1
        for each, tokens in zip(answers, (50, 40, 30), strict=True):
            status, _, body = each.result()
            assert (status, body["usage"]["completion_tokens"]) == (200, tokens)
        until(lambda: served.worker.here == 0)


def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take a while, so that a signal comes in the middle of all answers."""
    step = served.worker.scheduler.step
    monkeypatch.setattr(served.worker.scheduler, "step", lambda: (threading.Event().wait(0.01), step()))


def test_a_shutdown_lets_all_rows_end(
    served: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(served, monkeypatch)
    slow(served, monkeypatch)
    answers = [pool.submit(served.chat, question("what is it", max_tokens=n)) for n in (5, 20, 6, 7)]
    until(lambda: served.worker.running == 3)
    served.server.handle_exit(15, None)
    assert served.chat(question("what"))[0] == 503
    assert [each.result()[2]["usage"]["completion_tokens"] for each in answers] == [5, 20, 6, 7]


def test_a_second_signal_ends_all_rows(
    served: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(served, monkeypatch)
    slow(served, monkeypatch)
    answers = [pool.submit(served.chat, question("what is it", max_tokens=1000)) for _ in range(4)]
    until(lambda: served.worker.running == 3 and served.worker.waiting == 1)
    until(lambda: metrics(served)["decode_tokens_total"] > 9)
    served.worker.cancel_all()
    told = sorted(each.result()[0] for each in answers)
    assert told == [200, 200, 200, 503]
    until(lambda: served.worker.here == 0)
