"""What of a remote host's image cannot be had, in one line that names it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from runtime.server.errors import Refused
from runtime.server.remote import SHOWN, host
from tests.runtime.server.conftest import Served, question
from tests.runtime.server.hosts import PICTURE, fetched, remote, with_urls
from tests.runtime.server.test_mistakes import refusal

Serve = Callable[..., Served]


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
        ("/packed", r"sends it packed \('gzip'\), though it was asked for it as it is"),
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


def test_a_host_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Refused, match="Connection refused"):
        fetched(f"127.0.0.1:{port}", "/a.png")


def test_a_host_that_speaks_no_tls(address: str) -> None:
    with pytest.raises(Refused, match=r"image_url 'https://.*SSL"):
        asyncio.run(remote(address).fetch(f"https://{address}/a.png"))


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", none)
    with pytest.raises(Refused, match=r"^image_url 'http://none.example/': Name or service not known$"):
        fetched("none.example", "/")


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
