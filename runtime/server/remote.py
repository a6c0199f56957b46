"""Images at remote addresses, from hosts that whoever serves has named: whom else a server asks is not its clients'.

All of it is done in the event loop, where waiting can be ended at any byte: a thread that waits for a host could not.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

import h11
import idna

from engines.errors import one_line
from runtime.server.errors import Refused
from runtime.server.images import File
from runtime.server.room import FETCHING

PIECE = 1 << 16
HEAD = 1 << 16  # bytes of a response's headers, or of one chunk's
BUFFERS = 1 << 20  # bytes that asyncio and h11 hold of one connection, at most
CONNECT = 10  # seconds until the next address of a host is tried
SHOWN = 200  # characters of an address in a message
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]{1,253}\.?))(?::([0-9]{1,5}))?")
LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
split = inspect.unwrap(urlsplit)  # without its cache, which keeps the last 128 addresses, be they images of many MiB
Host: TypeAlias = "tuple[str, int | None]"  # of any port, where it is None


def shown(text: str) -> str:
    """As it stands in a message: in quotes, shortened, control characters made visible."""
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")


def host(text: str) -> Host:
    """A host of `--image-host` or of a URL, NAME or NAME:PORT; all spellings of one are equal.

    Raises:
        ValueError: it is none.
    """
    try:
        if (found := HOST.fullmatch(text)) is None:
            raise ValueError
        six, name, port = found.groups()
        if port and not 0 < int(port) < 1 << 16:
            raise ValueError
        return str(IPv6Address(six)) if six else _name(name), int(port) if port else None
    except ValueError:
        how = "write NAME or NAME:PORT, an IPv6 address in brackets, and the option once for each"
        raise ValueError(f"{shown(text)} is no host: {how}") from None


def _name(text: str) -> str:
    name = text if text.isascii() else idna.encode(text, uts46=True).decode()
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    if labels[-1].isdigit():
        return str(IPv4Address(name))
    if not all(map(LABEL.fullmatch, labels)):
        raise ValueError
    return name


@functools.cache
def tls() -> ssl.SSLContext:
    """The authorities that this machine trusts; a few MiB."""
    return ssl.create_default_context()


@dataclass(frozen=True)
class Address:
    """A URL as it is asked for.

    Attributes:
        target: path and query.
    """

    tls: bool
    name: str
    port: int
    target: str

    @classmethod
    def of(cls, url: str) -> Address:
        """
        Raises:
            ValueError: it is no URL of http or https.
        """
        parts = split(url)
        if parts.scheme not in PORTS:
            raise ValueError(f"{shown(url)} is no URL of http or https")
        name, port = host(parts.netloc)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme == "https", name, port or PORTS[parts.scheme], target)

    @property
    def host(self) -> str:
        """As the header `Host` has it."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == PORTS["https" if self.tls else "http"] else f"{name}:{self.port}"


class Names:
    """Looks names up. Nothing ends that but the system: whoever asks for a name meanwhile waits for the same answer.

    So there are no more threads than hosts that were named, and they keep no process from ending.
    """

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[list[str] | OSError]] = {}

    async def addresses(self, name: str) -> list[str]:
        """
        Raises:
            OSError: there are none.
        """
        if (asked := self._asked.get(name)) is None:
            asked = self._asked[name] = asyncio.get_running_loop().create_future()
            asked.add_done_callback(lambda _: self._asked.pop(name))
            threading.Thread(target=self._ask, args=(name, asked), name="names", daemon=True).start()
        answer = await asyncio.shield(asked)
        if isinstance(answer, OSError):
            raise answer.with_traceback(None)  # it is shared, and would keep every request's frames
        return answer

    @staticmethod
    def _ask(name: str, asked: asyncio.Future[list[str] | OSError]) -> None:
        answer: list[str] | OSError
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answer = list(dict.fromkeys(str(address[0]) for *_, address in found))
        except OSError as error:
            answer = error
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            asked.get_loop().call_soon_threadsafe(asked.set_result, answer)


