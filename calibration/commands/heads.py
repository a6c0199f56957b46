"""`heads`: KV heads that can become one, and what a layer's output loses by it."""

from __future__ import annotations

import argparse

from calibration.commands.options import Commands, add_checkpoint, as_json, progress_bar, share
from engines.errors import positive


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "heads",
        help="predict what merging KV heads costs, and choose those to merge",
        description="Merges the KV heads of each layer step by step, the most alike first, and predicts how far the "
        "layer's attention output moves. A [heads] to paste into a recipe merges as many as the limit allows.",
        epilog="example:  python -m calibration heads models/demo-vlm --align --limit-error 0.05",
    )
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument("--align", action="store_true", help="turn heads onto each other before they are averaged")
    parser.add_argument("--most", type=positive, default=4, metavar="N", help="heads that become one (default: 4)")
    parser.add_argument(
        "--limit-error",
        type=share,
        default=0.01,
        metavar="X",
        help="of a layer's attention output, squared error over squared size (default: 0.01)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="measure on the first N samples only")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every step, not the table")


def run(arguments: argparse.Namespace) -> None:
    import dataclasses

    from calibration import samples
    from calibration.heads import choose, head_moments, predict
    from engines.config import parse
    from export import checkpoint as checkpoints
    from export.stages.heads import Heads

    table = {"merge": True, "most": arguments.most, "align": arguments.align}
    heads = parse(Heads, table, "--most")
    chosen = samples.of(arguments.checkpoint, arguments.samples)[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    with progress_bar() as bar:
        task = bar.add_task("comparing KV heads", total=2 * len(chosen))
        moments = head_moments(checkpoint, chosen, lambda: bar.advance(task))
        layers = predict(checkpoint, chosen, heads, moments, lambda: bar.advance(task))
    picked = [choose(steps, arguments.limit_error) for steps in layers]
    thresholds = [threshold for _, threshold in picked]
    token = 2 * 2 * checkpoint.decoder.head_dim  # bytes of a head's key and value in fp16
    before, left = (
        sum(len(step.groups) for step in steps) for steps in ([s[0] for s in layers], [p for p, _ in picked])
    )
    if arguments.json:
        told = [[dataclasses.asdict(step) for step in steps] for steps in layers]
        saved = {"fp16_bytes_per_token": before * token, "merged_bytes_per_token": left * token}
        print(as_json({"samples": len(chosen), "layers": told, "thresholds": thresholds, **saved}))
        return
    print(f"error of a layer's attention output where KV heads are one, each layer by itself; {len(chosen)} samples")
    print("layer  cosine  error     KV saved  heads that are one")
    for layer, (steps, (best, _)) in enumerate(zip(layers, picked, strict=True)):
        for step in steps[1 : steps.index(best) + 2]:
            ones = "  ".join("+".join(map(str, group)) for group in step.groups if len(group) > 1)
            mark, gone = "*" if step is best else " ", 1 - len(step.groups) / len(steps[0].groups)
            print(f"{layer:5} {step.similarity:7.3f}  {step.error:.1e}{mark} {gone:8.1%}  {ones}")
    print(f"* the fewest heads with an error of at most {arguments.limit_error:g}; the line after it is the next step")
    print(f"{left} of {before} KV heads are left: {left * token:,} of {before * token:,} bytes a token in fp16")
    if left == before:
        print("nothing is gained by merging within this limit: leave [heads] out of the recipe")
        return
    lines = [f"most = {arguments.most}"] * (arguments.most != Heads.most) + ["align = true"] * arguments.align
    lines.append(f"thresholds = [{', '.join(f'{threshold:g}' for threshold in thresholds)}]")
    print("\n" + "\n".join(["[heads]", "merge = true", *lines]))
