"""python -m calibration COMMAND CHECKPOINT: what its layers and heads look at, and which layers need their tokens."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.errors import Parser, UserError, command, positive


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m calibration", description="Fit compression to a checkpoint.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sensitivity = commands.add_parser(
        "sensitivity", help="measure what each layer needs, and share out the slots by it"
    )
    sensitivity.set_defaults(run=_sensitivity)
    sensitivity.add_argument("checkpoint", type=Path, help="folder as save_pretrained writes it")
    sensitivity.add_argument("--samples", type=Path, help="folder with samples.jsonl (default: CHECKPOINT/samples)")
    sensitivity.add_argument("--recipe", default="balanced", help="its stages choose the tokens (default: balanced)")
    sensitivity.add_argument("--keep", type=_share, default=0.1, help="mean share of the tokens (default: 0.1)")
    sensitivity.add_argument("--least", type=_share, default=0.0, help="share of every layer, at least")
    sensitivity.add_argument("--later", action="store_true", help="the question comes after the compression")
    sensitivity.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")
    attention = commands.add_parser("map", help="measure what every layer and head looks at, and what it caches")
    attention.set_defaults(run=_map)
    attention.add_argument("checkpoint", type=Path, help="folder as save_pretrained writes it")
    attention.add_argument(
        "--samples",
        type=Path,
        help="folder with samples.jsonl, or easy-vqa: questions of that package (default: CHECKPOINT/samples)",
    )
    attention.add_argument("--out", type=Path, help="the map's file (default: build/NAME.map.safetensors)")
    attention.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")
    attention.add_argument("--seed", type=int, default=0, help="chooses the rows that percentiles are of (default: 0)")
    attention.add_argument("--json", action="store_true", help="print all but what is by channel as JSON")
    arguments = parser.parse_args(argv)
    arguments.run(arguments)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return share


def _sensitivity(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from calibration import samples, sensitivity
    from calibration.prepare import prepare
    from export import checkpoint as checkpoints
    from export import recipe as recipes
    from export.stages.quantize import Float32

    sensitivity.check(arguments.keep, arguments.least)
    recipe = recipes.load(arguments.recipe, arguments.checkpoint)
    chosen = samples.read(arguments.samples or arguments.checkpoint / "samples")[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        # Layers are those of the decoder that the recipe makes: heads merged, positions stretched.
        recipe = dataclasses.replace(recipe, quantize=Float32())
        decoder = prepare(checkpoint, {recipe.name: recipe}, chosen)[recipe.name].decoder
        checkpoint = dataclasses.replace(checkpoint, decoder=decoder)
        task = bar.add_task("samples", total=len(chosen))
        losses = sensitivity.measure(checkpoint, recipe, chosen, arguments.later, progress=lambda: bar.advance(task))
    shares = sensitivity.allocate(losses, sensitivity.RATIOS, arguments.keep, arguments.least)
    print(f"loss, nats an answer, of a layer that keeps a share of its tokens; {len(chosen)} samples")
    print("layer " + "".join(f"{ratio:8.1%}" for ratio in sensitivity.RATIOS))
    for layer, row in enumerate(losses):
        print(f"{layer:5} " + "".join(f"{loss:8.3f}" for loss in row))
    print(f'\n[budget]\nmethod = "measured"\nkeep = {arguments.keep}')
    print(f"shares = [{', '.join(f'{share:.4f}' for share in shares)}]")


def _map(arguments: argparse.Namespace) -> None:
    import json
    import shutil

    from rich.console import Console
    from rich.progress import Progress

    from calibration import samples, survey
    from calibration.map_table import tables
    from export import checkpoint as checkpoints

    checkpoint = checkpoints.load(arguments.checkpoint)
    chosen = samples.read(arguments.samples or arguments.checkpoint / "samples", text_only=True)[: arguments.limit]
    out = arguments.out or Path("build") / f"{arguments.checkpoint.resolve().name}.map.safetensors"
    work = out.with_name(f"{out.name}.work")
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file by --out")
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("samples", total=len(chosen))
            found = survey.measure(checkpoint, chosen, work, arguments.seed, progress=lambda: bar.advance(task))
    except KeyboardInterrupt:
        raise UserError(f"interrupted: the same command goes on from what is in {work}") from None
    found.save(out)
    shutil.rmtree(work)
    print(json.dumps(found.plain()) if arguments.json else "\n".join(tables(found)))
    for warning in found.facts.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote {out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
