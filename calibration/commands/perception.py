"""`perception`: how many visual tokens images need, and the knobs by which each keeps as many."""

from __future__ import annotations

import argparse

from calibration.commands.options import Commands, add_checkpoint, as_json, progress_bar, share
from engines.errors import positive

AGREES = 0.3  # rank correlation from which entropy is some guide


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "perception",
        help="choose the thresholds by which an image keeps more or fewer of its visual tokens",
        description="Looks at the samples' images as the runtime's gate does, and finds the knobs by which they keep a "
        "wanted share of their tokens on average: a [perception] to paste into a recipe, and a [gate] if asked.",
        epilog="example:  python -m calibration perception models/demo-vlm --keep 0.5 --by quota",
    )
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument("--recipe", default="balanced", help="its [perception] chooses tokens (default: balanced)")
    parser.add_argument("--keep", type=share, default=0.5, help="share of the visual tokens, mean (default: 0.5)")
    parser.add_argument(
        "--by",
        choices=("coverage", "quota", "gate"),
        default="coverage",
        help="a threshold and buckets; a share for all images of a prompt together; or memory and entropy "
        "(default: coverage)",
    )
    parser.add_argument("--buckets", type=positive, default=8, metavar="N", help="to choose from (default: 8)")
    parser.add_argument("--pressure", type=share, default=0.5, help="memory in use, for a gate (default: 0.5)")
    parser.add_argument("--later", action="store_true", help="the question comes after the compression")
    parser.add_argument("--limit", type=positive, metavar="N", help="look at the first N samples only")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every image, not the table")


def run(arguments: argparse.Namespace) -> None:
    import sys

    import numpy as np

    from calibration import image_budget, samples
    from engines.errors import UserError
    from export import checkpoint as checkpoints
    from export import recipe as recipes

    recipe = recipes.load(arguments.recipe, arguments.checkpoint)
    chosen = samples.of(arguments.checkpoint, arguments.samples)[: arguments.limit]
    checkpoint = checkpoints.load(arguments.checkpoint)
    with progress_bar() as bar:
        task = bar.add_task("samples", total=len(chosen))
        prompts = image_budget.look(checkpoint, recipe, chosen, arguments.later, lambda: bar.advance(task))
    images = [image for prompt in prompts for image in prompt]
    if not images:
        raise UserError("no sample has an image: give others by --samples, or a higher --limit")
    tokens, stage, gate = checkpoint.image_tokens, recipe.perception, None
    if arguments.by == "coverage":
        stage = image_budget.by_coverage(images, stage, arguments.keep, arguments.buckets)
    elif arguments.by == "quota":
        stage = image_budget.by_quota(images, stage, arguments.keep)
    else:
        stage, gate = image_budget.by_gate(images, stage, arguments.keep, arguments.buckets, arguments.pressure)
    kept = image_budget.kept(prompts, stage, gate, arguments.pressure)
    mean = float(np.mean([count for counts in kept for count in counts]))
    if mean > arguments.keep * tokens + 0.5:
        why = "a gate drops no more at this pressure" if gate else "images keep their floor"
        print(f"warning: {mean:.1f} tokens an image stay, more than {arguments.keep:.1%}: {why}", file=sys.stderr)
    agreement = image_budget.agreement(images, stage.coverage) if gate else None
    if agreement is not None and not agreement >= AGREES:
        print(
            f"warning: entropy and what an image needs rank alike by {agreement:.2f} only, of 1: a gate cannot tell "
            "these images apart, --by coverage can",
            file=sys.stderr,
        )
    fragment = image_budget.fragment(stage, gate)
    figures = [
        (sample.task, path.name, image.entropy, float(image.curve[count - 1]), count)
        for sample, prompt, counts in zip(chosen, prompts, kept, strict=True)
        for path, image, count in zip(sample.images, prompt, counts, strict=True)
    ]
    if arguments.json:
        rows = [dict(zip(("task", "image", "entropy", "coverage", "tokens"), row, strict=True)) for row in figures]
        print(as_json({"images": rows, "mean": mean, "agreement": agreement, "recipe": fragment}))
        return
    print(f"{len(images)} images of {len(chosen)} samples keep {mean:.1f} of {tokens} tokens on average")
    print("task                  images  entropy  coverage  tokens: mean   fewest   most")
    for name in sorted({sample.task for sample in chosen}):
        known = np.array([row[2:] for row in figures if row[0] == name]).reshape(-1, 3)
        if len(known):
            (entropy, covered, count), fewest, most = known.mean(axis=0), known[:, 2].min(), known[:, 2].max()
            told = f"{entropy:8.3f} {covered:9.3f} {count:13.1f} {fewest:8.0f} {most:6.0f}"
            print(f"{name[:20] or '(none)':20} {len(known):7} {told}")
    if ratios := [max(counts) / min(counts) for counts in kept if len(counts) > 1 and arguments.by == "quota"]:
        print(f"of the images of a prompt one gets {np.mean(ratios):.1f} times the tokens of another, on average")
    print(f"\n{fragment}")
