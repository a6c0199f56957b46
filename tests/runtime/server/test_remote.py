"""Images of remote hosts: none unless the host was named, and then no redirect, nothing too long, nothing too slow."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import command
from runtime import memory
from runtime.__main__ import main
from runtime.server.errors import Refused
from runtime.server.remote import Names, Remote, host
from tests.runtime.server.conftest import Served, question
from tests.runtime.server.hosts import LARGE, PICTURE, Host, fetched, remote
from tests.runtime.server.test_mistakes import refusal, with_url

Serve = Callable[..., Served]


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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl makes certificates here")
def test_a_host_proves_by_tls_that_it_is_the_one(far: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_next_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as free:
        closed = free.getsockname()[0]  # nobody listens there at the other's port
    several = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in (closed, "127.0.0.1")]
    monkeypatch.setattr(Names, "_ask", staticmethod(_told([each[4][0] for each in several])))
    port = address.partition(":")[2]
    assert fetched(f"two.example:{port}", "/a.png") == PICTURE


def _told(addresses: list[str]) -> Callable[..., None]:
    return lambda _, asked: asked.get_loop().call_soon_threadsafe(asked.set_result, addresses)


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
