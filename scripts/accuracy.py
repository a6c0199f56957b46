"""Accuracy against KV bytes: the demo VLM's held-out suites through the real runtime, at every compression level.

    python scripts/accuracy.py build/demo-vlm
    python scripts/accuracy.py build/demo-vlm --levels off,balanced --suites page4 --limit 200 --json accuracy.json

Greedy, exact match. Two regimes, since a compression can be good in one and useless in the other: the question is in
the prompt while the images are compressed (`prompt`), or it is read after they were compressed (`later`).
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import runtime
from demo_vlm import suites as held_out
from demo_vlm.suites import Item, blind_accuracy
from engines import bundle as bundles
from engines.errors import Parser, UserError, command, positive
from reporting import binomial_error, choice, json_option, markdown, write

if TYPE_CHECKING:
    from runtime.model import VLM

REGIMES = {"prompt": False, "later": True}  # -> question_later
REFERENCE = "off"
MAX_NEW_TOKENS = 8  # the longest answer has three
CHUNK = 32  # questions that a process is given at once
LEGEND = (
    "KV: bytes allocated for the cache / bytes of an fp16 cache of the whole prompt and the answer. "
    "±: one standard error. Blind: the most frequent answer to the question, no image seen. "
    "What is refused counts as wrong."
)
PACKAGES = ("numpy", "onnxruntime", "pillow", "tokenizers")


@dataclass(frozen=True)
class Outcome:
    """One question at one level; `refused` is the runtime's message when it could not be asked at all."""

    correct: bool
    kv_bytes: int = 0
    uncompressed: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Cell:
    """One line of the table: a suite in a regime at a level.

    Attributes:
        outcomes: of every question, in the suite's order.
        blind: accuracy of the most frequent answer to the question, the image unseen.
        reference: the outcomes of the same questions at level `off`, if that was measured.
    """

    suite: str
    regime: str
    level: str
    outcomes: list[Outcome]
    blind: float
    reference: list[Outcome] | None = None

    @property
    def accuracy(self) -> float:
        return sum(o.correct for o in self.outcomes) / len(self.outcomes)

    @property
    def standard_error(self) -> float:
        return binomial_error(self.accuracy, len(self.outcomes))

    @property
    def change(self) -> tuple[float, float] | None:
        """Accuracy minus that of the reference, and the standard error of this difference of paired answers.

        The same questions are asked at both levels, so only those count that one level answers and the other does not.
        """
        if self.reference is None:
            return None
        differences = [a.correct - b.correct for a, b in zip(self.outcomes, self.reference, strict=True)]
        mean = sum(differences) / len(differences)
        return mean, sqrt((sum(d * d for d in differences) / len(differences) - mean * mean) / len(differences))

    @property
    def kv_ratios(self) -> list[float]:
        """Allocated KV bytes / bytes of an fp16 cache of the unpruned prompt and the answer, per question asked."""
        return [o.kv_bytes / o.uncompressed for o in self.outcomes if not o.refused]

    @property
    def refusals(self) -> list[str]:
        return [o.refused for o in self.outcomes if o.refused]

    def as_json(self) -> dict[str, Any]:
        asked = [o for o in self.outcomes if not o.refused]
        change, error = self.change or (None, None)
        return {
            "suite": self.suite,
            "regime": self.regime,
            "level": self.level,
            "questions": len(self.outcomes),
            "correct": sum(o.correct for o in self.outcomes),
            "refused": len(self.refusals),
            "accuracy": self.accuracy,
            "standard_error": self.standard_error,
            "change": change,
            "change_standard_error": error,
            "kv_ratio_mean": _mean(self.kv_ratios),
            "kv_ratio_worst": max(self.kv_ratios, default=None),
            "kv_bytes_mean": _mean([o.kv_bytes for o in asked]),
            "kv_bytes_uncompressed_mean": _mean([o.uncompressed for o in asked]),
            "blind": self.blind,
        }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Job:
    """Some consecutive questions of a suite, to be asked at one level in one regime."""

    suite: str
    regime: str
    level: str
    start: int
    items: list[Item]


def ask(vlm: VLM, items: list[Item], question_later: bool) -> list[Outcome]:
    """Ask every question and compare the answer, stripped and in lower case, with the expected one."""
    outcomes = []
    for item in items:
        try:
            result = vlm.generate(item.question, item.images, MAX_NEW_TOKENS, question_later=question_later)
        except UserError as error:  # for example longer than the level's largest bucket
            outcomes.append(Outcome(False, refused=str(error)))
            continue
        correct = result.text.strip().lower() == item.answer.strip().lower()
        outcomes.append(Outcome(correct, result.stats.kv_bytes, result.stats.kv_bytes_uncompressed))
    return outcomes


_models: dict[str, VLM] = {}  # of this process, by level: each is opened once and keeps its sessions
_open: Callable[[str], VLM]


def _start(open_level: Callable[[str], VLM]) -> None:
    global _open
    _open = open_level
    _models.clear()


