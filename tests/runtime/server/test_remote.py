"""Images of remote hosts: none unless the host was named, and then no redirect, nothing too long, nothing too slow."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.errors import command
from runtime import memory
from runtime.__main__ import main
from runtime.memory import MIB
from runtime.server.errors import Refused
from runtime.server.remote import SHOWN, Names, Remote, host
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, question
from tests.runtime.server.test_command import ROOT, ask, running
from tests.runtime.server.test_mistakes import refusal, with_url
from tests.runtime.server.test_queue import until

Serve = Callable[..., Served]
PICTURE = png(image(3))
LARGE = 16 * MIB
LONG = 5  # seconds that what is slow takes; then it ends well
OK = b"HTTP/1.1 200 OK\r\n"
RAW = {
    "/nothing": b"",
    "/noise": b"HTP/1.1 \0\x1b[31m200 OK\r\n\r\n",
    "/noisy": b"HTTP/1.1 404 Not\x07 Found\x9b31m\r\nContent-Length: 0\r\n\r\n",
    "/header": OK + b"Content-Length: \x1b[31m\r\n\r\n",
    "/headers": OK + b"X: " + b"a" * 200_000,
    "/empty": OK + b"Content-Length: 0\r\n\r\n",
    "/none": b"HTTP/1.1 204 No Content\r\n\r\n",
    "/page": OK + b"Content-Type: text/html\r\nConnection: close\r\n\r\n<html>\0log in</html>",
    "/half": OK + b"Content-Length: %d\r\n\r\n" % (len(PICTURE) + 1) + PICTURE,
    "/chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PICTURE), PICTURE),
    "/broken": OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(PICTURE), PICTURE),
    "/soon": b"HTTP/1.1 102 Processing\r\n\r\n" + OK + b"Connection: close\r\n\r\n" + PICTURE,
    "/elsewhere": b"HTTP/1.1 302 Found\r\nLocation: ../x/\x1b[31mshape.png\r\nContent-Length: 0\r\n\r\n",
    "/far": b"HTTP/1.1 301 Moved\r\nLocation: https://b.example/%b\r\nContent-Length: 0\r\n\r\n" % (b"a" * 999),
    "/nowhere": b"HTTP/1.1 304 Not Modified\r\n\r\n",
}


class Host(BaseHTTPRequestHandler):
    """Paths of good and of bad will."""

    server: Server

    def do_GET(self) -> None:
        kind = self.path.rpartition("?")[2]
        whole = OK + b"Content-Length: %d\r\nX: %b\r\n\r\n%b" % (len(PICTURE), b"a" * 99, PICTURE)
        if kind in RAW:
            self.wfile.write(RAW[kind])
        elif kind == "/missing":
            self.send_error(404)
        elif kind == "/hangs":
            self.server.asked.release()
            self.connection.settimeout(20)
            assert self.connection.recv(1) == b""
            self.server.left.release()
        elif kind == "/large":
            self.wfile.write(OK + b"Content-Length: %d\r\n\r\n" % LARGE)
            for _ in range(LARGE >> 16):
                self.wfile.write(b"a" * (1 << 16))
        elif kind.startswith("/drips-"):
            begin = {"/drips-status": 3, "/drips-headers": len(OK) + 3, "/drips-body": whole.index(PICTURE) + 3}[kind]
            self.wfile.write(whole[:begin])
            end = time.monotonic() + LONG
            while time.monotonic() < end and begin < len(whole) - 1:
                self.wfile.write(whole[begin : begin + 1])
                begin += 1
                time.sleep(0.03)
            self.wfile.write(whole[begin:])
        else:
            self.wfile.write(whole)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """
    Attributes:
        asked: for what hangs.
        left: by who asked for it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Host)
        self.asked, self.left = threading.Semaphore(0), threading.Semaphore(0)
        self.name = f"127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Who asked has left."""


@pytest.fixture
def far() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def address(far: Server) -> str:
    return far.name


def remote(address: str, most: int = 1 << 20, seconds: float = 30) -> Remote:
    return Remote(frozenset([host(address)]), most, seconds, Names())


def fetched(address: str, path: str, **limits: Any) -> bytes:
    return asyncio.run(remote(address, **limits).fetch(f"http://{address}{path}")).data


def with_urls(*urls: str) -> dict[str, Any]:
    parts = [part for url in urls for part in with_url(url)["messages"][0]["content"]]
    return with_url("") | {"messages": [{"role": "user", "content": parts}]}


def test_an_image_comes_from_a_host_that_was_named(serve: Serve, address: str) -> None:
    served = serve(image_hosts=frozenset([host(address)]))
    sent = served.chat(question("what", PICTURE, max_tokens=5))
    fetched = served.chat(with_url(f"http://{address}/shape.png") | {"max_tokens": 5})
    assert fetched[0] == 200
    assert fetched[2]["choices"] == sent[2]["choices"]


@pytest.mark.parametrize("path", ["", "/", "?a=/b", "/a?b#c", "/chunks", "/soon"])
def test_what_is_no_mistake_is_fetched(address: str, path: str) -> None:
    assert fetched(address, path) == PICTURE


