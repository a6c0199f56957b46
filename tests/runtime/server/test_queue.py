"""The line before the model: order, limits, clients that leave, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engines.errors import UserError
from runtime.model import VLM
from runtime.server.errors import Refused
from runtime.server.worker import Job, Worker
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, question

Serve = Callable[..., Served]
LONG: dict[str, Any] = {"model": "bundle", "max_tokens": 1000}


class Gate:
    """Holds every answer before its first token is read; tells which questions came that far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Semaphore(0)
        self.order: list[int] = []
        read = VLM.read

        def held(vlm: VLM, request: Any, stats: Any) -> Any:
            self.order.append(request.max_new_tokens)
            self.reached.release()
            assert self.open.wait(20)
            return read(vlm, request, stats)

        monkeypatch.setattr(VLM, "read", held)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def send(
    pool: ThreadPoolExecutor, served: Served, tokens: int = 3, **options: Any
) -> Future[tuple[int, dict[str, str], Any]]:
    before = served.worker.here
    future = pool.submit(served.chat, question("what is it", png(image(1)), max_tokens=tokens, **options))
    until(lambda: served.worker.here > before)
    return future


def test_first_come_first_served(serve: Serve, gate: Gate, pool: ThreadPoolExecutor) -> None:
    served = serve()
    first = send(pool, served, 1)
    gate.wait()
    others = []
    for tokens in (5, 3, 4, 2):
        others.append(send(pool, served, tokens))
        until(lambda: served.worker.waiting == len(others))
    metrics = served.ask("GET", "/metrics")[2].decode()
    assert "unicache_queue_length 4.0\n" in metrics
    assert "unicache_requests_here 5.0\n" in metrics
    gate.open.set()
    assert [future.result()[0] for future in (first, *others)] == [200] * 5
    assert gate.order == [1, 5, 3, 4, 2]


