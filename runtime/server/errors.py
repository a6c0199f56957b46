"""Errors as OpenAI's interface tells them."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from engines.errors import UserError, one_line
from runtime.memory import OverBudget
from runtime.preprocess import ImageError

RETRY = {"Retry-After": "2"}  # an answer takes seconds


class Refused(Exception):
    """A request that is not answered, and why.

    Attributes:
        code: a word for programs.
        param: the part of the request that is wrong.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = " ".join(message.splitlines())  # what it quotes of the request may have several
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def mistake(error: UserError) -> Refused:
    """A request that the runtime refuses."""
    if isinstance(error, OverBudget):
        return Refused(*((503, one_line(error), "memory_in_use", None, RETRY) if error.waits else
                         (413, one_line(error), "over_memory_budget")))  # fmt: skip
    return Refused(400, one_line(error), "invalid_image" if isinstance(error, ImageError) else "invalid_request")


CANCELLED = Refused(499, "the client has left", "cancelled")
CLOSING = Refused(503, "the server is shutting down", "shutting_down", headers={"Retry-After": "60"})
INTERNAL = Refused(500, "internal error: the server's log tells more", "internal_error")
