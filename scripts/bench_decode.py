"""How fast a token comes: our levels beside transformers, onnxruntime-genai and llama.cpp, as the context grows.

    python scripts/bench_decode.py --json decode.json
    python scripts/bench_decode.py --models smollm2 --contexts 4096 --threads 1 --ways 'ours off,transformers eager'
    python scripts/bench_decode.py --quick

Every way runs in a process of its own, all of a model and context side by side; in each round each decodes a few
tokens, in the same order, so that what disturbs the machine disturbs all of them, and a ratio is the median of those of
each round. First each reads the same short prompt, part of it token by token: whose logits are not like those of
transformers' eager attention is named and not timed. Contexts are made up where a way allows it (ours, transformers),
and read where it does not (genai, llama.cpp).

Peers live in environments of their own, which the project does not import; who is not there is left out and named:

    python -m venv build/peers && build/peers/bin/pip install -r scripts/decode_bench/peers.txt
    python -m venv build/llama-cpp && nice build/llama-cpp/bin/pip install -r scripts/decode_bench/llama-cpp.txt

The first run makes checkpoints, bundles and peers' models in --home (some GB, half an hour or more on two cores). The
whole of it then takes an hour or two, most of it genai reading long prompts. What was measured is kept there, and the
same command goes on where it was ended.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from decode_bench import models, report
from decode_bench.models import MODELS, ROOT, Model
from decode_bench.report import Cell
from decode_bench.ways import ALIKE, REFERENCE, WAYS, Process, Way, alike, command, missing
from engines.config import parse, read_json
from engines.errors import Parser, UserError, one_line, positive
from engines.errors import command as entry
from figures import Figures, typed
from reporting import choice, json_option, write

ROUNDS, STEPS = 10, 4
LONG = 2, 8  # windows of a conversation, and steps of it that are compared
PROMPT, FORCED = 8, 2  # tokens that logits are compared on: so few that no level drops one
MEASURED = 512  # tokens that peers measure their scales on
QUICK = {"models": "tiny", "ways": "ours off,transformers eager", "rounds": 2, "steps": 2}
NOTE = (
    "Milliseconds of a step, by the clock and of the processor; tokens/s count compactions too. KV: what the cache has "
    "allocated. alike: correlation of its logits with those of transformers' eager attention on a short prompt. x: how "
    "many times as fast, of paired rounds the median."
)
DEFAULT = "demo,smollm2,gqa,mha"
PATIENCE = 3600.0  # seconds that an order may take: a prompt of 16,384 tokens is long


Done = dict[tuple[str, int, int], tuple[list[Cell], dict[str, str]]]  # model, context, threads -> cells; why not others


@dataclass(frozen=True)
class Plan:
    """What is measured of every group."""

    ways: list[Way]
    rounds: int
    steps: int
    home: Path
    patience: float


def tokens(count: int) -> list[int]:
    """A prompt: small ids, which every model has."""
    return np.random.default_rng(1).integers(20, 90, count).tolist()


def started(
    plan: Plan, model: Model, context: int, threads: int, bundles: dict[str, Path], stack: contextlib.ExitStack
) -> tuple[dict[Way, Process], dict[str, str]]:
    """The processes, and of ways that do not run why not."""
    running: dict[Way, Process] = {}
    without: dict[str, str] = {}
    for way in tqdm(plan.ways, f"{model.name}, {context:,} tokens: starting", leave=False, disable=None):
        if why := missing(way, model):
            without[way.name] = why
            continue
        try:
            line = command(way, model, context, threads, plan.home, tokens(MEASURED), bundles.get(way.weights))
            running[way] = Process(line, threads, plan.patience)
            stack.callback(running[way].close)
        except UserError as error:
            without[way.name] = one_line(error)
    return running, without


def checked(running: dict[Way, Process], without: dict[str, str]) -> dict[Way, float]:
    """How alike each way's logits are to the reference's; who differs is put among those that are not timed."""
    told = {}
    for way, process in running.items():
        try:
            told[way] = process.order("logits", prompt=tokens(PROMPT), forced=tokens(FORCED)[::-1])["logits"]
        except UserError as error:
            without[way.name] = one_line(error)
    base = next((way for way in told if way.name == REFERENCE), next((way for way in told if way.exact), None))
    if base is None:
        raise UserError(f"nothing to compare logits with: measure {REFERENCE} or ours off too")
    found = {way: alike(logits, told[base]) for way, logits in told.items()}
    for way, value in found.items():
        if value < ALIKE[way.exact]:
            without[way.name] = f"WRONG: its logits correlate with those of {base.name} by {value:.4f}"
    return {way: value for way, value in found.items() if value >= ALIKE[way.exact]}


def measure(plan: Plan, model: Model, context: int, threads: int) -> tuple[list[Cell], dict[str, str]]:
    """One group: all ways on one model with so many tokens in the cache."""
    bundles = {}
    for weights in dict.fromkeys(way.weights for way in plan.ways if way.module == "ours"):
        levels = [way.level for way in plan.ways if way.module == "ours" and way.weights == weights]
        bundles[weights] = models.bundle(model, weights, levels, [context], plan.home)
    with contextlib.ExitStack() as stack:
        running, without = started(plan, model, context, threads, bundles, stack)
        values = checked(running, without)
        filled: dict[Way, dict[str, Any]] = {}
        for way in tqdm(values, f"{model.name}, {context:,} tokens: filling", leave=False, disable=None):
            try:
                filled[way] = running[way].order("fill", context=context)
            except UserError as error:
                without[way.name] = one_line(error)
        rounds = tqdm(range(plan.rounds), f"{model.name}, {context:,} tokens: rounds", leave=False, disable=None)
        turns = taken_in({way: running[way] for way in filled}, rounds, plan.steps, without)
        cells = []
        for way, taken in turns.items():
            first = filled[way]
            more: dict[str, Any] = {}
            if way.module == "ours" and (long := running[way].order("long", windows=LONG[0], count=LONG[1])):
                flat = float(np.median(np.array(long["long"]) / np.array(long["fresh"])))
                more = {"compaction": long["compaction"], "every": long["every"], "flat": flat}
            cells.append(
                Cell(
                    model.name, context, threads, way.name, way.weights, values[way],
                    [each["seconds"] for each in taken], [s for each in taken for s in each["processor"]],
                    taken[-1]["peak_rss"], first["kv_bytes"], first["seconds"], versions=running[way].versions, **more,
                )
            )  # fmt: skip
    return cells, without


def taken_in(
    running: dict[Way, Process], rounds: Iterable[int], steps: int, without: dict[str, str]
) -> dict[Way, list[dict[str, Any]]]:
    """What each way says of its turns, one a round; who fails in one of them is put among those that are not timed."""
    turns: dict[Way, list[dict[str, Any]]] = {way: [] for way in running}
    for _ in rounds:
        for way in list(turns):
            try:
                turns[way].append(running[way].order("steps", count=steps))
            except UserError as error:
                without[way.name] = one_line(error)
                del turns[way]
    return turns


def groups(arguments: argparse.Namespace) -> Iterator[tuple[Model, int, int]]:
    for name in arguments.models:
        for context in arguments.contexts or MODELS[name].contexts:
            for threads in arguments.threads:
                yield MODELS[name], context, threads


def known(file: Path, settings: dict[str, Any]) -> Done:
    """Groups that an earlier run has measured with these settings, and did not come to its end."""
    if not file.exists():
        return {}
    data, names, found = read_json(file), Cell.__dataclass_fields__, {}
    for group in data["groups"] if data["settings"] == settings else []:
        cells = [parse(Cell, {k: v for k, v in cell.items() if k in names}, str(file)) for cell in group["cells"]]
        found[(group["model"], group["context"], group["threads"])] = cells, group["not_measured"]
    return found


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"comma-separated, of {','.join(MODELS)}; default: {DEFAULT}")
    parser.add_argument("--contexts", type=_numbers, metavar="N,N", help="tokens in the cache; default: by model")
    parser.add_argument("--threads", type=_numbers, metavar="N,N", help="default: 1, and 2 where there are two cores")
    parser.add_argument("--ways", metavar="NAMES", help="';'-separated, or ',' where no name has one; default: all")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--steps", type=positive, metavar="N", help=f"of a round; default: {STEPS}")
    parser.add_argument(
        "--home", type=Path, default=ROOT / "build" / "decode", metavar="DIR", help="models are made here"
    )
    parser.add_argument("--patience", type=positive, default=PATIENCE, metavar="S", help="seconds a prompt may take")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: does it run at all")
    json_option(parser)
    a = parser.parse_args(argv)
    cores = os.cpu_count() or 1
    quick: dict[str, Any] = QUICK if a.quick else {}
    a.models = choice(a.models or quick.get("models", DEFAULT), list(MODELS), "model")
    a.threads = a.threads or ([1] if a.quick else [1, 2][:cores])
    a.rounds, a.steps = a.rounds or quick.get("rounds", ROUNDS), a.steps or quick.get("steps", STEPS)
    names = [way.name for way in WAYS]
    asked = a.ways or quick.get("ways") or ";".join(names)
    wanted = [name.strip() for name in asked.split(";" if ";" in asked or asked in names else ",")]
    if unknown := [name for name in wanted if name not in names]:
        raise UserError(f"no way {unknown[0]!r}: choose from {'; '.join(names)}")
    a.ways = [way for way in WAYS if way.name in wanted]
    if max(a.threads) > cores:
        raise UserError(f"--threads {max(a.threads)}: this machine has {cores} cores")
    return a


@entry
def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    plan = Plan(a.ways, a.rounds, a.steps, a.home.resolve(), a.patience)
    settings = {"ways": [way.name for way in a.ways], "rounds": a.rounds, "steps": a.steps}
    plan.home.mkdir(parents=True, exist_ok=True)
    progress = plan.home / "progress.json"
    before, done = known(progress, settings), Done()
    for model, context, threads in groups(a):
        key = (model.name, context, threads)
        done[key] = before[key] if key in before else measure(plan, model, context, threads)
        write(progress, json.dumps(values(settings, before | done)))
    told(argv, settings, done).report(a.json)
    progress.unlink()
    without = {name: why for _, missed in done.values() for name, why in missed.items()}
    return int(any(why.startswith("WRONG") or name.startswith("ours") for name, why in without.items()))


def told(argv: Sequence[str] | None, settings: dict[str, Any], done: Done) -> Figures:
    tables: dict[str, list[list[str]]] = {}
    notes, versions = [NOTE], dict[str, str]()
    for (name, context, threads), (cells, without) in done.items():
        title = f"{MODELS[name].what}: {context:,} tokens, {threads} thread{'s' * (threads > 1)}"
        if cells:
            tables[title] = report.table(cells)
        lines = [*(aim.line() for aim in report.aims(cells)), *report.compactions(cells)]
        lines += [f"not measured: {name}: {why}" for name, why in without.items()]
        notes += [f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines)] * bool(lines)
        versions |= {package: number for cell in cells for package, number in cell.versions.items()}
    panels = report.panels([cell for cells, _ in done.values() for cell in cells])
    return Figures(typed("bench_decode.py", argv), tables, notes, values(settings, done), panels, versions)


def values(settings: dict[str, Any], done: Done) -> dict[str, Any]:
    groups = []
    for (name, context, threads), (cells, without) in done.items():
        group = {"model": name, "context": context, "threads": threads, "not_measured": without}
        aims = [asdict(aim) for aim in report.aims(cells)]
        groups.append({**group, "aims": aims, "cells": [cell.as_json() for cell in cells]})
    return {"settings": settings, "groups": groups}


if __name__ == "__main__":
    sys.exit(main())