def test_a_full_queue_refuses_before_the_body_is_read(serve: Serve, gate: Gate, pool: ThreadPoolExecutor) -> None:
    served = serve(queue=2)
    here = [send(pool, served) for _ in range(3)]
    status, headers, answer = served.chat(question("what"))
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (429, "queue_full", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    with socket.create_connection(("127.0.0.1", served.port)) as wire:
        wire.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n\r\n")
        assert b"429" in wire.recv(100)
    gate.open.set()
    assert [future.result()[0] for future in here] == [200] * 3
    assert served.chat(question("what", max_tokens=1))[0] == 200


def test_answers_side_by_side_are_those_of_single_requests(served: Served, pool: ThreadPoolExecutor) -> None:
    bodies = [
        question("what is it", *map(png, map(image, range(n % 3))), max_tokens=8, temperature=(n % 2) * 1.5, seed=n)
        for n in range(12)
    ]
    alone = [served.chat(body)[2]["choices"] for body in bodies]
    together = [answer[2]["choices"] for answer in pool.map(served.chat, bodies)]
    assert together == alone


@contextmanager
def left(served: Served, stream: bool, read: bool) -> Iterator[None]:
    """A client that sends a request and leaves; within, it has not left yet."""
    body = json.dumps(question("what is it", png(image(1)), max_tokens=1000, stream=stream))
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
        wire.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        if read:
            assert b"200" in wire.recv(400)
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_answer(serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served, steps, advance = serve(), [], VLM.advance

    def slow(*arguments: Any) -> Any:
        steps.append(1)
        time.sleep(0.01)
        return advance(*arguments)

    monkeypatch.setattr(VLM, "advance", slow)
    vlm = served.levels.open("tight")
    monkeypatch.setattr(vlm, "model", replace(vlm.model, eos_token_ids=[]))
    with left(served, stream, read=stream):
        until(lambda: len(steps) > 3)
    until(lambda: served.worker.here == 0)
    assert len(steps) < 90  # of the positions that the toy has
    assert (
        'unicache_answers_total{finish_reason="cancelled",level="tight"} 1.0'
        in served.ask("GET", "/metrics")[2].decode()
    )


def test_a_client_that_leaves_the_line_gives_its_place_to_others(
    serve: Serve, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    served = serve(queue=1)
    first = send(pool, served)
    gate.wait()
    with left(served, stream=False, read=False):
        until(lambda: served.worker.waiting)
        assert served.chat(question("what"))[0] == 429
    until(lambda: not served.worker.waiting)
    second = send(pool, served, 7)
    gate.open.set()
    assert [first.result()[0], second.result()[0]] == [200, 200]
    assert gate.order == [3, 7]


def test_a_request_that_does_not_arrive_gives_its_place_up(serve: Serve) -> None:
    served = serve(queue=1, body_seconds=0.2)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        wire.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        assert b" 408 " in wire.recv(100)
    until(lambda: served.worker.here == 0)


def test_shutting_down_ends_what_runs_and_refuses_what_is_new(
    serve: Serve, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    served = serve()
    here = [send(pool, served), send(pool, served, stream=True)]
    gate.wait()
    served.server.handle_exit(15, None)
    status, headers, answer = served.chat(question("what"))
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert int(headers["retry-after"]) > 0
    assert served.ask("GET", "/healthz")[:1] == (503,)
    gate.open.set()
    whole, streamed = (future.result() for future in here)
    assert whole[0] == 200
    assert whole[2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert streamed[2].endswith(b"data: [DONE]\n\n")
    until(lambda: served.server.should_exit or served.worker.here == 0)


def test_a_second_signal_cancels(serve: Serve, gate: Gate, pool: ThreadPoolExecutor) -> None:
    served = serve()
    running, waiting = send(pool, served, 1000), send(pool, served, 1000)
    gate.wait()
    served.server.handle_exit(15, None)
    served.server.handle_exit(15, None)
    until(lambda: all(job.cancelled for job in served.worker._running))
    gate.open.set()
    for future in (running, waiting):  # neither has said anything
        status, headers, answer = future.result()
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in headers
    assert gate.order == [1000]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut_off_does_not_look_whole(serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    served, advance = serve(), VLM.advance
    vlm = served.levels.open("tight")
    monkeypatch.setattr(vlm, "model", replace(vlm.model, eos_token_ids=[]))

    def cut(*arguments: Any) -> Any:
        served.worker.cancel_all()
        return advance(*arguments)

    monkeypatch.setattr(VLM, "advance", cut)
    answer = served.chat(question("what is it", max_tokens=1000, stream=stream))[2]
    if stream:
        answer = json.loads(answer.split(b"\n\n")[-3][6:])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["unicache"]["stop_reason"] == "cancelled"


def test_cancelled_jobs_decode_nothing_and_later_ones_are_refused() -> None:
    asyncio.run(_cancelled_and_late())


async def _cancelled_and_late() -> None:
    worker = Worker(4)
    left: list[int] = []

    def begins() -> Any:
        raise AssertionError("it began")

    job = Job(begins, lambda: left.append(1))
    job.cancel()
    worker.submit(job)
    with pytest.raises(Refused, match="shutting down"):
        await anext(job.events())
    await asyncio.to_thread(worker.end)
    assert left == [1]
    with pytest.raises(Refused, match="shutting down"):
        worker.submit(Job(begins, lambda: None))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_refused_client_is_told_how_long_the_line_takes(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Requests that are here, by a mean that moves an eighth towards every answer's seconds, so many at once."""
    asyncio.run(_told(monkeypatch, rows))


async def _told(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    now, worker = [0.0], Worker(6, rows)
    monkeypatch.setattr("runtime.server.worker.time.perf_counter", lambda: now[0])
    mean = worker.seconds

    def fails(seconds: float) -> Any:
        now[0] += seconds
        raise UserError("it took long")

    for seconds in (3.0, 11.0, 5.0, 40.0, 6.5):
        job = Job(partial(fails, seconds), lambda: None)
        worker.submit(job)
        with pytest.raises(Refused, match="it took long"):
            await anext(job.events())
        mean = mean * 7 / 8 + seconds / 8
    until(lambda: worker.seconds == pytest.approx(mean))
    places = [worker.enter() for _ in range(6 + rows)]
    with pytest.raises(Refused) as refused:
        worker.enter()
    assert refused.value.headers == {"Retry-After": str(math.ceil((6 + rows) * mean / rows))}
    assert (6 + rows) * mean / rows < 60
    for leave in places:
        leave()
    await asyncio.to_thread(worker.end)


def test_connections_without_a_request_are_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.serve.WAIT", 0.3)
    served = serve()
    for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: "):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
            wire.sendall(sent)
            assert wire.recv(100) == b""