def test_no_other_host_is_asked(served: Served, address: str) -> None:
    error = refusal(served.chat(with_url(f"http://{address}/shape.png")), 400)
    assert "images are not fetched from this host (serve --image-host)" in error["message"]


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://pictures.example/a.png", True),
        ("https://PICTURES.example/a.png?b", True),
        ("https://pictures.example:444/a.png", True),
        ("http://pictures.example./a.png", True),
        ("http://other.example:8080/a.png", True),
        ("http://other.example.:8080/a.png", True),
        ("http://plain.example/a.png", True),
        ("https://plain.example/a.png", False),
        ("http://[::1]:5/a.png", True),
        ("http://[0:0::0001]/a.png", True),
        ("http://b\u00fccher.example/a.png", True),
        ("http://B\u00dcCHER.example/a.png", True),
        ("http://xn--bcher-kva.example/a.png", True),
        ("http://stra\u00dfe.example/a.png", True),
        ("http://strasse.example/a.png", False),
        ("http://my_store/a.png", True),
        ("http://10.0.0.1/a.png", True),
        ("http://010.0.0.1/a.png", False),
        ("http://10.1/a.png", False),
        ("http://pictures.example../a.png", False),
        ("http://pictures.example:0/a.png", False),
        ("http://other.example/a.png", False),
        ("http://other.example:81/a.png", False),
        ("http://a.pictures.example/a.png", False),
        ("http://pictures.example.evil/a.png", False),
        ("http://evil\\@pictures.example/a.png", False),
        ("http://pictures.example@evil/a.png", False),
        ("http://evil#@pictures.example/a.png", False),
        ("http://pictures.example%2f/a.png", False),
        ("ftp://pictures.example/a.png", False),
        ("file://pictures.example/etc/passwd", False),
        ("//pictures.example/a.png", False),
        ("http://[::1/a.png", False),
        ("http://pictures.example:port/a.png", False),
        ("", False),
    ],
)
def test_a_host_is_the_one_that_was_named(url: str, allowed: bool) -> None:
    named = "Pictures.example other.example:8080 plain.example:80 [::1] B\u00fccher.example xn--strae-oqa.example."
    hosts = frozenset(map(host, [*named.split(), "my_store", "10.0.0.1"]))
    assert Remote(hosts, 1, 1, Names()).allows(url) is allowed


NO_HOSTS = [
    "",
    "http://a/b",
    "a/b",
    "u@a",
    "a:port",
    "a:99999",
    "a:0",
    "a:",
    "[::1",
    "::1",
    "[::1]5",
    "[a]",
    "a?c",
    "*",
]
NO_HOSTS += [
    "a,b",
    "a.com,b.com",
    "a b",
    " a",
    "a\n",
    "*.a",
    "a..b",
    ".",
    "-a",
    "a-",
    "1.2.3",
    "1.2.3.256",
    "[1.2.3.4]",
]
NO_HOSTS += ["a" * 64, "a." * 127 + "a", "\u00e9_.example", "a\0", "%61", "a:\u0661"]


@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_is_no_host_is_one_line(bundle_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(main)(["serve", str(bundle_path), f"--image-host={text}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --image-host: ")
    assert "is no host: write NAME or NAME:PORT" in error
    assert error.count("\n") == 1
    assert error[:-1].isprintable()


def test_help_says_whose_trust_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "whatever address its name leads to" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/elsewhere", r"redirects to 'http://127.0.0.1:\d+/x/\\x1b\[31mshape.png', and redirects are not followed"),
        ("/far", r"redirects to 'https://b.example/a+\.\.\.', and redirects are not followed: send that address"),
        ("/nowhere", "answers 304 'Not Modified'"),
        ("/missing", "answers 404 'Not Found'"),
        ("/none", "answers 204 'No Content'"),
        ("/empty", "empty body"),
        ("/nothing", "closed the connection before it answered"),
        ("/noise", r"is broken: illegal status line.*\\x00\\x1b\[31m"),
        ("/noisy", r"answers 404 'Not\\x07 Found\\x9b31m'"),
        ("/header", "is broken: bad Content-Length"),
        ("/headers", "is broken: Receive buffer too long"),
        ("/half", "is broken: peer closed connection without sending complete message body"),
        ("/broken", "is broken: peer closed connection without sending complete message body"),
        ("/a b", "percent-encode"),
        ("/\u00e9", "percent-encode"),
        ("/\x1b", "percent-encode"),
    ],
)
def test_what_cannot_be_had_is_one_line_that_names_it(address: str, path: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        fetched(address, path)
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"image_url {f'http://{address}{path}'!r}: ")
    assert refused.value.message.isprintable()


def test_a_long_address_is_shortened(address: str) -> None:
    with pytest.raises(Refused) as refused:
        fetched(address, f"/{'a' * 999}?/none")
    assert "..." in refused.value.message
    assert len(refused.value.message) < SHOWN + 100


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


