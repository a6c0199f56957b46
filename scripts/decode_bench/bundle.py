"""A bundle to decode with at long contexts: as export/build.py makes it, but long prompts are not read.

Reading and checking a prompt of 16,384 tokens takes an hour here, and a step does not care what the cache holds. So
the prefill of every bucket but the shortest fills it with its first embeddings, whatever the prompt; what decodes and
compacts is what every bundle has.

    python -m decode_bench.bundle --real 64 CHECKPOINT --out DIR --buckets 64 4096      (run in scripts/)

The rest of its options are those of export/build.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engines.bundle import Level
from engines.errors import command
from export import build, pipeline
from export.compress import KeyStatistics
from export.graphs import Prefill, State
from export.stages.tokens import TEXT


class Filled(Prefill):
    """A prefill that fills store and window with numbers of the prompt's embeddings."""

    def __init__(self, state: State, statistics: list[KeyStatistics] | None) -> None:
        super().__init__(state, statistics)
        self.specs = state.specs()

    def compute(self, embeddings: Tensor, positions: Tensor, kinds: Tensor, **rest: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        numbers = embeddings.flatten() + 0 * (positions.sum() + kinds.sum())
        made = {name: _like(spec.dtype, name, spec.shape, numbers) for name, spec in self.specs.items()}
        head: Any = self.head
        return made | {"logits": _like("float32", "logits", [embeddings.shape[0], head.weight.shape[0]], numbers)}


def _like(dtype: str, name: str, shape: list[int], numbers: Tensor) -> Tensor:
    """A tensor of the state: plausible, and every slot is in use."""
    size = math.prod(shape)
    rows = numbers.repeat(-(-size // len(numbers)))[:size].reshape(shape)
    if name.endswith("bias") or "_bias." in name:
        rows = 0 * rows
    elif "scale" in name:
        rows = 0.01 + 0 * rows
    elif "mass" in name:
        rows = rows.abs()
    elif "positions" in name:
        rows = 0 * rows + torch.arange(shape[-1])
    elif "kinds" in name:
        rows = 0 * rows + TEXT
    elif dtype == "int8":
        rows = (100 * rows).clamp(-127, 127)
    return rows.to(getattr(torch, dtype))


def plan_levels(real: int, *arguments: Any) -> tuple[dict[str, Level], pipeline.Makers]:
    """As `pipeline.plan_levels`, with nothing that reads a prompt of more than `real` tokens."""
    levels, makers = pipeline_plan(*arguments)
    for name, level in levels.items():
        buckets = []
        for bucket in level.buckets:
            if bucket.length > real:
                state, known = makers[bucket.prefill].args  # type: ignore[attr-defined]
                makers[bucket.prefill] = partial(Filled, state, known)
            makers.pop(bucket.extend, None)
            buckets.append(dataclasses.replace(bucket, extend="", chunk=1))
        levels[name] = dataclasses.replace(level, buckets=buckets)
    return levels, makers


pipeline_plan = pipeline.plan_levels


@command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--real", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    with patch.object(pipeline, "plan_levels", partial(plan_levels, own.real)):
        return build.main(rest)


if __name__ == "__main__":
    sys.exit(main())
