"""The token loop: a prompt that was read -> the answer, token by token, and as text while it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engines.bundle import Level
from engines.errors import UserError

if TYPE_CHECKING:
    from runtime.model import VLM


@dataclass
class Stats:
    """What a request took.

    Attributes:
        kernels: whether compiled kernels ran the operators, in place of the graphs' function bodies.
        level: that ran; where the question came later, the one that the opened level names for that.
        prompt_tokens: P, before visual tokens were pruned.
        visual_tokens: kept, of all images together; of each one in `visual_tokens_by_image`.
        bucket: S, the length that the prompt was padded to.
        kv_bytes: all state tensors as allocated: store, window, scales, positions, biases, masses.
        kv_bytes_uncompressed: fp16 keys and values of the whole prompt and every generated token.
        compactions: how often the window was compacted into the store.
        seconds: by part: load, images, vision, prefill, question (when asked later), decode, compact.
        stop_reason: `end` (the end token), `max_new_tokens`, `window_full` (this level never compacts) or
            `max_positions` (the model's limit).
    """

    level: str
    backend: str
    provider: str = ""
    kernels: bool = False
    prompt_tokens: int = 0
    images: int = 0
    visual_tokens: int = 0
    visual_tokens_by_image: list[int] = field(default_factory=list)
    bucket: int = 0
    generated_tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_uncompressed: int = 0
    compactions: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Result:
    """An answer; `tokens` are the generated ids without the end token (with `ignore_eos`: all)."""

    text: str
    tokens: list[int]
    stats: Stats


@dataclass(frozen=True)
class Request:
    """What is known before any graph runs."""

    ids: list[int]
    pixels: list[np.ndarray]
    level: Level
    max_new_tokens: int
    ignore_eos: bool
    question_later: bool


def tokens(vlm: VLM, request: Request, stats: Stats) -> Iterator[int]:
    """The ids of an answer, one at a time: read the prompt, then choose a token and let the model read it, in turns."""
    context = vlm.read(request, stats)
    while True:
        token = _argmax(context.logits)
        if token in vlm.model.eos_token_ids and not request.ignore_eos:
            stats.stop_reason = "end"
            break
        stats.generated_tokens += 1
        yield token
        if stats.generated_tokens == request.max_new_tokens:
            stats.stop_reason = "max_new_tokens"
            break
        if stop := vlm.advance(context, token, request, stats):
            stats.stop_reason = stop
            break
    stats.kv_bytes, stats.compactions = context.state.nbytes, context.state.compactions
    stats.kv_bytes_uncompressed = vlm.model.kv_bytes(stats.prompt_tokens + stats.generated_tokens)


def _argmax(logits: np.ndarray) -> int:
    token = int(logits[0].argmax())
    if np.isnan(logits[0, token]):  # argmax finds the first nan
        raise UserError(
            "the model's logits are not numbers: an overflow in a graph, or a preprocessor that does not fit"
        )
    return token


class TextStream:
    """Iterator over an answer's pieces of text; `result` is there when it has ended.

    Joined, the pieces are `result.text`, unless a tokenizer's decoder rewrites text that it has already given.
    """

    def __init__(self, vlm: VLM, request: Request, stats: Stats) -> None:
        self._pieces = self._run(vlm, request, stats)
        self._result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> Result:
        if self._result is None:
            raise UserError("the stream has not ended yet: read it to its end, then take .result")
        return self._result

    def _run(self, vlm: VLM, request: Request, stats: Stats) -> Iterator[str]:
        said: list[int] = []
        shown = ""
        for token in tokens(vlm, request, stats):
            said.append(token)
            text = vlm.decode_text(said)
            stable = text.rstrip("\ufffd")  # half a character: the rest of its bytes comes with the next token
            if len(stable) > len(shown) and stable.startswith(shown):
                yield stable[len(shown) :]
                shown = stable
        text = vlm.decode_text(said)
        if text != shown:
            yield text[len(shown) :]
        self._result = Result(text, said, stats)
