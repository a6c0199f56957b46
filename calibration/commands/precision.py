"""`precision`: what each layer loses in few bits, and the bits chosen by it."""

from __future__ import annotations

import argparse

from calibration.commands.options import Commands, add_checkpoint, as_json, nats, progress_bar
from engines.errors import positive


def add(commands: Commands) -> None:
    parser = commands.add_parser("precision", help="measure what each layer loses in few bits, and choose by it")
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument(
        "--recipe", default="balanced", help="its [quantize] sets the methods' common knobs (default: balanced)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="to choose from, the narrowest first (default: int4 k8v4 int8 float16)",
    )
    parser.add_argument(
        "--limit-kl",
        type=nats,
        default=0.001,
        metavar="X",
        help="what all layers may lose, nats a token of an answer, each an equal share (default: 0.001)",
    )
    parser.add_argument("--later", action="store_true", help="the question comes after the compression")
    parser.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(arguments: argparse.Namespace) -> None:
    from calibration import precision, samples
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    recipe = recipes.load(arguments.recipe, arguments.checkpoint)
    tables = precision.tables(recipe, arguments.methods or precision.METHODS)
    chosen = samples.of(arguments.checkpoint, arguments.samples)[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    with progress_bar() as bar:
        task = bar.add_task("samples", total=2 * len(chosen))
        limit, later = arguments.limit_kl, arguments.later
        found = precision.find(checkpoint, recipe, chosen, tables, limit, later, lambda: bar.advance(task))
    losses, best, together = found.losses, found.chosen, found.together
    if arguments.json:
        figures = {"methods": tables, "kl": losses.tolist(), "chosen": best, "kl_together": together}
        print(as_json({"samples": len(chosen), "limit_kl": arguments.limit_kl, **figures}))
        return
    share = arguments.limit_kl / len(losses)
    print(f"KL of the answer's logits, nats a token, where one layer is quantized; {len(chosen)} samples")
    print("layer " + "".join(f"{table['method']:>12}" for table in tables))
    for layer, row in enumerate(losses):
        cells = (f"{loss:11.1e}{'*' if i == best[layer] else ' '}" for i, loss in enumerate(row))
        print(f"{layer:5} {''.join(cells)}".rstrip())
    print(f"* the narrowest of at most {share:.1e}, a layer's share of {arguments.limit_kl:g}")
    above = "" if together <= arguments.limit_kl else ", above the limit: layers are not independent, lower --limit-kl"
    print(f"all layers as chosen: {together:.1e}{above}")
    if unfit := [layer for layer, i in enumerate(best) if losses[layer, i] > share]:
        print(f"layers that lose more by every method: {', '.join(map(str, unfit))}")
    print(f"\n{precision.fragment([tables[i] for i in best])}")
