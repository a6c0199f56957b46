"""What weights in fewer bits gain and cost: bundles of one checkpoint side by side.

    for w in float32 int8 int4; do python export/build.py --weights $w --recipe off --out build/$w; done
    python scripts/bench_weights.py build/float32 build/int8 build/int4

Decode and prefill graphs of the longest bucket that all have run in turn, on one thread; a ratio is the median of those
of each turn. What the guard says is of the build's held-out samples.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import track

from engines import bundle as bundles
from engines.bundle import Bundle
from engines.errors import Parser, UserError, command, positive
from engines.manifest import WEIGHTS
from engines.ort import OrtSession
from figures import Figures, typed
from reporting import json_option

NOTE = "Medians, one thread; ratios are of the same turn. KL, perplexity and exact match are of the build's guard."
GRAPHS = ("prefill", "decode")


def seconds(session: OrtSession, feeds: dict[str, np.ndarray], runs: int) -> float:
    """The shortest of some runs."""
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        session.run(feeds)
        took.append(time.perf_counter() - start)
    return min(took)


def longest(built: list[Bundle], level: str) -> int:
    """The longest prompt that all bundles have a bucket for."""
    for bundle in built:
        if level not in bundle.manifest.levels:
            raise UserError(f"{bundle.path} has no level {level!r}: choose from {', '.join(bundle.manifest.levels)}")
    common = set.intersection(*({b.length for b in bundle.manifest.levels[level].buckets} for bundle in built))
    if not common:
        raise UserError(
            f"the bundles have no bucket of one length at level {level}: build them with the same --buckets"
        )
    return max(common)


def opened(bundle: Bundle, level: str, length: int, kind: str) -> tuple[OrtSession, dict[str, np.ndarray]]:
    """The graph, and a prompt or a state to run it on; what is in it does not change how long it takes."""
    bucket = next(b for b in bundle.manifest.levels[level].buckets if b.length == length)
    graph = bundle.manifest.graphs[getattr(bucket, kind)]
    feeds = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in graph.inputs}
    for name in {"embedding", "embeddings"} & set(feeds):
        feeds[name] = np.random.default_rng(0).standard_normal(feeds[name].shape).astype(np.float32)
    if "kinds" in feeds:
        feeds["kinds"] += 1  # text, no padding
    return OrtSession(bundle.file(graph.file), threads=1), feeds


def compare(built: list[Bundle], level: str, times: int) -> list[list[str]]:
    """The rows of the table."""
    took: dict[str, list[list[float]]] = {}
    length = longest(built, level)
    for kind in GRAPHS:
        each = [opened(bundle, level, length, kind) for bundle in built]
        turns = track(range(times), f"{kind}, in turn", transient=True)
        took[kind] = [[seconds(*one, 3) for one in each] for _ in turns]
    rows = [["weights", "weights.bin, MiB", "logit KL", "perplexity", "exact match", *(f"{k}, ms" for k in GRAPHS)]]
    rows[0] += [f"{kind}, times as fast" for kind in GRAPHS]
    for i, bundle in enumerate(built):
        weights, size = bundle.manifest.weights, bundle.manifest.files[WEIGHTS].bytes
        verdict = weights.guard.verdicts[-1] if weights.guard.verdicts else None
        told = ["", "", ""]
        if verdict:
            changes = ", ".join(f"{name} {task.change:+.1f}" for name, task in verdict.tasks.items())
            told = [f"{verdict.logit_kl:.2g}", f"{verdict.perplexity_change:+.1f} %", changes]
        name = f"{weights.dtype} / {weights.group}" if weights.group else weights.dtype
        rows.append([name, f"{size / 2**20:.1f}", *told])
        rows[-1] += [f"{1e3 * median(turn[i] for turn in took[kind]):.2f}" for kind in GRAPHS]
        rows[-1] += [f"{median(turn[0] / turn[i] for turn in took[kind]):.2f}" for kind in GRAPHS]
    return rows


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="scripts/bench_weights.py", description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path, help="folders of export/build.py; the first is the base")
    parser.add_argument("--level", default="off", help="whose graphs run (default: off)")
    parser.add_argument("--times", type=positive, default=20, metavar="N", help="turns (default: 20)")
    json_option(parser, "")
    args = parser.parse_args(argv)
    rows = compare([bundles.read(path) for path in args.bundles], args.level, args.times)
    Figures(typed("bench_weights.py", argv), {"": rows}, [NOTE], {}).report(args.json)


if __name__ == "__main__":
    sys.exit(main())
