"""Images at remote addresses, from hosts that whoever serves has named: whom else a server asks is not its clients'."""

from __future__ import annotations

import time
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from engines.errors import one_line
from runtime.server.errors import Refused

PIECE = 1 << 16


class _Direct(urllib.request.HTTPRedirectHandler):
    """No redirects: they lead to hosts that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Remote:
    """Fetches the images of one request.

    Attributes:
        left: bytes that may still come, of all its images together.
    """

    def __init__(self, hosts: frozenset[str], most: int, seconds: float) -> None:
        """
        Args:
            hosts: NAME or NAME:PORT, in small letters.
            most: bytes of all images together.
            seconds: until the last of them is here.
        """
        self._hosts, self._most, self.left = hosts, most, most
        self._ends = time.monotonic() + seconds
        self._opener = urllib.request.build_opener(_Direct, urllib.request.ProxyHandler({}))

    def allows(self, url: str) -> bool:
        """Whether a URL is of a host that was named."""
        try:
            parts = urlsplit(url)
            hosts = {parts.hostname, f"{parts.hostname}:{parts.port}"}
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and "@" not in parts.netloc and not hosts.isdisjoint(self._hosts)

    def fetch(self, url: str) -> bytes:
        """The content of a URL that is allowed.

        Raises:
            Refused: it cannot be had, is too long or too slow.
        """
        try:
            with self._opener.open(url, timeout=self._seconds()) as response:
                pieces: list[bytes] = []
                while piece := response.read1(PIECE):
                    self.left -= len(piece)
                    if self.left < 0:
                        message = f"the images of a request may have {self._most >> 20} MiB together: serve --max-body"
                        raise Refused(400, f"{message} allows more", "image_too_large", "image_url")
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
