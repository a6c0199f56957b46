"""`map`: what every layer and head looks at, and what it caches."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from calibration.commands.options import Commands, add_checkpoint, as_json, progress_bar
from engines.errors import UserError, positive


def add(commands: Commands) -> None:
    parser = commands.add_parser("map", help="measure what every layer and head looks at, and what it caches")
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument("--out", type=Path, help="the map's file (default: build/NAME.map.safetensors)")
    parser.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")
    parser.add_argument("--seed", type=int, default=0, help="chooses the rows that percentiles are of (default: 0)")
    parser.add_argument("--json", action="store_true", help="print all but what is by channel as JSON")


def run(arguments: argparse.Namespace) -> None:
    import shutil

    from calibration import attention_map, samples, survey
    from calibration.map_table import tables
    from calibration.memory import check_writable
    from export import checkpoint as checkpoints

    checkpoint = checkpoints.load(arguments.checkpoint)
    chosen = samples.of(arguments.checkpoint, arguments.samples, text_only=True)[: arguments.limit]
    out = arguments.out or attention_map.default_path(arguments.checkpoint)
    work = out.with_name(f"{out.name}.work")
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file by --out")
    check_writable(out, arguments.checkpoint)
    try:
        with progress_bar() as bar:
            task = bar.add_task("samples", total=len(chosen))
            found = survey.measure(checkpoint, chosen, work, arguments.seed, progress=lambda: bar.advance(task))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: the same command goes on from what is in {work}") from None
    found.save(out)
    shutil.rmtree(work)
    print(as_json(found.plain()) if arguments.json else "\n".join(tables(found)))
    for warning in found.facts.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote {out}", file=sys.stderr)
