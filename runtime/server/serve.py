"""Run the application until it is told to end."""

from __future__ import annotations

import ipaddress
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.loops.auto  # what uvicorn imports when it runs is to count as in use before that
import uvicorn.protocols.http.h11_impl
from fastapi import FastAPI

from runtime.server.app import create
from runtime.server.levels import Levels
from runtime.server.protocol import Limits
from runtime.server.worker import Worker

KEEP_ALIVE = 5  # seconds that an idle connection stays open
WAIT = 10  # seconds that a connection may take until its request's headers have arrived
CONNECTIONS = 256


def serve(levels: Levels, limits: Limits, token: str, listening: socket.socket, grace: float) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT."""
    local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
    Server(create(levels, limits, token, local), grace).run(sockets=[listening])


class Server(uvicorn.Server):
    """On the first signal new requests get 503, and those that are here are answered; on the second all ends."""

    def __init__(self, app: FastAPI, grace: float = 30) -> None:
        """
        Args:
            grace: seconds that answers have to end.
        """
        self._worker: Worker = app.state.worker
        self._grace, self._until = grace, 0.0
        self._silent: dict[tuple[Any, Any], float] = {}  # connection, its last request -> since when
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            access_log=False,
            log_level="warning",
            server_header=False,
            lifespan="on",
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=KEEP_ALIVE,  # after the last answer was computed
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._worker.closing:
            self._until = 0.0
        else:
            self._until = time.monotonic() + self._grace
            self._worker.closing = True

    async def on_tick(self, counter: int) -> bool:
        if self._worker.closing and time.monotonic() > self._until:
            self._worker.cancel_all()
        self._close_silent()
        return await super().on_tick(counter) or (self._worker.closing and not self._worker.here)

    def _close_silent(self) -> None:
        """Close connections without a request, which uvicorn does only after a first one; else they could fill it."""
        now = time.monotonic()
        connections: set[Any] = self.server_state.connections
        silent = [(each, each.cycle) for each in connections if not each.cycle or each.cycle.response_complete]
        self._silent = {key: self._silent.get(key, now) for key in silent}
        for (connection, _), since in self._silent.items():
            if now - since > WAIT:
                connection.transport.close()
