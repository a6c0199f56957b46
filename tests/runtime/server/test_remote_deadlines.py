"""Hosts and names that let a request wait: it ends in time, and with its client or its server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.server.errors import Refused
from runtime.server.remote import Names, Remote, host
from tests.runtime.server.conftest import Served, question
from tests.runtime.server.hosts import LONG, PICTURE, Host, fetched, remote
from tests.runtime.server.test_command import ROOT, ask, running
from tests.runtime.server.test_mistakes import refusal, with_url
from tests.runtime.server.test_queue import until

Serve = Callable[..., Served]


@pytest.mark.parametrize("path", ["/drips-status", "/drips-headers", "/drips-body", "/hangs"])
def test_a_host_that_drips_ends_in_time(address: str, path: str) -> None:
    with pytest.raises(Refused, match=r"did not arrive in time \(0.3 s"):
        fetched(address, path, seconds=0.3)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_host_that_says_nothing_ends_in_time(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/a.png"
        with pytest.raises(Refused, match="did not arrive in time"):
            asyncio.run(asyncio.wait_for(remote("127.0.0.1", seconds=0.2).fetch(url), 20))


def test_the_images_of_a_request_have_a_time_together(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("runtime.server.remote.time", SimpleNamespace(monotonic=lambda: now))
    whole = remote(address, seconds=LONG * 100)
    assert asyncio.run(whole.fetch(f"http://{address}/a")).data == PICTURE
    now = LONG * 100 - 0.2
    with pytest.raises(Refused, match=r"drips-body.*in time"):
        asyncio.run(whole.fetch(f"http://{address}/drips-body"))


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A name that is not found before the event is set; others are at once."""
    found, look_up = threading.Event(), socket.getaddrinfo

    def slow(name: Any, *arguments: Any, **options: Any) -> Any:
        if name == "lost.example":
            assert found.wait(20)
            name = "127.0.0.1"
        return look_up(name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield found
    found.set()


def lookups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "names"]


def test_a_name_that_is_not_found_ends_in_time_and_holds_one_thread(address: str, lost: threading.Event) -> None:
    names, url = Names(), f"http://lost.example:{address.partition(':')[2]}/a.png"
    hosts = frozenset([host("lost.example")])

    async def run() -> None:
        short = [Remote(hosts, 1 << 20, 0.2, names).fetch(url) for _ in range(20)]
        for error in await asyncio.gather(*short, return_exceptions=True):
            assert isinstance(error, Refused)
            assert "did not arrive in time" in error.message
        assert [thread.daemon for thread in lookups()] == [True]
        later = asyncio.create_task(Remote(hosts, 1 << 20, 20, names).fetch(url))
        await asyncio.sleep(0.05)
        assert len(lookups()) == 1
        lost.set()
        assert (await later).data == PICTURE
        assert (await Remote(hosts, 1 << 20, 20, names).fetch(url)).data == PICTURE  # asked for anew

    asyncio.run(run())


def test_a_fetch_that_is_late_is_let_go(serve: Serve, far: Host) -> None:
    served = serve(image_hosts=frozenset([host(far.name)]), body_seconds=0.3, queue=1)
    for _ in range(4):  # more than its places
        error = refusal(served.chat(with_url(f"http://{far.name}/hangs")), 400)
        assert "did not arrive in time" in error["message"]
        assert far.left.acquire(timeout=20)
    assert served.worker.here == 0


def posted(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection over which a request was sent."""
    data = json.dumps(body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
    wire = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    wire.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode())
    return wire


def test_a_client_that_leaves_ends_its_fetch(
    serve: Serve, far: Host, lost: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(image_hosts=frozenset(map(host, [far.name, "lost.example"])), queue=1)
    with posted(served, with_url(f"http://{far.name}/hangs")), posted(served, with_url("http://lost.example/a")):
        until(lambda: served.worker.here == 2 and lookups())
        assert served.chat(question("what"))[0] == 429
    until(lambda: served.worker.here == 0)
    assert far.left.acquire(timeout=20)
    assert served.chat(question("what", max_tokens=1))[0] == 200
    assert caplog.text == ""


def test_a_client_that_leaves_amid_its_request_is_no_error_of_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    for kind in ("application/json", "multipart/form-data; boundary=edge"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
            wire.sendall(f"{head}Content-Length: 99\r\n\r\n--edge".encode())
            until(lambda: served.worker.here)
        until(lambda: served.worker.here == 0)
    assert caplog.text == ""


def test_a_second_signal_ends_requests_that_are_read(serve: Serve, far: Host) -> None:
    served = serve(image_hosts=frozenset([host(far.name)]))
    with posted(served, with_url(f"http://{far.name}/hangs")) as wire, socket.socket() as slow:
        slow.connect(("127.0.0.1", served.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        slow.sendall(head + b"Content-Length: 99\r\n\r\n{")
        until(lambda: served.worker.here == 2)
        served.server.handle_exit(15, None)
        served.server.handle_exit(15, None)
        for each in (wire, slow):
            each.settimeout(20)
            assert b" 503 " in each.recv(100)
    assert far.left.acquire(timeout=20)
    until(lambda: served.worker.here == 0)


@pytest.mark.parametrize(("grace", "signals"), [(1, 1), (600, 2)])
def test_the_process_ends_while_hosts_and_names_hang(
    bundle_path: Path, far: Host, tmp_path: Path, grace: int, signals: int
) -> None:
    """A name that is looked up for ever, as where no resolver answers."""
    slow = "import socket, threading; look_up = socket.getaddrinfo\n"
    slow += "def slow(name, *rest, **more):\n    if name == 'lost.example':\n        print('lost', flush=True)\n"
    slow += "        threading.Event().wait()\n    return look_up(name, *rest, **more)\nsocket.getaddrinfo = slow\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    hosts = ("--image-host", "lost.example", "--image-host", far.name, "--body-seconds", 600, "--grace", grace)
    with (
        ThreadPoolExecutor(3) as pool,
        running(bundle_path, *hosts, PYTHONPATH=paths) as (process, port, _),
    ):
        urls = [f"http://{far.name}/hangs", "http://lost.example/a"]
        here = [pool.submit(ask, port, "/v1/chat/completions", with_url(url)) for url in urls]
        assert far.asked.acquire(timeout=20)
        assert process.stdout
        assert process.stdout.readline() == "lost\n"
        for number in range(signals):
            process.send_signal(signal.SIGTERM)
            with suppress(OSError):
                assert number or ask(port, "/healthz")[0] == 503  # it has come
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
        for future in here:
            status, text = future.result()
            assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
