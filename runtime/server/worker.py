"""One thread runs the model, several answers at once where it can; requests wait in line: first come, first served."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engines.errors import UserError
from runtime.generate import Result, TextStream
from runtime.memory import OverBudget
from runtime.sampling import Logprob
from runtime.scheduler import Answering, Scheduler
from runtime.server.errors import CANCELLED, CLOSING, INTERNAL, Refused, mistake

T = TypeVar("T")
log = logging.getLogger(__name__)
SLOW = 60  # seconds: the longest that a client is told to wait before it tries again


@dataclass(frozen=True)
class Piece:
    """Text that was generated, and the log-probabilities of its tokens if they were asked for."""

    text: str
    logprobs: list[Logprob]


class Job:
    """One answer: waits, is computed in the worker's thread, and is read in the event loop that made it."""

    def __init__(self, start: Callable[[], TextStream], leave: Callable[[], None]) -> None:
        """
        Args:
            start: called in the worker's thread.
            leave: gives up the request's place.
        """
        self.leave, self.cancelled, self.waited, self.first = leave, False, 0.0, 0.0
        self._start, self._made, self._told = start, time.perf_counter(), 0
        self._stream: TextStream | None = None
        self._answer: Answering | None = None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Result | Refused] = asyncio.Queue()

    def cancel(self) -> None:
        """End the answer: with the token that is being computed, or before it begins."""
        self.cancelled = True
        if self._stream:
            self._stream.cancel()

    async def events(self) -> AsyncIterator[Piece | Result]:
        """Pieces as they come, and the result at the end.

        Raises:
            Refused: the request is wrong, or answering it failed.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, Refused):
                raise event.with_traceback(None)  # it is shared, and would keep every request's frames
            yield event
            if isinstance(event, Result):
                return

    def go_on(self, scheduler: Scheduler, answered: Callable[[Job, Result], None], alone: bool) -> bool:
        """Begin, or tell what is new, in the worker's thread -> whether it has ended, and its place is given up.

        Raises:
            OverBudget: it is not alone, and finds room to begin when others have ended.
        """
        event: Result | Refused
        try:
            if self._answer is None:
                self._answer = scheduler.submit(self._begin())
                return False
            self._give(self._answer)
            if not self._answer.ended:
                return False
            answered(self, event := self._end(self._answer.result))
        except Refused as refused:
            event = refused
        except UserError as error:
            if isinstance(error, OverBudget) and error.waits and not alone:
                raise
            event = mistake(error)
        except Exception:
            log.exception("a request failed")
            event = INTERNAL
        self.leave()
        self.tell(event)
        return True

    def _begin(self) -> TextStream:
        self.waited = time.perf_counter() - self._made
        if self.cancelled:  # before an image is decoded
            raise CLOSING
        self._stream = stream = self._start()
        if self.cancelled:  # before there was a stream to cancel
            stream.cancel()  # type: ignore[unreachable]  # another thread cancels
        return stream

    def _give(self, answer: Answering) -> None:
        logprobs = answer.stream.answer.logprobs
        while answer.texts:
            self.first = self.first or time.perf_counter() - self._made
            self.tell(Piece(answer.texts.popleft(), logprobs[self._told :]))
            self._told = len(logprobs)

    def _end(self, result: Result) -> Result:
        if rest := result.logprobs[self._told :]:  # of tokens that make no text
            self.tell(Piece("", rest))
        if result.finish_reason == "cancelled" and not result.tokens:  # it would look like an empty answer
            raise CLOSING
        return result

    def tell(self, event: Piece | Result | Refused) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody reads any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """The thread, and the line before it.

    Attributes:
        closing: new requests are refused; those that are here are answered.
        seconds: what an answer takes, a moving mean.
        scheduler: of the answers that are computed.
    """

    def __init__(
        self, queue: int, rows: int = 1, answered: Callable[[Job, Result], None] = lambda job, result: None
    ) -> None:
        """
        Args:
            queue: requests that may wait.
            rows: answers that are computed at once, at most.
            answered: called in the thread with every result.
        """
        self.closing, self.seconds, self.scheduler = False, 1.0, Scheduler(rows)
        self._most, self._ended, self._answered = queue + rows, False, answered
        self._places: set[object] = set()
        self._arriving: set[asyncio.Task[Any]] = set()  # requests that are read
        self._jobs: deque[Job] = deque()
        self._running: dict[Job, float] = {}  # since when
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait for the model."""
        return len(self._jobs)

    @property
    def running(self) -> int:
        """Answers that are computed."""
        return len(self._running)

    @property
    def here(self) -> int:
        """Requests that are read, wait, or are answered."""
        return len(self._places)

    def enter(self) -> Callable[[], None]:
        """Take a place; called before a body is read, so that those in memory are bounded -> how to give it up.

        Raises:
            Refused: there is none.
        """
        if self.closing:
            raise CLOSING
        with self._changed:
            if self.here >= self._most:
                wait = min(max(math.ceil(self.seconds * self.here / self.scheduler.rows), 1), SLOW)
                message = f"{self.here} requests are here already: try again in {wait} s"
                raise Refused(429, message, "queue_full", headers={"Retry-After": str(wait)})
            self._places.add(place := object())
        return partial(self._leave, place)

    async def arriving(self, reading: Coroutine[Any, Any, T]) -> T:
        """A request that is read, unless all that is here is to end.

        Raises:
            Refused: it is.
        """
        task = asyncio.create_task(reading)
        with self._changed:
            self._arriving.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
        finally:
            task.cancel()
            with self._changed:
                self._arriving.discard(task)
        raise CLOSING.with_traceback(None)  # it is shared, and would keep every request's frames

    def submit(self, job: Job) -> None:
        """Put a job in the line.

        Raises:
            Refused: the thread has ended.
        """
        with self._changed:
            if self._ended:
                raise CLOSING
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job, why: Refused = CANCELLED) -> None:
        """End a job; one that waits gives up its place at once, and is told why."""
        job.cancel()
        with self._changed:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        job.leave()
        job.tell(why)

    def cancel_all(self) -> None:
        """End the answers that are computed, and refuse requests that wait or are read."""
        with self._changed:
            jobs, arriving = [*self._jobs, *self._running], [*self._arriving]
        for task in arriving:
            with suppress(RuntimeError):  # the loop has ended, and its tasks with it
                task.get_loop().call_soon_threadsafe(task.cancel)
        for job in jobs:
            self.cancel(job, CLOSING)

    def end(self) -> None:
        """Cancel what is left, and end the thread."""
        self.closing = True
        self.cancel_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _leave(self, place: object) -> None:
        with self._changed:
            self._places.discard(place)

    def _work(self) -> None:
        short = False  # of memory, until an answer has ended
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._running or self._ended)
                if not self._jobs and not self._running:
                    return
                if self._jobs and self.scheduler.takes and not short:
                    self._running[self._jobs.popleft()] = time.perf_counter()
            for job, since in self._running.copy().items():
                try:
                    ended = job.go_on(self.scheduler, self._answered, alone=len(self._running) == 1)
                except OverBudget:
                    short = True
                    with self._changed:
                        del self._running[job]
                        self._jobs.appendleft(job)
                    continue
                if ended:
                    short = False
                    with self._changed:
                        del self._running[job]
                    self.seconds += (time.perf_counter() - since - self.seconds) / 8
            self.scheduler.step()
