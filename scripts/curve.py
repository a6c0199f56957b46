"""What the accuracy curves are made of: cells, whoever measured them, their table, their plot and their file.

Imports nothing of this project that needs transformers or ONNX: kvpress's curve is measured in another environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from demo_vlm import suites as held_out
from engines.bundle import sha256
from engines.config import parse, read_json
from engines.errors import UserError
from reporting import binomial_error, markdown

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-vlm"
SUITES, RATIOS, QUESTIONS = "page1,page4,easy1,easy4", "0.25,0.5,0.75,0.9,0.95", 100  # by default
NOTHING = "none"  # in place of a method where nothing is dropped
KVPRESS = "kvpress "  # before the names of its methods
MAX_NEW_TOKENS = 8  # the longest answer has three


@dataclass(frozen=True)
class Cell:
    """One suite by one method at one ratio.

    Attributes:
        dropped: ratio that was asked for.
        slots: tokens that a layer's store keeps on average, of `tokens` in the suite's mean prompt.
        answers: SHA-256 of all answers' texts, in the suite's order.
    """

    suite: str
    method: str
    dropped: float
    slots: float
    tokens: float
    questions: int
    correct: int
    answers: str = ""

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions

    @property
    def standard_error(self) -> float:
        return binomial_error(self.accuracy, self.questions)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"accuracy": self.accuracy, "standard_error": self.standard_error}


def judged(texts: Sequence[str], wanted: Sequence[str]) -> tuple[int, str]:
    """How many answers are right, word for word, and the digest of them all."""
    said, right = ([text.strip().lower() for text in side] for side in (texts, wanted))
    return sum(a == b for a, b in zip(said, right, strict=True)), hashlib.sha256("\n".join(said).encode()).hexdigest()


def report(cells: Sequence[Cell], checkpoint: Path, seconds: float, packages: Iterable[str]) -> dict[str, Any]:
    """The cells with all that is needed to measure them again."""
    return {
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "checkpoint_sha256": weights(checkpoint),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        "machine": platform.machine(),
        "suites_sha256": {name: held_out.fingerprint(name) for name in dict.fromkeys(cell.suite for cell in cells)},
        "seconds": round(seconds, 1),
        "cells": [cell.as_json() for cell in cells],
    }


def weights(checkpoint: Path) -> dict[str, str]:
    return {file.name: sha256(file) for file in sorted(checkpoint.glob("*.safetensors"))}


def peers(file: Path, ours: Sequence[Cell], checkpoint: Path) -> list[Cell]:
    """Cells that kvpress_curve.py measured, as methods "kvpress NAME", of the suites and ratios that we measured.

    Raises:
        UserError: they are of other weights or questions, or the model gives them other answers with nothing dropped.
    """
    data = read_json(file)
    names = Cell.__dataclass_fields__
    try:
        theirs = [parse(Cell, {k: v for k, v in cell.items() if k in names}, str(file)) for cell in data["cells"]]
        measured, suites = data["checkpoint_sha256"], dict(data["suites_sha256"].items())
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a file that scripts/kvpress_curve.py wrote: {error!r}") from error
    again = f"measure it again with  scripts/kvpress_curve.py --json {file}"
    if measured != weights(checkpoint):
        raise UserError(f"{file} was measured on other weights than {checkpoint}: {again}")
    for mine in (cell for cell in ours if cell.method == NOTHING):
        if suites.get(mine.suite) != held_out.fingerprint(mine.suite):
            raise UserError(f"{file} has no {mine.suite}, or one with other questions: {again}")
        same = next((cell for cell in theirs if (cell.suite, cell.method) == (mine.suite, NOTHING)), None)
        if same is None or same.questions != mine.questions:
            raise UserError(f"{file} has another number of questions of {mine.suite} than {mine.questions}: {again}")
        if same.answers != mine.answers:
            raise UserError(f"{file}: with nothing dropped {mine.suite} got other answers than here: {again}")
    wanted = {(cell.suite, cell.dropped) for cell in ours if cell.method != NOTHING}
    return [
        dataclasses.replace(cell, method=KVPRESS + cell.method)
        for cell in theirs
        if cell.method != NOTHING and (cell.suite, cell.dropped) in wanted
    ]


def table(cells: Sequence[Cell]) -> str:
    """Markdown: exact match in per cent, a line a method, a column a suite and ratio."""
    found = {(cell.suite, cell.method, cell.dropped): cell for cell in cells}
    suites, methods, ratios = (list(dict.fromkeys(values)) for values in zip(*found, strict=True))
    rows = [["suite", "method", *(f"{ratio:.0%} dropped" for ratio in ratios)]]
    for suite in suites:
        for method in methods:
            mine = (found.get((suite, method, ratio)) for ratio in ratios)
            texts = ["" if cell is None else _percent(cell) for cell in mine]
            rows.append([suite, method, *texts])
    return "\n".join([*markdown(rows), "", "Exact match, %. ±: one standard error."])


def best_of_kvpress(cells: Sequence[Cell]) -> list[Cell]:
    """Of every suite and ratio the cell of the kvpress method that is best there; of equals the first."""
    best: dict[tuple[str, float], Cell] = {}
    for cell in cells:
        if cell.method.startswith(KVPRESS):
            known = best.setdefault((cell.suite, cell.dropped), cell)
            if cell.correct > known.correct:
                best[cell.suite, cell.dropped] = cell
    return list(best.values())


def summary(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    """Markdown: some of our methods and the best of kvpress, named, at every ratio."""
    found = {(cell.suite, cell.dropped, cell.method): cell for cell in cells}
    best = {(cell.suite, cell.dropped): cell for cell in best_of_kvpress(cells)}
    named = [method for method in methods if any(cell.method == method for cell in cells)]
    rows = [["suite", "dropped", *named, *(["best of kvpress"] if best else [])]]
    for suite, dropped in dict.fromkeys((cell.suite, cell.dropped) for cell in cells if cell.dropped):
        texts = [_percent(found[suite, dropped, method]) for method in named]
        if best:
            cell = best[suite, dropped]
            texts.append(f"{_percent(cell)} ({cell.method.removeprefix(KVPRESS)})")
        rows.append([suite, f"{dropped:.0%}", *texts])
    return "\n".join(markdown(rows))


def _percent(cell: Cell) -> str:
    return f"{100 * cell.accuracy:.1f} ± {100 * cell.standard_error:.1f}"


def plot(cells: Sequence[Cell]) -> str:
    """An SVG with one panel a suite and one line a method, in the order of the cells: from nothing dropped on.

    kvpress's many methods are one line, the best of them at every ratio.
    """
    import matplotlib
    from matplotlib.figure import Figure

    best = [dataclasses.replace(cell, method="best of kvpress") for cell in best_of_kvpress(cells)]
    cells = [*(cell for cell in cells if not cell.method.startswith(KVPRESS)), *best]
    suites = list(dict.fromkeys(cell.suite for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells if cell.method != NOTHING))
    figure = Figure(figsize=(4 * len(suites) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(suites), sharey=True, squeeze=False)[0]
    for suite, panel in zip(suites, panels, strict=True):
        for number, method in enumerate(methods):
            line = [cell for cell in cells if cell.suite == suite and cell.method in (NOTHING, method)]
            style = {
                "marker": "osD^vPX*<>hp"[number % 12],
                "linestyle": "--" if number > 9 or method == "random" else "-",
                "linewidth": 3 if method == "best of kvpress" else 1.5,
            }
            x, y = [100 * c.dropped for c in line], [100 * c.accuracy for c in line]
            panel.plot(x, y, label=method, color=f"C{number % 10}", markersize=4, **style)
        panel.set(title=suite, xlabel="tokens dropped, %", ylim=(-3, 103))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("exact match, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    with io.StringIO() as out, matplotlib.rc_context({"svg.hashsalt": "unicache"}):  # the same bytes every time
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def numbers(text: str) -> list[float]:
    """Comma-separated numbers between 0 and 1, as the `type` of an option."""
    try:
        found = sorted({float(part) for part in text.split(",") if part})
    except ValueError:
        found = []
    if not found or not all(0 < number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"give numbers between 0 and 1, got {text!r}")
    return found
