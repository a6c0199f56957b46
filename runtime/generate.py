"""The token loop: a prompt that was read -> the answer, token by token, and as text while it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Union

import numpy as np

from engines.errors import UserError
from runtime.monitor import Alarm, Watcher
from runtime.sampling import Distribution, Logprob, Sampler, Sampling, check_number
from runtime.text import Detokenizer, StopStrings
from runtime.video import Shown, Video, parts

if TYPE_CHECKING:
    from engines.layout import Layout
    from runtime.memory import Reservation
    from runtime.model import VLM
    from runtime.preprocess import ImageSource
    from runtime.state import Context, Read

MAX_NEW_TOKENS = 64
Returned = TypeVar("Returned")
FINISHED = {"end": "stop", "stop_string": "stop", "cancelled": "cancelled"}  # every other reason is a limit of length


@dataclass
class Stats:
    """What a request took.

    Attributes:
        kernels: whether compiled kernels ran the operators, in place of the graphs' function bodies.
        level: that ran; where the question came later, the one that the opened level names for that; after an alarm of
            the monitor perhaps a lighter one, under a memory budget perhaps a heavier one.
        reason: why it is that one, if the memory budget decided.
        prompt_tokens: P, before visual tokens were pruned.
        visual_tokens: kept, of all images together; of each one in `visual_tokens_by_image`.
        layouts: of each image, by name: the size that it was brought to.
        patches: of each image, and of each of its tokens in reading order, the share of all layers' KV heads that hold
            it once the prompt is compressed: 0 where it was pruned or evicted; empty where the level does not tell.
            Tokens that were merged count as the one whose slot it is.
        bucket: S, the length that the prompt was padded to.
        kv_bytes: all state tensors as allocated: store, window, scales, positions, biases, masses.
        kv_bytes_uncompressed: fp16 keys and values of the whole prompt and every generated token.
        compactions: how often the window was compacted into the store.
        seconds: by part: load, images, vision, prefill, extend (what prefill has not read: a question asked later, the
            rest of a long prompt), decode, compact.
        entropy: mean of the tokens' entropies, in nats: how unsure the model was.
        alarms: of the monitor, those of an answer that was given up first.
        retries: how often the question was answered anew, at a lighter level.
        stop_reason: `end` (the end token), `stop_string`, `max_new_tokens`, `window_full` (this level never compacts),
            `max_positions` (the model's limit) or `cancelled`.
    """

    level: str
    backend: str
    reason: str = ""
    provider: str = ""
    kernels: bool = False
    prompt_tokens: int = 0
    images: int = 0
    layouts: list[str] = field(default_factory=list)
    visual_tokens: int = 0
    visual_tokens_by_image: list[int] = field(default_factory=list)
    patches: list[list[float]] = field(default_factory=list)
    bucket: int = 0
    generated_tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_uncompressed: int = 0
    compactions: int = 0
    entropy: float = 0.0
    alarms: list[Alarm] = field(default_factory=list)
    retries: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


@dataclass
class Result:
    """An answer.

    Attributes:
        tokens: the generated ids without the end token (with `ignore_eos`: all); those of a stop string are among them,
            though it is no part of the text.
        logprobs: of every token, if they were asked for.
    """

    stats: Stats
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    @property
    def finish_reason(self) -> str:
        """`stop` (the model or a stop string ended it), `length` (a limit did) or `cancelled`."""
        return FINISHED.get(self.stats.stop_reason, "length")


@dataclass(frozen=True)
class Request:
    """What is known before any graph runs, and whether the answer is still wanted.

    Attributes:
        shown: its images and videos.
        pixels: of each image and picture of a video, once they are decoded.
        on_restart: None where nothing that was given may be taken back.
        lightened: how many levels lighter `level` is than the request's own.
        keep: takes what the model has read, and will have read, in a session.
        context: what it read in the session before; None: nothing.
        start: position of the first of `ids`.
        room: tokens to leave room for; a prompt of less takes no shorter bucket.
        reserved: what it takes of the memory budget, if there is one.
    """

    ids: list[int]
    shown: Sequence[Shown]
    level: str
    max_new_tokens: int
    ignore_eos: bool
    question_later: bool
    sampling: Sampling
    pixels: list[np.ndarray] = field(default_factory=list)
    on_restart: Callable[[], object] | None = None
    lightened: int = 0
    keep: Callable[[Context], None] | None = None
    context: Context | None = None
    start: int = 0
    room: int = 0
    reserved: Reservation | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def layouts(self) -> list[Layout]:
        """Of each image, and of each picture of a video."""
        return parts(self.shown)

    @property
    def visual(self) -> int:
        """Visual tokens, before any is dropped."""
        return sum(each.tokens for each in self.shown)

    @property
    def text(self) -> int:
        """Text tokens."""
        return len(self.ids) - self.visual

    def release(self) -> None:
        """Give back what is reserved for it."""
        if self.reserved:
            self.reserved.release()


Part = Union[str, "Read", None]  # text, a token that the model reads next, or a pause while a prompt is read


class TextStream:
    """Iterator over an answer's pieces of text; joined, they are `result.text`.

    A piece is given as soon as it is certain: no half character, and nothing that may become a stop string.

    Attributes:
        answer: the result so far.
        vlm: that answers.
    """

    def __init__(self, vlm: VLM, request: Request, stats: Stats) -> None:
        self.answer, self.vlm, self._request = Result(stats), vlm, request
        self._parts = _generate(vlm, request, self.answer)  # knows nothing of self: a stream that is left is freed

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        while not isinstance(part := self.part(), str):
            pass
        return part

    def part(self, error: Exception | None = None) -> Part:
        """Compute on, to the next text or to where others may have a turn: `StopIteration` at the end.

        Args:
            error: that somebody else had while doing what the answer waits for; it is raised within.
        """
        return self._parts.throw(error) if error else next(self._parts)

    def cancel(self) -> None:
        """From any thread: let the answer end with the token that is being computed."""
        self._request.cancelled.set()

    def close(self) -> None:
        """End the answer here, and free its memory; while another thread reads it, `cancel` it."""
        try:
            self._parts.close()
        except ValueError:  # the generator is running
            self.cancel()
            return
        self._request.release()  # perhaps nobody has begun to read it
        self.answer.stats.stop_reason = self.answer.stats.stop_reason or "cancelled"

    @property
    def result(self) -> Result:
        if not self.answer.stats.stop_reason:
            raise UserError("the stream has not ended yet: read it to its end or close it, then take .result")
        return self.answer


def _generate(vlm: VLM, request: Request, answer: Result) -> Generator[Part]:
    """The text of an answer as it grows; a second time, where the monitor wants it and nobody has seen the first."""
    stats, monitor = answer.stats, vlm.monitor
    watchers = [Watcher(monitor.watch)]
    try:
        again = yield from _attempt(vlm, request, answer, watchers[-1])
        if again:
            if request.on_restart:
                request.on_restart()
            request, stats.retries = again, 1
            answer.text, answer.tokens, answer.logprobs = "", [], []
            watchers.append(Watcher(monitor.watch))
            yield from _attempt(vlm, request, answer, watchers[-1])
    finally:
        request.release()
        monitor.answered(watchers, request.lightened, vlm.lighter(request) is not None)
        stats.alarms = [alarm for watcher in watchers for alarm in watcher.alarms]
        stats.entropy = watchers[-1].entropy / max(watchers[-1].tokens, 1)


def _attempt(vlm: VLM, request: Request, answer: Result, watcher: Watcher) -> Generator[Part, None, Request | None]:
    """Read the prompt, then choose a token and let the model read it, in turns -> what to answer instead, if any."""
    stats, sampling, watch = answer.stats, request.sampling, vlm.monitor.watch
    stats.level = request.level
    if request.cancelled.is_set():
        stats.stop_reason = "cancelled"
        return None

    def lighter() -> Request | None:
        """Where an alarm leads."""
        allowed = watch.on_alarm == "retry" and not stats.retries and (request.on_restart or not answer.text)
        again = vlm.lighter(request) if allowed else None
        return vlm.admission.moved(again) if vlm.admission and again else again

    text, stops = Detokenizer(vlm.tokenizer), StopStrings(sampling.stop)
    sampler, ends = Sampler(sampling, request.ids), () if request.ignore_eos else vlm.model.eos_token_ids
    distribution = Distribution()
    blank = None
    if watch.blindness and request.pixels and not request.keep:  # a session would have read the blank images
        grey = [np.zeros_like(pixels) for pixels in request.pixels]
        blank = (yield from vlm.read(replace(request, pixels=grey), stats)).logits[0]
    context = yield from vlm.read(request, stats)
    if request.keep:
        request.keep(context)
    try:
        if request.cancelled.is_set():  # and perhaps the prompt not read to its end
            stats.stop_reason = "cancelled"
        elif blank is not None and watcher.seen(context.logits[0], blank) and (again := lighter()):
            return again
        while not stats.stop_reason:
            token = sampler.choose(context.logits[0])
            if token in ends:
                stats.stop_reason = "end"
                break
            answer.tokens.append(token)
            distribution.read(context.logits[0])
            if sampling.logprobs is not None:
                answer.logprobs.append(distribution.logprob(context.logits[0], token, sampling.logprobs))
            if watcher.add(distribution.entropy, token) and (again := lighter()):
                return again
            if piece := stops.add(text.add(token)):
                answer.text += piece
                yield piece
            if stops.found:
                stats.stop_reason = "stop_string"
            elif request.cancelled.is_set():
                stats.stop_reason = "cancelled"
            elif len(answer.tokens) == request.max_new_tokens:
                stats.stop_reason = "max_new_tokens"
            else:
                stats.stop_reason = yield from vlm.advance(context, token, request, stats)
        if not stops.found and (piece := stops.add(text.end()) + stops.end()):
            answer.text += piece
            yield piece
        return None
    finally:
        stats.generated_tokens = len(answer.tokens)
        stats.kv_bytes, stats.compactions = context.state.nbytes, context.state.compactions
        stats.kv_bytes_uncompressed = vlm.model.kv_bytes(stats.prompt_tokens + stats.generated_tokens)


def whole(parts: Generator[object, None, Returned]) -> Returned:
    """What a generator returns in the end, if nobody else takes a turn meanwhile."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def check_options(images: Sequence[ImageSource | Video], max_new_tokens: int, sampling: Sampling) -> None:
    """Refuse what no request can be made of."""
    if not isinstance(sampling, Sampling):
        raise UserError(f"sampling must be a runtime.sampling.Sampling, got {sampling!r}")
    check_number("max_new_tokens", max_new_tokens, 1)
    if isinstance(images, str | bytes | Path) or not isinstance(images, Sequence):
        raise UserError("images must be a list of images, or of videos too")
