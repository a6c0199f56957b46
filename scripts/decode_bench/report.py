"""What bench_decode.py tells: cells, their table, the targets, panels of a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from plots import Panel

EDGE, OFF, BALANCED = "genai ", "ours off", "ours balanced"
EAGER = "transformers eager"


@dataclass(frozen=True)
class Cell:
    """One way on one model with so many tokens in the cache; seconds.

    Attributes:
        alike: correlation of its logits with the reference's, on a short prompt.
        rounds: of each round its steps.
        processor: the processor's time of each step.
        peak_rss, kv_bytes: of the process, and of the cache as allocated.
        filled: how long it took to put the context there, by a prompt or without reading one.
        compaction, every: a compaction and the steps between two, at levels that compact.
        flat: a step of a conversation whose window was full some times, over one of a fresh one; median of pairs.
    """

    model: str
    context: int
    threads: int
    way: str
    weights: str
    alike: float
    rounds: list[list[float]]
    processor: list[float]
    peak_rss: int
    kv_bytes: int
    filled: float
    compaction: float | None = None
    every: int | None = None
    flat: float | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, int, int]:
        return self.model, self.context, self.threads

    @property
    def steps(self) -> list[float]:
        return [step for each in self.rounds for step in each]

    @property
    def mean_of_rounds(self) -> list[float]:
        """Median step of each round, with the share of a compaction that falls to it."""
        share = (self.compaction or 0.0) / (self.every or 1)
        return [float(np.median(each)) + share for each in self.rounds]

    @property
    def tokens_per_second(self) -> float:
        return 1 / float(np.median(self.mean_of_rounds))

    def as_json(self) -> dict[str, Any]:
        p50, p95 = (float(np.percentile(self.steps, share)) for share in (50, 95))
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "p50": p50, "p95": p95}


def ratio(cell: Cell, other: Cell) -> float:
    """How many times as fast as another of its group: the median of what it is in each round."""
    return float(np.median(np.array(other.mean_of_rounds) / np.array(cell.mean_of_rounds)))


def table(cells: Sequence[Cell]) -> list[list[str]]:
    """Of one group; the last column is over `ours off`, or over the first."""
    base = next((cell for cell in cells if cell.way == OFF), cells[0])
    rows = [["way", "tokens/s", "p50 ms", "p95 ms", "processor ms", "KV MiB", "peak RSS MiB", "alike", f"x {base.way}"]]
    for cell in cells:
        told = cell.as_json()
        times = [f"{1e3 * x:.1f}" for x in (told["p50"], told["p95"], float(np.median(cell.processor)))]
        sizes = [f"{x / 2**20:.1f}" for x in (cell.kv_bytes, cell.peak_rss)]
        rows.append(
            [cell.way, f"{cell.tokens_per_second:.1f}", *times, *sizes, f"{cell.alike:.4f}", f"{ratio(cell, base):.2f}"]
        )
    return rows


@dataclass(frozen=True)
class Aim:
    """How many times as fast a way of ours is as another's, and how many were wanted at least."""

    name: str
    weights: str
    ours: str
    other: str
    found: float
    wanted: float

    def line(self) -> str:
        verdict = "yes" if self.found >= self.wanted else "no"
        return f"{self.ours} / {self.other}: {self.found:.2f} (wanted: {self.wanted:g}; {verdict})"


def aims(cells: Sequence[Cell]) -> list[Aim]:
    """What was aimed at, of one group, whatever came out: against the same bits of weights."""
    by_way = {cell.way: cell for cell in cells}
    found = []
    for weights in dict.fromkeys(cell.weights for cell in cells):
        behind = "" if weights == "float32" else f", {weights} weights"
        off, balanced = by_way.get(OFF + behind), by_way.get(BALANCED + behind)
        theirs = [cell for cell in cells if cell.way.startswith(EDGE) and cell.weights == weights]
        plain = next((cell for cell in theirs if cell.way.endswith("fp32 KV")), None)
        best = min(theirs, key=lambda cell: float(np.median(cell.mean_of_rounds)), default=None)
        eager = by_way.get(EAGER) if weights == "float32" else None
        pairs = {
            "off over genai": (off, plain, 1.0),
            "balanced over genai": (balanced, best, 1.5),
            "balanced over eager": (balanced, eager, 5.0),
        }
        for name, (cell, other, wanted) in pairs.items():
            if cell and other:
                found.append(Aim(name, weights, cell.way, other.way, ratio(cell, other), wanted))
    return found


def compactions(cells: Sequence[Cell]) -> list[str]:
    """What they cost, and whether a conversation's steps stay as long as they were: a line each."""
    lines = []
    for cell in cells:
        if cell.compaction is not None and cell.every and cell.flat is not None:
            share = cell.compaction / cell.every / float(np.median(cell.steps))
            lines.append(
                f"{cell.way}: compaction {1e3 * cell.compaction:.1f} ms every {cell.every} steps, {100 * share:.1f} % "
                f"of decoding; a step once the window was full, over a fresh one's: {cell.flat:.3f}"
            )
    return lines


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """Tokens a second, against the context where there are several: a panel a model and number of threads."""
    found: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    for cell in cells:
        lines = found.setdefault((cell.model, cell.threads), {})
        lines.setdefault(cell.way, []).append([cell.context, cell.tokens_per_second])
    drawn = []
    for (model, threads), lines in found.items():
        title, contexts = (
            f"{model}, {threads} thread{'s' * (threads > 1)}",
            {x for line in lines.values() for x, _ in line},
        )
        if len(contexts) > 1:
            drawn.append(Panel(title, "tokens in the cache", "tokens a second", lines, True))
        else:
            bars = {name: [[y]] for name, ((_, y),) in lines.items()}
            drawn.append(Panel(f"{title}, {contexts.pop():,} tokens in the cache", "", "tokens a second", bars))
    return drawn
