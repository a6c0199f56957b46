"""Accuracy, bytes and latency as other commands measured them: their files drawn, or the commands named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calibration import tune_table
from calibration.report import plots
from calibration.report.page import Plot, Section, Table
from calibration.tune import Trial
from engines.config import parse, read_json
from engines.errors import UserError, one_line

TUNE = "python -m calibration tune {checkpoint} --target-accuracy -1 --out trials.toml"
ACCURACY = "python scripts/accuracy.py {bundle} --json accuracy.json"
LATENCY = "python scripts/compare_latency.py {bundle} --level {level} --json latency-{level}.json"
REGIMES = {"prompt": "question known", "later": "question later"}
MS = 1000


def accuracy(file: Path) -> Section:
    """Exact match against bytes, a plot a suite, from what scripts/accuracy.py wrote.

    Raises:
        UserError: no such file.
    """
    data = read_json(file)
    try:
        curves: dict[str, dict[str, list[tuple[float, float, float, str]]]] = {}
        for cell in data["cells"]:
            if cell["kv_ratio_mean"] is None:  # every question was refused
                continue
            point = (cell["kv_ratio_mean"], 100 * cell["accuracy"], 100 * cell["standard_error"], cell["level"])
            regime = REGIMES[cell["regime"]]
            curves.setdefault(cell["suite"], {}).setdefault(regime, []).append(point)
        told, count = data["command"], max(cell["questions"] for cell in data["cells"])
        drawn = [Plot(suite, _CAPTION, _curve(lines, suite)) for suite, lines in curves.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _foreign(file, ACCURACY.format(bundle="BUNDLE"), error) from error
    return Section(
        "Accuracy against bytes",
        f"Measured by  {told} : up to {count} questions a suite. Bytes are everything that is allocated for the cache "
        "over those of an fp16 cache of the whole prompt and the answer.",
        plots=drawn,
    )


_CAPTION = "Exact match (%, with one standard error) against KV bytes (share of an fp16 cache), a dot a level."


def _curve(lines: dict[str, list[tuple[float, float, float, str]]], name: str) -> str:
    return plots.curves(lines, "KV bytes / fp16 cache", "exact match, %", f"accuracy {name}")


def latency(files: Sequence[Path]) -> Section:
    """Time against bytes by level, from what scripts/compare_latency.py wrote, one file a level.

    Raises:
        UserError: no such file.
    """
    rows = [
        [
            "level",
            "backend",
            "KV, KiB",
            "of fp16",
            "ms a token",
            "vision, ms",
            "prefill, ms",
            "decode, ms",
            "compact, ms",
        ]
    ]
    bars, points = {}, []
    for file in files:
        data = read_json(file)
        try:
            request, spent = data["request"], MS * data["seconds_per_token"]
            share = request["kv_bytes"] / request["kv_bytes_uncompressed"]
            points.append((share, spent, 0.0, request["level"]))
            for backend in dict.fromkeys(row["backend"] for row in data["latency_ms"]):
                known = {row["kind"]: row["median"] for row in data["latency_ms"] if row["backend"] == backend}
                bars[f"{request['level']}, {backend}"] = {kind: float(ms) for kind, ms in known.items()}
                times = [
                    f"{known[kind]:.2f}" if kind in known else "" for kind in ("vision", "prefill", "decode", "compact")
                ]
                kib = f"{request['kv_bytes'] / 1024:.0f}"
                rows.append([request["level"], backend, kib, f"{share:.1%}", f"{spent:.2f}", *times])
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise _foreign(file, LATENCY.format(bundle="BUNDLE", level="LEVEL"), error) from error
    drawn = [
        Plot(
            "Time by graph",
            "Median of one call of each graph (milliseconds): vision for an image, prefill for a prompt, decode for a "
            "token, compact for a full window.",
            plots.bars(bars, "ms", "latency"),
        )
    ]
    if len(points) > 1:
        text = (
            "The runtime's decode loop (milliseconds a token) against KV bytes (share of an fp16 cache), a dot a level."
        )
        drawn.append(
            Plot("Time against bytes", text, plots.curves({"": points}, "KV bytes / fp16 cache", "ms a token", "time"))
        )
    return Section(
        "Latency",
        "Measured by scripts/compare_latency.py on one machine: compare levels, not machines.",
        tables=[Table("One request a level; medians of the graphs' calls.", rows)],
        plots=drawn,
    )


def trials(file: Path) -> Section:
    """Every recipe that a search tried, from what `python -m calibration tune` wrote.

    Raises:
        UserError: no such file.
    """
    data = read_json(file)
    try:
        tried = parse(list[Trial], data["trials"], str(file))
    except (KeyError, TypeError) as error:
        raise _foreign(file, TUNE.format(checkpoint="CHECKPOINT"), error) from error
    known: dict[str, list[tuple[float, float]]] = {}
    for trial in tried:
        if trial.kv_share is not None and trial.accuracy is not None:
            known.setdefault(trial.step, []).append((trial.kv_share, trial.accuracy))
    points = {step: (x, y) for step, own in known.items() for x, y in [np.array(own).T]}
    text = "Exact match (%) against KV bytes (share of an fp16 cache) of every recipe tried, by the step of the search."
    drawn = plots.dots(points, "KV bytes / fp16 cache", "exact match, %", "trials", log=True) if points else ""
    return Section(
        "Search for a recipe",
        tables=[Table("Every recipe that was tried, in its order.", tune_table.rows(tried))],
        plots=[Plot("Tried recipes", text, drawn)] if points else [],
    )


def _foreign(file: Path, written_by: str, error: Exception) -> UserError:
    return UserError(f"{file} cannot be drawn ({one_line(error)}): write it by  {written_by}")
