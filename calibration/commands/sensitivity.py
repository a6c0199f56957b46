"""`sensitivity`: what each layer needs, and the slots shared out by it."""

from __future__ import annotations

import argparse
import dataclasses

from calibration.commands.options import Commands, add_checkpoint, progress_bar, share
from engines.errors import positive


def add(commands: Commands) -> None:
    parser = commands.add_parser("sensitivity", help="measure what each layer needs, and share out the slots by it")
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument("--recipe", default="balanced", help="its stages choose the tokens (default: balanced)")
    parser.add_argument("--keep", type=share, default=0.1, help="mean share of the tokens (default: 0.1)")
    parser.add_argument("--least", type=share, default=0.0, help="share of every layer, at least")
    parser.add_argument("--later", action="store_true", help="the question comes after the compression")
    parser.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")


def run(arguments: argparse.Namespace) -> None:
    from calibration import samples, sensitivity
    from calibration.prepare import prepare
    from export import checkpoint as checkpoints
    from export import recipe as recipes
    from export.stages.quantize import Float32

    sensitivity.check(arguments.keep, arguments.least)
    recipe = recipes.load(arguments.recipe, arguments.checkpoint)
    chosen = samples.of(arguments.checkpoint, arguments.samples)[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    with progress_bar() as bar:
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