def _start_worker(open_level: Callable[[str], VLM]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    _start(open_level)


def _run(job: Job) -> tuple[Job, list[Outcome]]:
    if job.level not in _models:
        _models[job.level] = _open(job.level)
    return job, ask(_models[job.level], job.items, REGIMES[job.regime])


def open_level(bundle: str, backend: str, level: str) -> VLM:
    """One thread a process: the graphs are small, and the processes share the cores."""
    return runtime.open(bundle, backend, level, threads=1)


def run(jobs: list[Job], opener: Callable[[str], VLM], processes: int) -> Iterator[tuple[Job, list[Outcome]]]:
    """Run the jobs in any order; with one process in this one."""
    if processes == 1:
        _start(opener)
        yield from map(_run, jobs)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (opener,))
    try:
        for future in as_completed([pool.submit(_run, job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def measure(
    suites: dict[str, list[Item]], regimes: list[str], levels: list[str], opener: Callable[[str], VLM], processes: int
) -> list[Cell]:
    """Ask every question of every suite in every regime at every level."""
    jobs = [
        Job(suite, regime, level, start, items[start : start + CHUNK])
        for suite, items in suites.items()
        for regime in regimes
        for level in levels
        for start in range(0, len(items), CHUNK)
    ]
    found: dict[tuple[str, str, str], dict[int, list[Outcome]]] = defaultdict(dict)
    with tqdm(total=sum(len(job.items) for job in jobs), unit="question", disable=not sys.stderr.isatty()) as bar:
        for job, outcomes in run(jobs, opener, processes):
            found[job.suite, job.regime, job.level][job.start] = outcomes
            bar.update(len(outcomes))
    ordered = {key: [o for start in sorted(parts) for o in parts[start]] for key, parts in found.items()}
    return [
        Cell(s, r, level, ordered[s, r, level], blind_accuracy(items), ordered.get((s, r, REFERENCE)))
        for s, items in suites.items()
        for r in regimes
        for level in levels
    ]


def table(cells: list[Cell]) -> str:
    """A Markdown table, and under it what was refused."""
    rows = [["suite", "question", "level", "asked", "exact %", "change, points", "KV mean", "KV worst", "blind %"]]
    notes = []
    for cell in cells:
        refused = len(cell.refusals)
        if refused:
            notes.append(
                f"{cell.suite}, {cell.regime}, {cell.level}: {refused} refused, for example: {cell.refusals[0]}"
            )
        change = (
            ""
            if cell.change is None or cell.level == REFERENCE
            else "{:+.1f} ± {:.1f}".format(*(100 * value for value in cell.change))
        )
        asked = [f"{len(cell.outcomes) - refused}", "-", "-", "-", "-"]
        if cell.kv_ratios:
            asked[1:] = [
                f"{100 * cell.accuracy:.1f} ± {100 * cell.standard_error:.1f}",
                change,
                f"{sum(cell.kv_ratios) / len(cell.kv_ratios):.3f}",
                f"{max(cell.kv_ratios):.3f}",
            ]
        rows.append([cell.suite, cell.regime, cell.level, *asked, f"{100 * cell.blind:.1f}"])
    return "\n".join([*markdown(rows), "", LEGEND, *notes])


def report(cells: list[Cell], bundle: bundles.Bundle, seconds: float) -> dict[str, Any]:
    """The cells with all that is needed to measure them again."""
    return {
        "command": shlex.join(["python", "scripts/accuracy.py", *sys.argv[1:]]),
        "bundle_sha256": bundles.sha256(bundle.file(bundles.MANIFEST)),
        "built_with": bundle.manifest.tools,
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "suites_sha256": {name: held_out.fingerprint(name) for name in dict.fromkeys(cell.suite for cell in cells)},
        "seconds": round(seconds, 1),
        "cells": [cell.as_json() for cell in cells],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="folder that export/build.py wrote for the demo VLM")
    parser.add_argument("--levels", help="comma-separated; default: all of the bundle")
    parser.add_argument("--suites", default=",".join(held_out.NAMES), help="comma-separated; default: %(default)s")
    parser.add_argument("--regimes", default=",".join(REGIMES), help=f"default: {','.join(REGIMES)}")
    parser.add_argument("--limit", type=positive, metavar="N", help="questions of each suite; default: all")
    parser.add_argument("--backend", default="auto", help="as in `python -m runtime ask`")
    json_option(parser, "")
    parser.add_argument(
        "--processes", type=positive, default=os.cpu_count() or 1, metavar="N", help="default: one a core"
    )
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    bundle = bundles.read(Path(arguments.bundle))
    known = list(bundle.manifest.levels)
    levels = known if arguments.levels is None else choice(arguments.levels, known, "level")
    regimes = choice(arguments.regimes, list(REGIMES), "regime")
    names = choice(arguments.suites, held_out.NAMES, "suite")

    started = time.perf_counter()
    opener = partial(open_level, arguments.bundle, arguments.backend)
    cells = measure(held_out.suites(names, arguments.limit), regimes, levels, opener, arguments.processes)
    seconds = time.perf_counter() - started
    print(table(cells))
    print(f"{sum(len(cell.outcomes) for cell in cells)} questions, {seconds:.0f} s, {arguments.processes} processes")
    if arguments.json is not None:
        write(arguments.json, json.dumps(report(cells, bundle, seconds), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
