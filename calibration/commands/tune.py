"""`tune`: the recipe that a checkpoint's own samples find best."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from calibration.commands.options import Commands, add_checkpoint, as_json, number, numbers, progress_bar
from engines.errors import UserError

_bytes = number(lambda count: 0 < count < 2**40, "of bytes above 0")
_points = number(lambda points: -100 <= points <= 0, "of points from -100 to 0")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="search for the best recipe of so many bytes, or for the fewest bytes that hold the accuracy",
        description="Changes a recipe step by step: slots of layers, then of text and image, weights of importance, "
        "bits, merged heads. Samples are in three parts: to calibrate on, to choose recipes by, and to confirm the "
        "choice by. Writes the recipe, and beside it every trial as .md and .json. Killed, the same command goes on.",
        epilog="example:  python -m calibration tune models/demo-vlm --target-accuracy -1",
    )
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--target-bytes-per-token",
        type=_bytes,
        metavar="X",
        help="of the KV state, for each token of a prompt: the most accurate recipe with these",
    )
    target.add_argument(
        "--target-accuracy",
        type=_points,
        metavar="P",
        help="what each task may lose in points, e.g. -1: the recipe with the fewest bytes that loses no more",
    )
    parser.add_argument("--recipe", default="balanced", metavar="NAME|FILE", help="to begin with (default: balanced)")
    parser.add_argument("--later", action="store_true", help="the question comes after the compression")
    parser.add_argument(
        "--limits",
        type=numbers,
        default={},
        metavar="NAME=NUMBER,...",
        help="what the recipe may cost besides, as in `guard` (default: its [guard])",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the three parts (default: 0)")
    parser.add_argument("--name", default="tuned", help="of the new recipe (default: tuned)")
    parser.add_argument("--out", type=Path, metavar="FILE.toml", help="default: build/CHECKPOINT.NAME.toml")


def run(arguments: argparse.Namespace) -> int:
    from calibration import recipe_file, samples, tune_table
    from calibration.memory import check_writable, write
    from calibration.tune import Search
    from calibration.workbench import Workbench
    from engines.config import parse
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    folder, points = arguments.checkpoint, arguments.target_accuracy
    out = arguments.out or Path("build") / f"{folder.resolve().name}.{arguments.name}.toml"
    if out.suffix != ".toml" or out.is_dir():
        raise UserError(f"--out {out}: give a file that ends in .toml")
    if points is not None and "task" in arguments.limits:
        raise UserError("--target-accuracy is the limit of every task: leave task out of --limits")
    base = recipes.load(arguments.recipe, folder)
    limits = dataclasses.asdict(base.guard) | ({} if points is None else {"task": -points}) | arguments.limits
    settings = base.settings() | {"name": arguments.name, "guard": limits}
    base = parse(recipes.Recipe, settings, "--name and --limits")
    given = samples.of(folder, arguments.samples, text_only=True)
    mine = out.resolve().parent == recipes.own(folder).resolve()  # where `--recipe NAME` finds them
    check_writable(out, *([] if mine else [folder]))
    checkpoint, trials = checkpoints.load(folder), out.with_suffix(".trials")
    try:
        with progress_bar() as bar:
            task = bar.add_task("", total=None)

            def progress(what: str, times: int) -> Callable[[], None]:
                bar.reset(task, total=times, description=what)
                return partial(bar.advance, task)

            bench = Workbench(checkpoint, base, given, trials, arguments.seed, arguments.later, progress)
            for confirm in (False, True):  # the base is judged, too: fail before that if it cannot be
                bench.bytes_per_token(base, confirm)
            search = Search(bench)
            recipe = search.by_accuracy() if points is not None else search.by_bytes(arguments.target_bytes_per_token)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: the same command goes on from what is in {trials}") from None

    last, warnings = search.trials[-1], bench.warnings
    parts = f"{len(bench.calibrate)} samples calibrated, {len(bench.choose)} chose, {len(bench.confirm)} confirmed"
    head = [_command(arguments), parts]
    told = {"command": head[0], "samples": parts, "trials": [dataclasses.asdict(trial) for trial in search.trials]}
    write(out.with_suffix(".json"), as_json(told, indent=1) + "\n")
    write(out.with_suffix(".md"), "\n\n".join([*head, "\n".join(tune_table.lines(search.trials))]) + "\n")
    print("\n".join(tune_table.lines([trial for trial in search.trials if trial.step == "confirm"])))
    for warning in dict.fromkeys([*warnings, *(last.verdict.warnings if last.verdict else [])]):
        print(f"warning: {warning}", file=sys.stderr)
    if recipe is None:
        print(f"refused: {last.why}; no recipe was written, the trials are in {out.with_suffix('.md')}")
        return 1
    write(out, recipe_file.text(dataclasses.replace(recipe, description=tune_table.description(last)), head))
    print(f"wrote {out}, and all {len(search.trials)} trials to {out.with_suffix('.md')} and .json")
    return 0


def _command(arguments: argparse.Namespace) -> str:
    """What to type for the same again."""
    words = ["python", "-m", "calibration", "tune", str(arguments.checkpoint)]
    for name in ("target_bytes_per_token", "target_accuracy", "samples", "recipe", "limits", "seed", "name", "out"):
        if (value := getattr(arguments, name)) not in (None, {}):
            told = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            words += [f"--{name.replace('_', '-')}", f"{told:.12g}" if isinstance(told, float) else str(told)]
    return shlex.join([*words, *(["--later"] if arguments.later else [])])
