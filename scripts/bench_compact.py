"""What compacting the window costs: its share of the time in which tokens are generated.

    python scripts/bench_compact.py build/demo-vlm
    python scripts/bench_compact.py BUNDLE --levels balanced,extreme --tokens 500 --json compact.json

An answer of so many tokens is generated at each level that compacts, on one thread, again and again. While a window
fills no other work is done than decoding; when it is full it is compacted once. So the share falls with the window's
size, whatever the prompt. `flat`: the last steps of the answer beside the first after the first compaction, medians;
1 is a step that takes as long however much was said.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.progress import track

import runtime
from demo_vlm.data import make_page
from engines import bundle as bundles
from engines.errors import UserError, command
from figures import Figures, typed
from plots import Panel
from reporting import QUESTION, answering, choice
from runtime.model import VLM
from runtime.sampling import Sampling

HEADER = (
    "level",
    "bucket",
    "store",
    "window",
    "kept of it",
    "tokens between",
    "step, ms",
    "compaction, ms",
    "share, %",
    "flat",
)
NOTE = (
    "Medians, one thread. Step: a decoded token, compactions apart. Tokens between: compactions. Share: compactions of "
    "all time that generating took. Flat: the answer's last steps over the first after its first compaction."
)


@dataclass(frozen=True)
class Row:
    """One level; seconds.

    Attributes:
        slots: of the store, a KV head's, in the mean of the layers.
        between: tokens from one compaction to the next.
        flat: median step of the last quarter over that of the quarter behind the first compaction.
    """

    level: str
    bucket: int
    slots: float
    window: int
    recent: int
    between: int
    compactions: int
    step: float
    compaction: float
    share: float
    flat: float


def seconds(vlm: VLM, name: str, runs: dict[str, list[float]]) -> None:
    """Note how long each call of a loaded graph takes."""
    session: Any = vlm._sessions[name]
    run = session.run

    def timed(feeds: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(feeds)
        finally:
            runs.setdefault(name, []).append(time.perf_counter() - start)

    session.run = timed


def measure(vlm: VLM, tokens: int, times: int) -> Row:
    """Raises UserError if the answer is so short that nothing is compacted, or the model's positions end it."""
    images = [make_page(np.random.default_rng(0))[0]] if vlm.model.layouts else []
    sampling = Sampling(temperature=1.0, seed=0)

    def answer() -> Any:
        return vlm.generate(QUESTION, images, tokens, ignore_eos=True, sampling=sampling)

    first = answer().stats  # loads the graphs
    level = vlm.bundle.manifest.levels[vlm.level]
    bucket = next(each for each in level.buckets if each.length == first.bucket)
    between = bucket.window - bucket.recent
    if first.generated_tokens < tokens or first.compactions < 2:
        advice = "more --tokens" if first.compactions < 2 else f"fewer --tokens: it stopped at {first.stop_reason}"
        told = f"{first.generated_tokens} tokens with {first.compactions} compactions tell nothing"
        raise UserError(f"level {vlm.level}: {told}: give {advice}")
    steps, compactions, shares, flats = [], [], [], []
    runs: dict[str, list[float]] = {}
    seconds(vlm, bucket.decode, runs)
    seconds(vlm, bucket.compact, runs)
    for _ in range(times):
        runs.clear()
        stats = answer().stats
        steps += runs[bucket.decode]
        compactions.append(stats.seconds["compact"] / stats.compactions)
        shares.append(stats.seconds["compact"] / (stats.seconds["compact"] + stats.seconds["decode"]))
        behind = runs[bucket.decode][bucket.window :]
        quarter = max(len(behind) // 4, 1)
        flats.append(median(behind[-quarter:]) / median(behind[:quarter]))
    slots = fmean(bucket.capacities)
    place = vlm.level, bucket.length, slots, bucket.window, bucket.recent, between, first.compactions
    return Row(*place, median(steps), median(compactions), median(shares), median(flats))


def cells(row: Row) -> list[str]:
    sizes = [row.level, str(row.bucket), f"{row.slots:.0f}", str(row.window), str(row.recent), str(row.between)]
    times = [f"{1e3 * row.step:.2f}", f"{1e3 * row.compaction:.2f}", f"{100 * row.share:.1f}", f"{row.flat:.2f}"]
    return sizes + times


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = answering(__doc__, argv, tokens=300, times=5, levels="all that compact")
    manifest = bundles.read(arguments.bundle).manifest
    known = [name for name, level in manifest.levels.items() if any(bucket.compact for bucket in level.buckets)]
    if not known:
        raise UserError(f"{arguments.bundle} has no level that compacts: build it with --recipe balanced")
    names = choice(arguments.levels, known, "level that compacts") if arguments.levels else known
    rows = []
    for name in track(names, "generating", transient=True, disable=not sys.stderr.isatty()):
        rows.append(measure(runtime.open(arguments.bundle, "ort", name, threads=1), arguments.tokens, arguments.times))
    table = {"": [list(HEADER), *map(cells, rows)]}
    panel = Panel("compactions, of the time of decoding", "", "%", {row.level: [[100 * row.share]] for row in rows})
    values = {"rows": [asdict(row) for row in rows]}
    Figures(typed("bench_compact.py", argv), table, [NOTE], values, [panel]).report(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
