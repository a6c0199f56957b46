"""A server in a thread of the test's own process, on a free port."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from runtime.model import VLM
from runtime.server.app import create
from runtime.server.command import listen
from runtime.server.levels import Levels
from runtime.server.protocol import Limits
from runtime.server.serve import Server

if TYPE_CHECKING:
    from tests.runtime.server.hosts import Host


class Served:
    """A running server, asked in bytes."""

    def __init__(self, levels: Levels, server: Server, port: int, worker: Any) -> None:
        self.levels, self.server, self.port, self.worker = levels, server, port, worker
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body; JSON is read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = json.dumps(body) if isinstance(body, dict | list) else body
        given = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, given | (headers or {}))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        told = {name.lower(): value for name, value in response.getheaders()}
        return response.status, told, json.loads(text) if "json" in told.get("content-type", "") else text

    def chat(self, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        return self.ask("POST", "/v1/chat/completions", body, headers)


@contextmanager
def serving(levels: Levels, token: str = "", local: bool = True, **limits: Any) -> Iterator[Served]:
    app = create(levels, Limits(**limits), token, local)
    server = Server(app)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Served(levels, server, listening.getsockname()[1], app.state.worker)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def levels(bundle_path: Path) -> Levels:
    return Levels(VLM.open(bundle_path, level="tight", threads=1))


@pytest.fixture(scope="module")
def served(levels: Levels) -> Iterator[Served]:
    with serving(levels) as running:
        yield running


@pytest.fixture
def serve(levels: Levels) -> Iterator[Callable[..., Served]]:
    """Servers with other limits."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(levels, **options))


@pytest.fixture
def far() -> Iterator[Host]:
    """Of images."""
    from tests.runtime.server import hosts  # which imports this module

    with hosts.Host() as host:
        threading.Thread(target=host.serve_forever, args=(0.01,), daemon=True).start()
        yield host
        host.shutdown()


@pytest.fixture
def address(far: Host) -> str:
    return far.name


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(text: str, *images: bytes, **options: Any) -> dict[str, Any]:
    """A request's body."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in images]
    return {
        "model": "bundle",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
    } | options
