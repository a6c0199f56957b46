"""Images at remote addresses, from hosts that whoever serves has named: whom else a server asks is not its clients'."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from engines.errors import one_line
from runtime.server.errors import Refused
from runtime.server.room import FETCHING

PIECE = 1 << 16
PORTS = {"http": 80, "https": 443}
Host: TypeAlias = "tuple[str, int | None]"  # of any port, where it is None


def host(text: str) -> Host:
    """A host of `--image-host`, NAME or NAME:PORT.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.netloc != text or "@" in text or not text.isascii():
        raise ValueError(f"{text!r} is no host: write NAME or NAME:PORT")
    return parts.hostname, parts.port


class _Direct(urllib.request.HTTPRedirectHandler):
    """No redirects: they lead to hosts that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Remote:
    """Fetches the images of one request.

    Attributes:
        left: bytes that may still come, of all its images together.
    """

    def __init__(
        self, hosts: frozenset[Host], most: int, seconds: float, take: Callable[[int], None] = lambda count: None
    ) -> None:
        """
        Args:
            most: bytes of all images together.
            seconds: until the last of them is here.
            take: called with the memory that a piece takes.
        """
        self._hosts, self._most, self.left, self._take = hosts, most, most, take
        self._ends = time.monotonic() + seconds
        self._opener = urllib.request.build_opener(_Direct, urllib.request.ProxyHandler({}))

    def allows(self, url: str) -> bool:
        """Whether a URL is of a host that was named."""
        try:
            parts = urlsplit(url)
            port = parts.port or PORTS[parts.scheme]
        except (ValueError, LookupError):
            return False
        return "@" not in parts.netloc and not self._hosts.isdisjoint({(parts.hostname, port), (parts.hostname, None)})

    def fetch(self, url: str) -> bytes:
        """The content of a URL that is allowed.

        Raises:
            Refused: it cannot be had, is too long or too slow.
        """
        if not url.isascii():
            message = f"image_url {url[:80]!r}: percent-encode what is not ASCII"
            raise Refused(400, message, "invalid_image_url", "image_url")
        try:
            with self._opener.open(url, timeout=self._seconds()) as response:
                pieces: list[bytes] = []
                while piece := response.read1(PIECE):
                    self.left -= len(piece)
                    if self.left < 0:
                        message = f"the images of a request may have {self._most >> 20} MiB together: serve --max-body"
                        raise Refused(400, f"{message} allows more", "image_too_large", "image_url")
                    self._take(FETCHING * len(piece))
                    pieces.append(piece)
                    self._seconds()
                if response.length:  # read1 does not complain
                    raise HTTPException(f"it broke off {response.length} bytes before its end")
        except (OSError, ValueError, HTTPException) as error:  # no host, no answer, another status, half a response
            message = f"image_url {url[:80]!r}: {one_line(error)}"
            raise Refused(400, message, "invalid_image_url", "image_url") from error
        return b"".join(pieces)

    def _seconds(self) -> float:
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError("it did not arrive in time")
        return left
