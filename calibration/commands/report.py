"""`report`: one page with what the model looks at, what recipes keep of it, and what was measured of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.commands.options import Commands, add_checkpoint, progress_bar
from calibration.commands.plan import PLANNED
from calibration.report import FILE, SAMPLES
from engines.errors import UserError, positive


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="write report.html: attention, pictures, budgets, figures and recipes on one page",
        description="One page that needs no network: the attention map by layer and head, heat maps over the input "
        "images, what each selector and each level keeps of them, budgets by layer, and the recipes. Figures that "
        "other commands measured are drawn if their files are given; of the others the page names the commands.",
        epilog="example:  python -m calibration report models/demo-vlm --recipe balanced --recipe extreme",
    )
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="NAME|FILE",
        help=f"a level to show; repeat it for several (default: {', '.join(PLANNED)})",
    )
    parser.add_argument("--map", type=Path, metavar="FILE", help="an attention map (default: it is measured)")
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        default=SAMPLES,
        help=f"where no map is given, measure it on N samples, spread evenly (default: {SAMPLES})",
    )
    parser.add_argument("--guard", type=Path, action="append", metavar="FILE", help="of  guard --json ; repeat it")
    parser.add_argument("--trials", type=Path, metavar="FILE", help="the .json that  tune  writes beside a recipe")
    parser.add_argument("--accuracy", type=Path, metavar="FILE", help="of  scripts/accuracy.py --json")
    parser.add_argument(
        "--latency",
        type=Path,
        action="append",
        metavar="FILE",
        help="of  scripts/compare_latency.py --json ; repeat it",
    )
    parser.add_argument("--out", type=Path, default=Path(FILE), help=f"the page (default: {FILE})")


def run(arguments: argparse.Namespace) -> None:
    from calibration import attention_map, samples, survey
    from calibration.entropy import with_entropy
    from calibration.memory import check_writable, write
    from calibration.prepare import prepare
    from calibration.report import guard
    from calibration.report.assemble import figures, report, spread_out
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    folder, out = arguments.checkpoint, arguments.out
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"{out} is no file in a folder that exists: give one by --out")
    check_writable(out, folder)
    levels = {recipe.name: recipe for recipe in (recipes.load(name, folder) for name in arguments.recipe or PLANNED)}
    measured = figures(
        [verdict for file in arguments.guard or () for verdict in guard.read(file)],
        arguments.accuracy,
        arguments.latency or (),
        arguments.trials,
    )
    known = samples.of(folder, arguments.samples, text_only=True)
    found = attention_map.load(arguments.map) if arguments.map else None
    checkpoint = checkpoints.load(folder)
    with progress_bar() as bar:

        def task(what: str, total: int = len(known)):
            number = bar.add_task(what, total=total)
            return lambda: bar.advance(number)

        if found is None:
            few = spread_out(known, arguments.limit)
            found = survey.measure(checkpoint, few, progress=task("attention map", len(few)))
        else:
            survey.check(found, checkpoint)
        prepared = prepare(checkpoint, levels, known, task)
        levels = with_entropy(checkpoint, levels, {name: own.decoder for name, own in prepared.items()}, known, task)
        write(out, report(checkpoint, levels, prepared, known, found, measured))
    print(f"wrote {out} ({out.stat().st_size / 1024:.0f} KiB): open it in a browser")