class Remote:
    """Fetches the images of one request, one after another.

    Attributes:
        left: bytes that may still come, of all its images together.
    """

    def __init__(
        self,
        hosts: frozenset[Host],
        most: int,
        seconds: float,
        names: Names,
        take: Callable[[int], None] = lambda count: None,
    ) -> None:
        """
        Args:
            most: bytes of all images together.
            seconds: from now until the last of them is here, whatever a host sends meanwhile.
            take: called with the memory that a piece takes.
        """
        self._hosts, self._most, self._names, self._take = hosts, most, names, take
        self.left, self._seconds, self._ends = most, seconds, time.monotonic() + seconds

    def allows(self, url: str) -> bool:
        """Whether a URL is of a host that was named."""
        if not url[:8].lower().startswith(("http:", "https:")):  # a copy of a data URL is many MiB
            return False
        try:
            at = Address.of(url)
        except ValueError:
            return False
        return not self._hosts.isdisjoint({(at.name, at.port), (at.name, None)})

    async def fetch_all(self, urls: Iterable[str]) -> dict[str, File]:
        """What is at these, each asked for once.

        Raises:
            Refused: as `fetch`.
        """
        self._take(BUFFERS)
        return {url: await self.fetch(url) for url in dict.fromkeys(urls)}

    async def fetch(self, url: str) -> File:
        """What is at a URL that is allowed.

        Raises:
            Refused: it cannot be had, is too long or too slow.
        """
        try:
            return await asyncio.wait_for(self._get(url), self._ends - time.monotonic())
        except asyncio.TimeoutError:  # noqa: UP041 (in Python 3.10 another one than the builtin)
            why = f"it did not arrive in time ({self._seconds:g} s for the request and all its images)"
        except h11.RemoteProtocolError as error:
            why = f"the host's answer is broken: {_reason(error)}"
        except (OSError, ValueError) as error:  # no host, no answer, or another one
            why = _reason(error)
        raise Refused(400, f"image_url {shown(url)}: {why}", "invalid_image_url", "image_url")

    async def _get(self, url: str) -> File:
        at = Address.of(url)
        if not re.fullmatch(r"[!-~]+", at.target):
            raise ValueError("percent-encode what is no visible ASCII character")
        reader, writer = await self._connect(at)
        try:
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD)
            headers = {"Host": at.host, "Accept-Encoding": "identity", "User-Agent": "unicache-edge"}
            asked = h11.Request(method="GET", target=at.target, headers=[*headers.items(), ("Connection", "close")])
            writer.write((http.send(asked) or b"") + (http.send(h11.EndOfMessage()) or b""))
            pieces: list[bytes] = []
            piece, kind = bytearray(), ""
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                await asyncio.sleep(0)  # others have their turn, also where a host sends every byte as a chunk
                if event is h11.NEED_DATA:
                    if not (come := await reader.read(PIECE)) and http.their_state is h11.SEND_RESPONSE:
                        raise ValueError("the host closed the connection before it answered")
                    http.receive_data(come)
                elif isinstance(event, h11.Response):
                    _check(event, url)
                    kind = _header(event, b"content-type")
                elif isinstance(event, h11.Data):
                    self._count(len(event.data), url)
                    piece += event.data
                    if len(piece) >= PIECE:  # one buffer that grows would leave holes behind it, as large as itself
                        pieces.append(bytes(piece))
                        piece.clear()
        finally:
            writer.transport.abort()  # nothing is left to be said, and a goodbye could be waited for
        if not (content := b"".join([*pieces, piece])):
            raise ValueError("the host answers with an empty body")
        return File(content, f" from {shown(url)}" + (f", which is told to be {shown(kind)}" if kind else ""))

    async def _connect(self, at: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        why = OSError("its host has no address")
        context, name = (tls(), at.name) if at.tls else (None, None)
        for address in await self._names.addresses(at.name):
            opening = asyncio.open_connection(address, at.port, limit=PIECE, ssl=context, server_hostname=name)
            try:
                return await asyncio.wait_for(opening, CONNECT)
            except asyncio.TimeoutError:  # noqa: UP041 (as above)
                why = OSError(f"no connection within {CONNECT} s")
            except OSError as error:
                why = error
        raise why

    def _count(self, count: int, url: str) -> None:
        self.left -= count
        if self.left < 0:
            message = f"the images of a request may have {self._most >> 20} MiB together (serve --max-body)"
            raise Refused(400, f"image_url {shown(url)}: {message}", "image_too_large", "image_url")
        self._take(FETCHING * count)


def _check(response: h11.Response, url: str) -> None:
    status = response.status_code
    if 300 <= status < 400 and (location := _header(response, b"location")):
        with suppress(ValueError):  # shown as it came
            location = urljoin(url, location)
        raise ValueError(
            f"the host redirects to {shown(location)}, and redirects are not followed: send that address, whose host "
            "serve --image-host must name"
        )
    if status != 200:
        told = response.reason.decode("latin-1")
        raise ValueError(f"the host answers {status}" + (f" {shown(told)}" if told else ""))
    if (packed := _header(response, b"content-encoding").lower()) not in ("", "identity"):
        raise ValueError(f"the host sends it packed ({shown(packed)}), though it was asked for it as it is")


def _header(response: h11.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in response.headers if key == name), "")


def _reason(error: Exception) -> str:
    """In words, with nothing that a terminal would obey."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "its host is not known"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own words tell the address instead
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in one_line(error))
    return text if len(text) <= 3 * SHOWN else f"{text[: 3 * SHOWN - 3]}..."
