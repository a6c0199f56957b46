"""Tokens a second of requests that are decoded together, beside the same requests one after another.

    python export/build.py --batch 4 --out build/batch
    python scripts/bench_batch.py build/batch

Every level answers as many questions as its batch has rows, on one thread, both ways in turn; answers must be equal.
`decoding` leaves out what reading the prompts takes, which is the same both ways.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.progress import track

import runtime
from engines import bundle as bundles
from engines.errors import UserError, command
from figures import Figures, typed
from reporting import QUESTION, answering, choice
from runtime.generate import Result
from runtime.model import VLM
from runtime.sampling import Sampling
from runtime.scheduler import Scheduler

NOTE = "Medians, one thread; a ratio is the median of those of each time. Decoding: without reading the prompts."
READING = ("load", "images", "vision", "prefill", "extend")


@dataclass(frozen=True)
class Took:
    """Seconds of some requests: all in all, and without reading the prompts."""

    whole: float
    decoding: float


def measure(vlm: VLM, rows: int, tokens: int, together: bool) -> tuple[Took, list[list[int]]]:
    """Ask as many questions as there are rows -> the seconds, and the answers' tokens."""
    scheduler = Scheduler(rows if together else 1)
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(rows)]
    start = time.perf_counter()
    streams = [vlm.stream(QUESTION, [], tokens, ignore_eos=True, sampling=sampling) for sampling in samplings]
    results: list[Result] = [each.result for each in scheduler.run(map(scheduler.submit, streams))]
    whole = time.perf_counter() - start
    reading = sum(result.stats.seconds.get(part, 0.0) for result in results for part in READING)
    return Took(whole, whole - reading), [result.tokens for result in results]


def compare(vlm: VLM, rows: int, tokens: int, times: int) -> list[str]:
    """A line of the table: medians, and of the ratios of each time the median."""
    ways: dict[bool, list[Took]] = {False: [], True: []}
    for again in range(times + 1):  # the first loads the graphs
        answers = {}
        for together in ways:
            took, answers[together] = measure(vlm, rows, tokens, together)
            if again:
                ways[together].append(took)
        if answers[False] != answers[True]:
            raise UserError(f"level {vlm.level}: answers differ when they are decoded together")
    line = [vlm.level, str(rows)]
    for part in ("decoding", "whole"):
        alone, many = ([getattr(took, part) for took in ways[together]] for together in (False, True))
        line += [f"{rows * tokens / median(seconds):.0f}" for seconds in (alone, many)]
        line += [f"{median(a / b for a, b in zip(alone, many, strict=True)):.2f}"]
    return line


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = answering(__doc__, argv, tokens=60, times=7, kept="")
    manifest = bundles.read(arguments.bundle).manifest
    if manifest.batch == 1:
        raise UserError(f"{arguments.bundle} decodes one request at a time: build it with --batch 4")
    known = list(manifest.levels)
    lines = [["level", "requests", *(f"{part}: {what}" for part in ("decoding", "whole")
             for what in ("alone, tokens/s", "together", "ratio"))]]  # fmt: skip
    for level in track(choice(arguments.levels, known, "level") if arguments.levels else known, "measuring"):
        vlm = runtime.open(arguments.bundle, "ort", level, threads=1)
        rows = max(bucket.batch for bucket in manifest.levels[level].buckets)
        lines.append(compare(vlm, rows, arguments.tokens, arguments.times))
    Figures(typed("bench_batch.py", argv), {"": lines}, [NOTE], {}).report(arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
