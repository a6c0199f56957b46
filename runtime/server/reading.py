"""A request on its way in: its body and the images that it names, in so many seconds, while its client is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from runtime.server.errors import CANCELLED, Refused
from runtime.server.protocol import FILE, FILES, FORM, Asked, Limits, complete, parse
from runtime.server.remote import Names, Remote
from runtime.server.room import Room

T = TypeVar("T")
# It warns of every broken body: that is the client's to know, who gets a 400, and could fill the server's log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


async def read(request: Request, limits: Limits, room: Room, names: Names) -> Asked:
    """Read a request, JSON or multipart, and fetch its images.

    Args:
        room: takes memory before it is allocated.

    Raises:
        Refused: it is not understood, asks for what is not supported, is over a limit, or its client has left.
    """
    remote = Remote(limits.image_hosts, limits.body_bytes, limits.body_seconds, names, room.take)  # its time begins
    try:
        body, files = await asyncio.wait_for(_body(room.entered(request), limits), limits.body_seconds)
    except asyncio.TimeoutError:  # noqa: UP041 (in Python 3.10 another one than the builtin)
        raise Refused(408, f"the request did not arrive within {limits.body_seconds:g} s", "timeout") from None
    except ClientDisconnect:
        raise CANCELLED.with_traceback(None) from None
    asked = await run_in_threadpool(parse, body, limits, room.take)
    urls = [url for url in asked.image_urls if remote.allows(url)]
    fetched = await _unless_it_leaves(request, remote.fetch_all(urls)) if urls else {}
    return await run_in_threadpool(complete, asked, files, fetched, limits, room.take)


async def left(request: Request) -> None:
    """Wait until the client has left; its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, limits: Limits) -> tuple[bytes, list[bytes] | None]:
    """A request's JSON, and the files of a multipart one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body(), None
    if kind == "multipart/form-data":
        async with request.form(max_files=FILES, max_fields=1, max_part_size=limits.body_bytes) as form:
            if not isinstance(text := form.get(FORM), str) or set(form) - {FORM, FILE}:
                raise Refused(400, f"a multipart request has one field {FORM!r}, JSON, and files {FILE!r}")
            files = [await file.read() for file in form.getlist(FILE) if isinstance(file, UploadFile)]
            return text.encode(errors="replace"), files
    raise Refused(415, f"content type {kind!r}: send application/json or multipart/form-data")


async def _unless_it_leaves(request: Request, doing: Coroutine[Any, Any, T]) -> T:
    task, leaving = asyncio.create_task(doing), asyncio.create_task(left(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        task.cancel()
        leaving.cancel()
    raise CANCELLED.with_traceback(None)
