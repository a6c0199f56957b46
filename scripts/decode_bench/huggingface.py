"""Hugging Face transformers: eager attention, PyTorch's SDPA, a static cache, a quantized one (optimum-quanto)."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

from decode_bench.worker import Decoder, serve

CACHES = ("dynamic", "static", "quantized")
ROOM = 64  # tokens of a static cache behind the context
BITS = 4  # quanto takes 2 or 4


class HuggingFace(Decoder):
    def __init__(self, checkpoint: str, attention: str, cache: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention, "local_files_only": True}
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, **how).eval()
        packages = ("torch", "transformers", *(["optimum-quanto"] if cache == "quantized" else []))
        self.kind, self.versions = cache, {name: version(name) for name in packages}
        self.context = self.stepped = 0

    def _new(self, length: int) -> Any:
        if self.kind == "static":
            return StaticCache(config=self.model.config, max_cache_len=length)
        if self.kind == "quantized":
            return QuantizedCache(backend="quanto", config=self.model.config, nbits=BITS)
        return DynamicCache(config=self.model.config)

    def _read(self, tokens: list[int], position: int) -> None:
        ids = torch.tensor([tokens])
        places = torch.arange(position, position + len(tokens))[None]
        out = self.model(input_ids=ids, position_ids=places, cache=self.cache, logits_to_keep=1)
        self.last = out.logits[0, -1]

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        self.cache = self._new(len(prompt) + len(forced))
        self._read(prompt, 0)
        for i, token in enumerate(forced):
            self._read([token], len(prompt) + i)
        return self.last.numpy()

    def fill(self, context: int) -> None:
        config, noise = self.model.config, torch.Generator().manual_seed(0)
        self.cache, self.context = self._new(context + ROOM), context
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            rows = [
                torch.randn(1, config.num_key_value_heads, context, head_dim, generator=noise) for _ in ("key", "value")
            ]
            self.cache.update(*rows, layer)

    def step(self) -> None:
        self._read([int(self.last.argmax())], self.context + self.stepped)
        self.stepped += 1

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.crop(-self.stepped)
            if self.kind == "quantized":
                layer.cumulative_length -= self.stepped
        self.stepped = 0

    @property
    def kv_bytes(self) -> int:
        found = 0
        for layer in self.cache.layers:
            for name in ("keys", "values", "_quantized_keys", "_quantized_values"):
                tensor = getattr(layer, name, None)
                inner = [getattr(tensor, part, None) for part in ("_data", "_scale", "_shift")]
                parts = [getattr(p, "_data", p) for p in inner if p is not None] or [tensor]
                found += sum(part.nbytes for part in parts if part is not None)
        return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--cache", choices=CACHES, default="dynamic")
    a = parser.parse_args()
    return serve(lambda: HuggingFace(a.checkpoint, a.attention, a.cache, a.threads))


if __name__ == "__main__":
    sys.exit(main())
