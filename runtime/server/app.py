"""The server's paths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from runtime.generate import Result, TextStream
from runtime.server.answers import Answer, event
from runtime.server.errors import Refused
from runtime.server.guard import PATHS, Guard
from runtime.server.levels import Levels
from runtime.server.metrics import CONTENT_TYPE, Metrics
from runtime.server.protocol import Asked, Limits, check_length
from runtime.server.reading import left, read
from runtime.server.remote import Names
from runtime.server.room import Room
from runtime.server.worker import Job, Worker

__all__ = ["Limits", "create"]

PAGE = Path(__file__).parent / "page"


def create(levels: Levels, limits: Limits, token: str = "", local: bool = True) -> FastAPI:
    """The application; its worker is `app.state.worker`.

    Args:
        token: that requests must bear; "" for none.
        local: whether it listens to this machine only.
    """
    names = Names()
    metrics = Metrics(lambda: {level: vlm.monitor.counters for level, vlm in levels.opened.copy().items()})
    rows = levels.bundle.manifest.batch
    worker = Worker(limits.queue, rows, lambda job, result: metrics.answer(result, job.waited, job.first))
    metrics.gauge("queue_length", "Requests that wait for the model", lambda: worker.waiting)
    metrics.gauge("requests_here", "Requests that are read, wait, or are answered", lambda: worker.here)
    metrics.gauge("rows", "Answers that are computed at once, at most", lambda: rows)
    metrics.gauge("rows_in_use", "Answers that are computed", lambda: worker.running)
    metrics.counter("decode_steps", "Runs of decode graphs", lambda: worker.scheduler.steps)
    metrics.counter("decode_tokens", "Tokens that were read in them", lambda: worker.scheduler.tokens)
    if memory := levels.memory:
        metrics.gauge("memory_budget_bytes", "Memory that the process may take", lambda: memory.budget)
        metrics.gauge("memory_in_use_bytes", "Resident or reserved", memory.in_use)
        memory.others = lambda: worker.here > 1  # one that waits has its images in memory, and nothing reserved
        metrics.counter("memory_refused", "Requests that found no room", lambda: memory.refused)
        metrics.counter("memory_heavier", "Requests that got a heavier level for room", lambda: memory.pressed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.end)

    app = FastAPI(title="UniCache Edge", lifespan=lifespan, openapi_url=None)  # its documents load foreign scripts
    app.state.worker = worker
    app.add_middleware(Guard, metrics=metrics, body_bytes=limits.body_bytes, token=token, local=local)

    @app.exception_handler(Refused)
    def refused(request: Request, error: Refused) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    def failed(request: Request, error: HTTPException) -> JSONResponse:
        path, status, detail = request.url.path, error.status_code, error.detail
        if status == 405 and path.startswith("/v1/") and path not in PATHS:  # the page's files refuse a POST unread
            status, detail = 404, "Not Found"
        what = f"{request.method} {path}: {detail}"
        return Refused(status, what, headers=dict(error.headers or {})).response()

    @app.get("/healthz")
    def health() -> JSONResponse:
        state = "shutting down" if worker.closing else "ok"
        backend = levels.opened[levels.default].backend  # why that one holds paths, and is nobody's without a token
        told = {"status": state, "model": levels.name, "backend": backend}
        return JSONResponse(told, 503 if worker.closing else 200)

    @app.get("/metrics")
    def told() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [levels.described(name) for name in levels.models]}

    @app.get("/v1/models/{name}")
    def model(name: str) -> dict[str, Any]:
        return levels.described(name)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        leave = worker.enter()
        try:
            room = Room(levels.memory)
            asked = await worker.arriving(read(request, limits, room, names))
            room.release()  # what it took is in memory, and counted there
            level, reason = levels.level(asked.request.model)
            check_length(asked.messages, levels.bundle.manifest.levels[level].max_positions)
            job = Job(partial(_start, levels, level, asked), leave)
            worker.submit(job)
        except BaseException:
            leave()
            raise
        watching = asyncio.create_task(_watch(request, worker, job))
        try:
            events = job.events()
            first = await anext(events)  # or the error, while the status can still tell it
            answer = Answer(asked, levels, levels.open(level), reason, job)
        except BaseException:
            watching.cancel()
            worker.cancel(job)
            raise

        async def stream() -> AsyncIterator[bytes]:
            try:
                yield answer.begin()
                last = first
                while not isinstance(last, Result) and not watching.done():  # the client has not left
                    yield answer.piece(last)
                    await asyncio.sleep(0)  # pieces may be waiting, and the loop must see who has left meanwhile
                    last = await anext(events)
                if isinstance(last, Result):
                    yield answer.end(last)
            except Refused as error:
                yield event(error.body)
            finally:
                watching.cancel()
                worker.cancel(job)

        if asked.request.stream:
            return StreamingResponse(stream(), media_type="text/event-stream")
        try:
            last = first
            while not isinstance(last, Result):
                last = await anext(events)
            return JSONResponse(answer.whole(last))
        finally:
            watching.cancel()
            worker.cancel(job)

    @app.api_route("/v1/chat/completions", methods=["GET", "HEAD"])  # the page's files would say 404
    def wrong() -> Response:
        raise HTTPException(405, "send a POST", {"Allow": "POST"})

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


def _start(levels: Levels, level: str, asked: Asked) -> TextStream:
    """Begin to answer; in the worker's thread, which alone touches the models."""
    return levels.open(level).stream(
        asked.messages,
        [image.data for image in asked.images],
        asked.max_new_tokens,
        question_later=asked.request.unicache.question_later,
        sampling=asked.sampling,
        on_restart=None if asked.request.stream else lambda: None,
    )


async def _watch(request: Request, worker: Worker, job: Job) -> None:
    """End the answer of a client that has left."""
    await left(request)
    worker.cancel(job)
