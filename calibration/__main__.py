"""python -m calibration COMMAND: what layers look at, the tokens and bits they need, what a recipe costs, what fits."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.devices import devices, find
from engines.errors import Parser, UserError, command, positive

if TYPE_CHECKING:
    from rich.progress import Progress

PLANNED = ("off", "balanced", "extreme", "chat")  # the levels that export/build.py builds by default


def _number(fits: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """The `type` of an option that takes a number."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be a number {what}, got {text!r}")
        return value

    return number


_share = _number(lambda share: 0 <= share <= 1, "from 0 to 1")
_nats = _number(lambda nats: 0 < nats < 1e6, "above 0")
_size = _number(lambda size: 0 <= size < 2**20, "of GiB from 0")


@command
def main(argv: Sequence[str] | None = None) -> int | None:
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
    precision = commands.add_parser("precision", help="measure what each layer loses in few bits, and choose by it")
    precision.set_defaults(run=_precision)
    precision.add_argument("checkpoint", type=Path, help="folder as save_pretrained writes it")
    precision.add_argument("--samples", type=Path, help="folder with samples.jsonl (default: CHECKPOINT/samples)")
    precision.add_argument(
        "--recipe", default="balanced", help="its [quantize] sets the methods' common knobs (default: balanced)"
    )
    precision.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="to choose from, the narrowest first (default: int4 k8v4 int8 float16)",
    )
    precision.add_argument(
        "--limit-kl",
        type=_nats,
        default=0.001,
        metavar="X",
        help="what all layers may lose, nats a token of an answer, each an equal share (default: 0.001)",
    )
    precision.add_argument("--later", action="store_true", help="the question comes after the compression")
    precision.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")
    precision.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
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

    plan = commands.add_parser(
        "plan",
        help="what fits a device: weights, KV bytes, tokens, images and turns, predicted times, by recipe",
        description="What of a model fits a device, and how fast it can be at best. Needs the checkpoint's config.json "
        "and its processor's files; weights are neither read nor needed. Times are lower bounds (roofline).",
        epilog="example:  python -m calibration plan --device h200 --model models/demo-vlm",
    )
    plan.set_defaults(run=_plan)
    plan.add_argument(
        "--device", required=True, metavar="NAME|FILE.toml", help=f"{', '.join(devices())}, or a file like devices.toml"
    )
    plan.add_argument("--model", required=True, type=Path, metavar="CHECKPOINT", help="its folder")
    plan.add_argument("--images", type=positive, default=1, metavar="N", help="in the prompt (default: 1)")
    plan.add_argument("--text", type=positive, default=24, metavar="T", help="tokens of a question (default: 24)")
    plan.add_argument("--turns", type=positive, default=1, metavar="K", help="of the chat, all about the images")
    plan.add_argument("--answer", type=positive, default=64, metavar="A", help="tokens of an answer (default: 64)")
    plan.add_argument(
        "--recipe",
        action="append",
        metavar="NAME|FILE",
        help=f"repeat it for several (default: {', '.join(PLANNED)} and those of CHECKPOINT/recipes)",
    )
    plan.add_argument(
        "--weights",
        choices=("fp32", "fp16", "int8", "int4"),
        default="fp16",
        help="as the device would hold them; a build writes fp32 today (default: fp16)",
    )
    plan.add_argument(
        "--reserve",
        type=_size,
        default=2.0,
        metavar="GIB",
        help="memory of system, libraries, activations (default: 2)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    guard = commands.add_parser(
        "guard",
        help="compare a recipe with the uncompressed model on held-out samples; exits with 1 if it is refused",
        description="A recipe beside the uncompressed model, on samples that it was not calibrated on.",
        epilog="example:  python -m calibration guard models/demo-vlm --recipe balanced --lighten",
    )
    guard.set_defaults(run=_guard)
    guard.add_argument("checkpoint", type=Path, help="folder as save_pretrained writes it")
    guard.add_argument("--recipe", required=True, metavar="NAME|FILE", help="that is judged")
    guard.add_argument(
        "--lighter", action="append", default=[], metavar="NAME|FILE", help="judged next if it is refused; repeat it"
    )
    guard.add_argument(
        "--lighten", action="store_true", help="if it is refused, keep more, then more bits, until it holds"
    )
    guard.add_argument(
        "--samples", help="folder with samples.jsonl, or easy-vqa (default: CHECKPOINT/samples); some are held out"
    )
    guard.add_argument("--held-out", help="the same: other samples, all held out; those of --samples all calibrate")
    guard.add_argument("--share", type=_share, default=0.25, help="of the samples that are held out (default: 0.25)")
    guard.add_argument("--seed", type=int, default=0, help="chooses these (default: 0)")
    guard.add_argument("--limit", type=positive, metavar="N", help="judge by the first N held-out samples only")
    guard.add_argument("--later", action="store_true", help="the question comes after the compression")
    guard.add_argument("--map", type=Path, help="an attention map: its ranges are the calibrated ones")
    guard.add_argument(
        "--limits",
        type=_numbers,
        default={},
        metavar="NAME=NUMBER,...",
        help="what a recipe may cost (default: attention_kl=0.1,layers=3,logit_kl=0.05,perplexity=5,task=5)",
    )
    guard.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _numbers(text: str) -> dict[str, float | int]:
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {name.strip(): float(number) if set(".e") & set(number) else int(number) for name, _, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=NUMBER,..., got {text!r}") from None


def _plan(arguments: argparse.Namespace) -> None:
    import json

    from rich.console import Console

    from calibration import plan_table
    from calibration.plan import Chat, Planner
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    device, folder = find(arguments.device), arguments.model
    own = sorted(path.stem for path in folder.glob("recipes/*.toml"))
    names = arguments.recipe or dict.fromkeys([*PLANNED, *own])
    known = [recipes.load(name, folder) for name in names]
    checkpoint = checkpoints.load(folder, weights=False)
    chat = Chat(arguments.images, arguments.text, arguments.turns, arguments.answer)
    planner = Planner(checkpoint, device, arguments.weights, int(arguments.reserve * 2**30), chat)
    rows, refused = [], {}
    for recipe in known:
        try:
            rows.append(planner.row(recipe))
        except UserError as error:
            refused[recipe.name] = str(error)
    if not rows:
        raise UserError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    if arguments.json:
        print(json.dumps(plan_table.as_json(planner, rows, refused)))
        return
    console = Console(highlight=False)
    console.width = max(console.width, plan_table.WIDTH)
    plan_table.show(console, planner, rows, refused)


def _progress() -> Progress:
    """A bar on a terminal; elsewhere nothing, so that a mistake is one line."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _sensitivity(arguments: argparse.Namespace) -> None:
    from calibration import samples, sensitivity
    from calibration.prepare import prepare
    from export import checkpoint as checkpoints
    from export import recipe as recipes
    from export.stages.quantize import Float32

    sensitivity.check(arguments.keep, arguments.least)
    recipe = recipes.load(arguments.recipe, arguments.checkpoint)
    chosen = samples.read(arguments.samples or arguments.checkpoint / "samples")[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    with _progress() as bar:
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


def _precision(arguments: argparse.Namespace) -> None:
    import json

    from calibration import precision, samples
    from calibration.prepare import prepare
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    recipe = recipes.load(arguments.recipe, arguments.checkpoint)
    tables = precision.tables(recipe, arguments.methods or precision.METHODS)
    methods = [precision.method_of(recipe, table) for table in tables]
    chosen = samples.read(arguments.samples or arguments.checkpoint / "samples")[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    layers = range(checkpoint.decoder.num_layers)
    with _progress() as bar:
        # Layers are those of the decoder that the recipe makes; calibrated is what any of the methods needs.
        every = precision.method_of(recipe, {"method": "by-layer", "layers": tables})
        recipe = dataclasses.replace(recipe, quantize=every)
        found = prepare(checkpoint, {recipe.name: recipe}, chosen)[recipe.name]
        checkpoint = dataclasses.replace(checkpoint, decoder=found.decoder)
        known = found.statistics
        ways = [[precision.through(method, known[layer] if known else None) for method in methods] for layer in layers]
        task = bar.add_task("samples", total=2 * len(chosen))

        def measured(choices: list[dict[int, precision.Through]]):
            return precision.measure(
                checkpoint, recipe, chosen, choices, arguments.later, progress=lambda: bar.advance(task)
            )

        losses = measured([{layer: way} for layer in layers for way in ways[layer]]).reshape(len(layers), -1)
        best = precision.choose(losses, arguments.limit_kl)
        together = measured([{layer: ways[layer][i] for layer, i in enumerate(best)}])[0]
    if arguments.json:
        figures = {"methods": tables, "kl": losses.tolist(), "chosen": best, "kl_together": together}
        print(json.dumps({"samples": len(chosen), "limit_kl": arguments.limit_kl, **figures}))
        return
    share = arguments.limit_kl / len(layers)
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


def _map(arguments: argparse.Namespace) -> None:
    import json
    import shutil

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
        with _progress() as bar:
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


def _guard(arguments: argparse.Namespace) -> int:
    import itertools
    import json

    from calibration import attention_map, guard_table, samples
    from calibration.guard import Guard
    from calibration.lighten import changes, lighter
    from calibration.verdict import Limits
    from engines.config import parse
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    folder = arguments.checkpoint
    limits = parse(Limits, arguments.limits, "--limits")
    recipe, *others = (recipes.load(name, folder) for name in (arguments.recipe, *arguments.lighter))
    given = samples.read(arguments.samples or folder / "samples", text_only=True)
    if arguments.held_out:
        calibration, held_out = given, samples.read(arguments.held_out, text_only=True)
    else:
        calibration, held_out = samples.split(given, arguments.seed, arguments.share)
    held_out = held_out[: arguments.limit]
    known = attention_map.load(arguments.map) if arguments.map else None
    checkpoint = checkpoints.load(folder)
    candidates = itertools.chain([recipe, *others], lighter((others or [recipe])[-1]) if arguments.lighten else [])
    with _progress() as bar:

        def progress(what: str) -> Callable[[], None]:
            return partial(bar.advance, bar.add_task(what, total=len(held_out)))

        tried = Guard(checkpoint, calibration, held_out, limits, known, arguments.later, progress).first(candidates)
    chosen, verdict = tried[-1]
    if arguments.json:
        used = chosen.settings() if verdict.holds else None
        print(json.dumps({"recipe": used, "verdicts": [dataclasses.asdict(judged) for _, judged in tried]}))
    for candidate, judged in tried if not arguments.json else ():
        print("\n".join(guard_table.lines(judged)))
        if candidate not in (recipe, *others):
            print("it says: " + ", ".join(f"{key} = {value}" for key, value in changes(candidate, recipe).items()))
        print()
    for warning in verdict.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
