"""A bundle, by the runtime: what `generate` does for a token, but for making text of it."""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import runtime
from decode_bench.worker import Decoder, serve
from runtime.generate import Request, whole
from runtime.sampling import GREEDY, Sampler
from runtime.state import Context

ENDLESS = 10**9


class Ours(Decoder):
    def __init__(self, bundle: Path, level: str, threads: int) -> None:
        self.vlm, self.level = runtime.open(bundle, "ort", level, threads), level
        self.versions = {name: version(name) for name in ("numpy", "onnxruntime")}
        self.sampler, self.stats = Sampler(GREEDY, []), self.vlm.stats(level)

    def _request(self, tokens: list[int], room: int) -> Request:
        return Request(tokens, [], self.level, ENDLESS, True, False, GREEDY, room=room)

    def _filled(self, context: int) -> Context:
        """A bucket of that length, its prompt as long as it can be."""
        tokens = np.random.default_rng(0).integers(5, self.vlm.model.vocab_size, context).tolist()
        self.request = self._request([t for t in tokens if t != self.vlm.model.image_token_id], context)
        return whole(self.vlm.read(self.request, self.stats))

    def _advance(self, context: Context, token: int) -> None:
        if reason := whole(self.vlm.advance(context, token, self.request, self.stats)):
            raise RuntimeError(f"the answer ended: {reason}")

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        self.request = self._request(prompt, 0)
        context = whole(self.vlm.read(self.request, self.stats))
        for token in forced:
            self._advance(context, token)
        return context.logits[0]

    def fill(self, context: int) -> None:
        self.context = self._filled(context)
        self.count, self.position = self.context.state.count, self.context.position

    def ready(self) -> None:
        if self.context.state.full:  # compactions are timed by themselves
            self.rewind()

    def step(self) -> None:
        self._advance(self.context, self.sampler.choose(self.context.logits[0]))

    def rewind(self) -> None:
        self.context.state.count, self.context.position = self.count, self.position

    @property
    def kv_bytes(self) -> int:
        return self.context.state.nbytes

    def long(self, windows: int, count: int) -> dict[str, Any]:
        """A conversation in which the window was full so many times; then steps of it and of a fresh one, in turn."""
        long, fresh = self._filled(self.position), self.context
        if not long.bucket.compact:
            return {}
        while long.state.compactions < 1 + windows:
            if long.state.compactions == 1 and long.state.count == self.count + 1:
                self.stats.seconds["compact"] = 0.0  # the first one's graph was just loaded
            self._advance(long, self.sampler.choose(long.logits[0]))
        taken: dict[str, list[float]] = {"long": [], "fresh": []}
        for _ in range(count):
            for name, each in (("long", long), ("fresh", fresh)):
                if each.state.full:
                    each.state.count = self.count
                start = time.perf_counter()
                self._advance(each, self.sampler.choose(each.logits[0]))
                taken[name].append(time.perf_counter() - start)
        self.rewind()
        return taken | {
            "compaction": self.stats.seconds["compact"] / windows,
            "every": long.state.window - long.state.recent,
        }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--level", default="off")
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    return serve(lambda: Ours(a.bundle, a.level, a.threads))


if __name__ == "__main__":
    sys.exit(main())
