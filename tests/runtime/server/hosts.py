"""Hosts of images, of good and of bad will, and how a test fetches from them."""

from __future__ import annotations

import asyncio
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from runtime.memory import MIB
from runtime.server.remote import Names, Remote, host
from tests.runtime.asking import image
from tests.runtime.server.conftest import png
from tests.runtime.server.test_mistakes import with_url

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
    "/packed": OK + b"Content-Encoding: GZip\r\nContent-Length: 9\r\n\r\npacked...",
    "/half": OK + b"Content-Length: %d\r\n\r\n" % (len(PICTURE) + 1) + PICTURE,
    "/chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PICTURE), PICTURE),
    "/broken": OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(PICTURE), PICTURE),
    "/soon": b"HTTP/1.1 102 Processing\r\n\r\n"
    + OK
    + b"Content-Encoding: identity\r\nConnection: close\r\n\r\n"
    + PICTURE,
    "/elsewhere": b"HTTP/1.1 302 Found\r\nLocation: ../x/\x1b[31mshape.png\r\nContent-Length: 0\r\n\r\n",
    "/far": b"HTTP/1.1 301 Moved\r\nLocation: https://b.example/%b\r\nContent-Length: 0\r\n\r\n" % (b"a" * 999),
    "/nowhere": b"HTTP/1.1 304 Not Modified\r\n\r\n",
}


class Paths(BaseHTTPRequestHandler):
    """Paths of good and of bad will."""

    server: Host

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


class Host(ThreadingHTTPServer):
    """
    Attributes:
        asked: for what hangs.
        left: by who asked for it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Paths)
        self.asked, self.left = threading.Semaphore(0), threading.Semaphore(0)
        self.name = f"127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Who asked has left."""


def remote(address: str, most: int = 1 << 20, seconds: float = 30) -> Remote:
    return Remote(frozenset([host(address)]), most, seconds, Names())


def fetched(address: str, path: str, **limits: Any) -> bytes:
    return asyncio.run(remote(address, **limits).fetch(f"http://{address}{path}")).data


def with_urls(*urls: str) -> dict[str, Any]:
    parts = [part for url in urls for part in with_url(url)["messages"][0]["content"]]
    return with_url("") | {"messages": [{"role": "user", "content": parts}]}
