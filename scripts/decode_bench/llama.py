"""llama.cpp by llama-cpp-python, on a GGUF file, with a cache of float16, q8_0 or q4_0."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from decode_bench.worker import Decoder, serve

ROOM, SHORT = 64, 256  # tokens behind the context, and while the logits are looked at
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # of a number in the cache: blocks of 32 have a scale of 16


class Llama(Decoder):
    def __init__(self, file: str, kv: str, threads: int, context: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]  # in an environment of its own

        kinds: Any = {
            "f16": llama_cpp.GGML_TYPE_F16,
            "q8_0": llama_cpp.GGML_TYPE_Q8_0,
            "q4_0": llama_cpp.GGML_TYPE_Q4_0,
        }
        self.kv, self.versions = kv, {"llama-cpp-python": version("llama-cpp-python")}
        self.most = max(context + ROOM, SHORT)
        how = {"n_threads": threads, "n_threads_batch": threads, "flash_attn": True, "verbose": False}
        self.llm = llama_cpp.Llama(file, n_ctx=self.most, type_k=kinds[kv], type_v=kinds[kv], **how)

    def _last(self) -> np.ndarray:
        return np.ctypeslib.as_array(self.llm._ctx.get_logits(), (self.llm.n_vocab(),))

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        self.llm.reset()
        self.llm.eval(prompt)
        for token in forced:
            self.llm.eval([token])
        return self._last().copy()

    def fill(self, context: int) -> None:
        self.llm.reset()
        self.llm.eval(np.random.default_rng(0).integers(5, self.llm.n_vocab(), context).tolist())
        self.context = context

    def step(self) -> None:
        self.llm.eval([int(self._last().argmax())])

    def rewind(self) -> None:
        self.llm.n_tokens = self.context  # the next `eval` drops what lies behind

    @property
    def kv_bytes(self) -> int:
        told = self.llm.metadata
        kind = told["general.architecture"]
        heads, kv_heads = (int(told[f"{kind}.attention.{name}"]) for name in ("head_count", "head_count_kv"))
        layers, width = (int(told[f"{kind}.{name}"]) for name in ("block_count", "embedding_length"))
        return int(2 * layers * kv_heads * width // heads * self.most * BITS[self.kv] / 8)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--kv", choices=BITS, default="f16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, required=True)
    a = parser.parse_args()
    return serve(lambda: Llama(a.file, a.kv, a.threads, a.context))


if __name__ == "__main__":
    sys.exit(main())
