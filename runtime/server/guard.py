"""What stands before every request: whose it is, how large it is, and what a browser may do with the answer."""

from __future__ import annotations

import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import INTERNAL, Refused
from runtime.server.metrics import Metrics
from runtime.server.remote import split

log = logging.getLogger(__name__)
GUARDED = ("/v1/", "/metrics")  # the page and /healthz tell nothing
PATHS = ("/", "/healthz", "/metrics", "/v1/models", "/v1/chat/completions")
LOCAL = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics, body_bytes: int, token: str, local: bool) -> None:
        """
        Args:
            token: that requests must bear; "" for none.
            local: bound to loopback: a request must be for this machine by name, or a foreign page could have its
                own name lead here (DNS rebinding).
        """
        self._app, self._metrics, self._most, self._local = app, metrics, body_bytes, local
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"
        headers, read, begun = Headers(scope=scope), 0, False

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise self._too_large()
            return message

        async def answered(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
                self._metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        try:
            self._check(headers, scope["path"])
            await self._app(scope, limited, answered)
        except Refused as refused:
            await refused.response()(scope, receive, answered)
        except Exception:
            log.exception("a request failed")
            if not begun:
                await INTERNAL.response()(scope, receive, answered)

    def _check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "")
        if self._local and not self._token and _name(host) not in LOCAL:
            raise Refused(403, f"host {host!r} is not this machine", "foreign_host")
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            raise Refused(403, f"pages of {origin!r} may not use this server", "foreign_origin")
        if self._token and path.startswith(GUARDED):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
            if scheme.lower() != "bearer" or not right:
                message = "this server asks for a token: send  Authorization: Bearer TOKEN"
                raise Refused(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._most:
            raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused(413, f"the request is larger than {self._most / 2**20:g} MiB: send smaller images", "too_large")


def _name(host: str) -> str | None:
    try:
        return split(f"//{host}").hostname
    except ValueError:
        return None


def _netloc(origin: str) -> str | None:
    try:
        return split(origin).netloc
    except ValueError:
        return None