def test_the_images_of_a_request_have_a_size_together(address: str) -> None:
    together = remote(address, 2 * len(PICTURE))
    for path in ("a", "b"):
        assert asyncio.run(together.fetch(f"http://{address}/{path}")).data == PICTURE
    with pytest.raises(Refused, match=f"image_url 'http://{address}/c': .* together"):
        asyncio.run(together.fetch(f"http://{address}/c"))


def test_pieces_take_memory(address: str) -> None:
    taken: list[int] = []
    whole = Remote(frozenset([host(address)]), 1 << 20, 30, Names(), taken.append)
    asyncio.run(whole.fetch_all([f"http://{address}/a"] * 2))  # which is one
    buffers, *pieces = taken
    assert buffers > 1 << 18
    assert sum(pieces) == 2 * len(PICTURE)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the most that a process had needs Linux")
def test_fetching_takes_no_more_than_was_taken_for_it(address: str) -> None:
    taken: list[int] = []
    url = f"http://{address}/large"
    whole = Remote(frozenset([host(address)]), LARGE, 30, Names(), taken.append)
    assert fetched(address, "/a") == PICTURE  # the first one imports
    memory.settle()
    before = memory.resident()
    Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
    assert len(asyncio.run(whole.fetch_all([url]))[url].data) == LARGE
    rows = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))
    assert highest - before <= sum(taken) + LARGE // 4  # what heaps differ by, and the host's own


def test_a_host_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Refused, match="Connection refused"):
        fetched(f"127.0.0.1:{port}", "/a.png")


def test_a_host_that_speaks_no_tls(address: str) -> None:
    with pytest.raises(Refused, match=r"image_url 'https://.*SSL"):
        asyncio.run(remote(address).fetch(f"https://{address}/a.png"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl makes certificates here")
def test_a_host_proves_by_tls_that_it_is_the_one(far: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out certificate"
    line += " -subj /CN=a -addext subjectAltName=DNS:localhost"
    subprocess.run(line.split(), cwd=tmp_path, check=True, capture_output=True)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    far.socket = own.wrap_socket(far.socket, server_side=True, do_handshake_on_connect=False)
    hosts, port = frozenset(map(host, ["localhost", "127.0.0.1"])), far.server_port

    def fetched(name: str) -> bytes:
        return asyncio.run(Remote(hosts, 1 << 20, 30, Names()).fetch(f"https://{name}:{port}/a.png")).data

    with pytest.raises(Refused, match="certificate verify failed"):
        fetched("localhost")
    trusting = ssl.create_default_context(cafile=tmp_path / "certificate")
    monkeypatch.setattr("runtime.server.remote.tls", lambda: trusting)
    for name in ("localhost", "LOCALHOST."):
        assert fetched(name) == PICTURE
    with pytest.raises(Refused, match="certificate verify failed: IP address mismatch"):
        fetched("127.0.0.1")


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


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", none)
    with pytest.raises(Refused, match=r"^image_url 'http://none.example/': Name or service not known$"):
        fetched("none.example", "/")


def test_the_next_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as free:
        closed = free.getsockname()[0]  # nobody listens there at the other's port
    several = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in (closed, "127.0.0.1")]
    monkeypatch.setattr(Names, "_ask", staticmethod(_told([each[4][0] for each in several])))
    port = address.partition(":")[2]
    assert fetched(f"two.example:{port}", "/a.png") == PICTURE


def _told(addresses: list[str]) -> Callable[..., None]:
    return lambda _, asked: asked.get_loop().call_soon_threadsafe(asked.set_result, addresses)


def test_one_of_several_images_fails(serve: Serve, address: str) -> None:
    served = serve(image_hosts=frozenset([host(address)]))
    urls = [f"http://{address}/{path}" for path in ("a", "missing", "b")]
    error = refusal(served.chat(with_urls(*urls)), 400)
    assert f"{urls[1]!r}: the host answers 404" in error["message"]
    assert (error["code"], error["param"]) == ("invalid_image_url", "image_url")
    assert served.worker.here == 0
    for both in (urls[::2], [urls[0]] * 2):
        status, _, answer = served.chat(with_urls(*both) | {"max_tokens": 3})
        assert status == 200
        sent = served.chat(question("what", max_tokens=3) | {"messages": with_pictures(2)})[2]
        assert answer["choices"] == sent["choices"]


def with_pictures(count: int) -> list[dict[str, Any]]:
    (part, text) = question("what", PICTURE)["messages"][0]["content"]
    return [{"role": "user", "content": [part, text] * count}]


def test_a_page_instead_of_an_image_is_named(serve: Serve, address: str) -> None:
    served, url = serve(image_hosts=frozenset([host(address)])), f"http://{address}/page"
    message = refusal(served.chat(with_urls(f"http://{address}/a", url)), 400)["message"]
    assert message.startswith(f"image 2 from {url!r}, which is told to be 'text/html': not a readable image")


def test_a_fetch_that_is_late_is_let_go(serve: Serve, far: Server) -> None:
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
    serve: Serve, far: Server, lost: threading.Event, caplog: pytest.LogCaptureFixture
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


def test_a_second_signal_ends_requests_that_are_read(serve: Serve, far: Server) -> None:
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
    bundle_path: Path, far: Server, tmp_path: Path, grace: int, signals: int
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
