"""Room in the memory budget for reading a request: taken before its parts come, or are parsed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message

from runtime.memory import Memory, Need, Reservation, size
from runtime.preprocess import UNPACKED
from runtime.server.errors import RETRY, Refused

# Bytes that are taken for each of a request: what came, as a whole and in pieces, its text, and the images in it, as
# text and decoded; twice that where a letter of it takes four bytes.
READING = 7
FETCHING = 2  # the same for images that are fetched: pieces, and the whole
PACKED = (b"iCCP", b"iTXt", b"zTXt")  # what a PNG unpacks with its header
# A text, as bytes and twice as letters of four bytes, as much that came before it (14 times), and pieces in between: 15
# times by measure, and where the heap has other holes a MiB more.
UNPACKING = 20 * UNPACKED
PIECE = 2048  # bytes of Python's for each value of a request that is read, or wrong


class Room:
    """Grows with what comes. Given back by `release`, or when nobody holds it any more."""

    def __init__(self, memory: Memory | None) -> None:
        self._memory, self._bytes = memory, 0
        self._reserved: Reservation | None = None

    def take(self, count: int) -> None:
        """Take so many bytes more.

        Raises:
            Refused: the budget does not have them, now or ever.
        """
        if (memory := self._memory) is None:
            return
        need = Need(frozenset(), self._bytes + count)

        def fits() -> bool:
            if self._reserved:
                return memory.change(self._reserved, need)
            self._reserved = memory.reserve(need)
            return self._reserved is not None

        if not memory.sure(fits, self._reserved):
            memory.refused += 1
            if memory.alone(need) > memory.budget or not memory.busy(self._reserved):
                message = (
                    f"reading this request takes {size(need.bytes)}, more than the memory budget of "
                    f"{size(memory.budget)} has left: send less, or serve with a larger --memory-budget"
                )
                raise Refused(413, message, "over_memory_budget")
            raise Refused(503, "no memory is left to read the request: try again", "memory_in_use", headers=RETRY)
        self._bytes = need.bytes

    def release(self) -> None:
        if self._reserved:
            self._reserved.release()

    def entered(self, request: Request) -> Request:
        """The request; room for its body is taken at once where its length is told, else piece by piece."""
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            self.take(READING * int(length))
            return request

        async def receive() -> Message:
            message = await request.receive()
            self.take(READING * len(message.get("body", b"")))
            return message

        return Request(request.scope, receive)
