"""Images of remote hosts: none unless the host was named, and then no redirect, nothing too long, nothing too slow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engines.errors import command
from runtime.__main__ import main
from runtime.server.errors import Refused
from runtime.server.remote import Remote, host
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, question
from tests.runtime.server.test_mistakes import refusal, with_url

Serve = Callable[..., Served]
PICTURE = png(image(3))


class Host(BaseHTTPRequestHandler):
    """Paths of good and of bad will."""

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/shape.png")
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(PICTURE) + (self.path == "/half")))
        self.end_headers()
        for byte in PICTURE:
            self.wfile.write(bytes([byte]))
            if self.path == "/slow":
                time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Who asked has left."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_image_comes_from_a_host_that_was_named(serve: Serve, address: str) -> None:
    served = serve(image_hosts=frozenset([host(address)]))
    sent = served.chat(question("what", PICTURE, max_tokens=5))
    fetched = served.chat(with_url(f"http://{address}/shape.png") | {"max_tokens": 5})
    assert fetched[0] == 200
    assert fetched[2]["choices"] == sent[2]["choices"]


def test_no_other_host_is_asked(served: Served, address: str) -> None:
    error = refusal(served.chat(with_url(f"http://{address}/shape.png")), 400)
    assert "images are not fetched from this host (serve --image-host)" in error["message"]


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://pictures.example/a.png", True),
        ("https://PICTURES.example/a.png?b", True),
        ("https://pictures.example:444/a.png", True),
        ("http://other.example:8080/a.png", True),
        ("http://plain.example/a.png", True),
        ("https://plain.example/a.png", False),
        ("http://[::1]:5/a.png", True),
        ("http://other.example/a.png", False),
        ("http://other.example:81/a.png", False),
        ("http://a.pictures.example/a.png", False),
        ("http://pictures.example.evil/a.png", False),
        ("http://evil\\@pictures.example/a.png", False),
        ("http://pictures.example@evil/a.png", False),
        ("http://evil#@pictures.example/a.png", False),
        ("ftp://pictures.example/a.png", False),
        ("file://pictures.example/etc/passwd", False),
        ("//pictures.example/a.png", False),
        ("http://[::1/a.png", False),
        ("http://pictures.example:port/a.png", False),
        ("", False),
    ],
)
def test_a_host_is_the_one_that_was_named(url: str, allowed: bool) -> None:
    hosts = ["Pictures.example", "other.example:8080", "plain.example:80", "[::1]"]
    assert Remote(frozenset(map(host, hosts)), 1, 1).allows(url) is allowed


@pytest.mark.parametrize("text", ["", "http://a/b", "a/b", "u@a", "a:port", "a:99999", "[::1", "a?c", "\u00e9.example"])
def test_what_is_no_host_is_one_line(bundle_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(main)(["serve", str(bundle_path), "--image-host", text]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --image-host: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("elsewhere", "HTTP Error 302"),
        ("missing", "HTTP Error 404"),
        ("half", "broke off 1 bytes"),
        ("slow", "in time|timed out"),
        ("a b", "control characters"),
        ("\u00e9", "percent-encode"),
    ],
)
def test_what_cannot_be_had_is_one_line(address: str, path: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        Remote(frozenset([host(address)]), 1 << 20, 1.0).fetch(f"http://{address}/{path}")
    assert refused.value.status == 400


def test_the_images_of_a_request_have_a_size_together(address: str) -> None:
    remote = Remote(frozenset([host(address)]), 2 * len(PICTURE), 30)
    assert remote.fetch(f"http://{address}/shape.png") == remote.fetch(f"http://{address}/b") == PICTURE
    with pytest.raises(Refused, match="together"):
        remote.fetch(f"http://{address}/c")


def test_a_host_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Refused, match="refused"):
        Remote(frozenset([host("127.0.0.1")]), 1, 5).fetch(f"http://127.0.0.1:{port}/a.png")
