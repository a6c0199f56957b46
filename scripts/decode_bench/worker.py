"""The process of one way to decode: it loads a model, and does what it is told, an order a line, on standard input.

Orders and answers are JSON. Nothing of this project is imported: peers live in environments of their own.

    {"order": "logits", "prompt": [...], "forced": [...]}   what the model makes of tokens read at once, then one by one
    {"order": "fill", "context": n}                         n tokens into the cache
    {"order": "steps", "count": n}                          n tokens, and how long each took
    {"order": "long", "windows": n, "count": m}             a conversation of n windows beside a fresh one (ours)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SHOWN = 512  # logits that are told, evenly spread
WARM = 1  # steps of every turn that do not count: others had the processor's caches


class Decoder:
    """One way to decode; greedy, a batch of one.

    Attributes:
        versions: of the packages that it runs on.
    """

    versions: dict[str, str]

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        """Of the token behind all of them, [vocab_size]: the prompt read at once, the others one by one."""
        raise NotImplementedError

    def fill(self, context: int) -> None:
        """Put so many tokens into the cache, read or made up; what is in it does not change how long a step takes."""
        raise NotImplementedError

    def ready(self) -> None:
        """Before each step, and not timed."""

    def step(self) -> None:
        """Choose the likeliest token and read it."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Back to where `fill` left it."""
        raise NotImplementedError

    @property
    def kv_bytes(self) -> int:
        """Allocated for the cache of so many tokens."""
        raise NotImplementedError

    def long(self, windows: int, count: int) -> dict[str, Any]:
        """See above."""
        return {}


def timed(decoder: Decoder, count: int) -> tuple[list[float], list[float]]:
    """Seconds by the clock, and of the processor, of each step."""
    wall, processor = [], []
    for _ in range(WARM + count):
        decoder.ready()
        start, used = time.perf_counter(), time.process_time()
        decoder.step()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return wall[WARM:], processor[WARM:]


def obey(decoder: Decoder, order: dict[str, Any]) -> dict[str, Any]:
    what = order["order"]
    if what == "logits":
        logits = np.asarray(decoder.logits(order["prompt"], order["forced"]), np.float64)
        places = np.linspace(0, len(logits) - 1, min(SHOWN, len(logits))).astype(int)
        return {"logits": logits[places].tolist(), "best": int(logits.argmax())}
    if what == "fill":
        start = time.perf_counter()
        decoder.fill(order["context"])
        return {"seconds": time.perf_counter() - start, "kv_bytes": decoder.kv_bytes}
    if what == "steps":
        wall, processor = timed(decoder, order["count"])
        decoder.rewind()
        return {"seconds": wall, "processor": processor, "peak_rss": peak_rss()}
    return decoder.long(order["windows"], order["count"])


def peak_rss() -> int:
    """Most bytes of this process that were in memory at once."""
    status = Path("/proc/self/status").read_text()  # `getrusage` would count what forked this process too
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def serve(make: Any) -> int:
    """Load, then answer orders until there are none; what goes wrong is an answer too, and the last."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        decoder = make()
        say({"versions": decoder.versions})
        for line in sys.stdin:
            say(obey(decoder, json.loads(line)))
    except BaseException as error:
        text = " ".join(str(error).split())
        say({"error": f"{type(error).__name__}: {text}"[:300]})
        return 1
    return 0
