"""`guard`: a recipe beside the uncompressed model, on held-out samples."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from calibration.commands.options import Commands, add_checkpoint, as_json, numbers, part, progress_bar
from engines.errors import positive
from engines.guard import Limits


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "guard",
        help="compare a recipe with the uncompressed model on held-out samples; exits with 1 if it is refused",
        description="A recipe beside the uncompressed model, on samples that it was not calibrated on.",
        epilog="example:  python -m calibration guard models/demo-vlm --recipe balanced --lighten",
    )
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument("--recipe", required=True, metavar="NAME|FILE", help="that is judged")
    parser.add_argument(
        "--lighter", action="append", default=[], metavar="NAME|FILE", help="judged next if it is refused; repeat it"
    )
    parser.add_argument(
        "--lighten", action="store_true", help="if it is refused, keep more, then more bits, until it holds"
    )
    parser.add_argument("--held-out", help="the same: other samples, all held out; those of --samples all calibrate")
    parser.add_argument("--share", type=part, default=0.25, help="of the samples that are held out (default: 0.25)")
    parser.add_argument("--seed", type=int, default=0, help="chooses these (default: 0)")
    parser.add_argument("--limit", type=positive, metavar="N", help="judge by the first N held-out samples only")
    parser.add_argument("--later", action="store_true", help="the question comes after the compression")
    parser.add_argument("--map", type=Path, help="an attention map: its ranges are the calibrated ones")
    parser.add_argument(
        "--limits",
        type=numbers,
        default={},
        metavar="NAME=NUMBER,...",
        help="what a recipe may cost (default: its [guard]; what that leaves out is "
        + ",".join(f"{name}={limit:g}" for name, limit in dataclasses.asdict(Limits()).items())
        + ")",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    import itertools

    from calibration import attention_map, guard_table, samples
    from calibration.guard import Guard, check_fits
    from calibration.lighten import changes, lighter
    from engines.config import parse
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    folder = arguments.checkpoint

    def limited(recipe: recipes.Recipe) -> recipes.Recipe:
        limits = parse(Limits, dataclasses.asdict(recipe.guard) | arguments.limits, "--limits")
        return dataclasses.replace(recipe, guard=limits)

    recipe, *others = (limited(recipes.load(name, folder)) for name in (arguments.recipe, *arguments.lighter))
    given = samples.of(folder, arguments.samples, text_only=True)
    if arguments.held_out:
        calibration, (held_out, notes) = given, samples.apart(given, samples.read(arguments.held_out, text_only=True))
    else:
        (calibration, held_out), notes = samples.split(given, arguments.seed, arguments.share), []
    held_out = held_out[: arguments.limit]
    known = attention_map.load(arguments.map) if arguments.map else None
    checkpoint = checkpoints.load(folder)
    last = (others or [recipe])[-1]
    candidates = itertools.chain([recipe, *others], lighter(last) if arguments.lighten else [])
    for candidate in (recipe, *others):
        check_fits(checkpoint, candidate, held_out)
    with progress_bar() as bar:

        def progress(what: str) -> Callable[[], None]:
            return partial(bar.advance, bar.add_task(what, total=len(held_out)))

        layers = max(candidate.guard.layers for candidate in (recipe, *others))
        guard = Guard(checkpoint, calibration, held_out, layers, known, progress)
        tried = guard.first(candidates, arguments.later)
    chosen, verdict = tried[-1]
    if arguments.json:
        used = chosen.settings() if verdict.holds else None
        print(as_json({"recipe": used, "verdicts": [dataclasses.asdict(judged) for _, judged in tried]}))
    for candidate, judged in tried if not arguments.json else ():
        print("\n".join(guard_table.lines(judged)))
        if candidate not in (recipe, *others):
            print("it says: " + ", ".join(f"{key} = {value}" for key, value in changes(candidate, last).items()))
        print()
    for warning in (*notes, *verdict.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    return 0 if verdict.holds else 1
