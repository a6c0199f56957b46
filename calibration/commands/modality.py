"""`modality`: how much text and images repeat themselves, and the slots shared out by it."""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.commands.options import Commands, add_checkpoint, as_json, share
from engines.errors import positive


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "modality",
        help="share out each layer's slots between text and images, by how much each repeats itself",
        description="A [modality] to paste into a recipe, by the densities in an attention map, and what would be "
        "left of the text and the images of a prompt like the samples'.",
        epilog="example:  python -m calibration map models/demo-vlm && python -m calibration modality models/demo-vlm",
    )
    parser.set_defaults(run=run)
    add_checkpoint(parser)
    parser.add_argument("--map", type=Path, help="the attention map (default: build/NAME.map.safetensors)")
    parser.add_argument("--keep", type=share, default=0.3, help="share of the tokens that is kept (default: 0.3)")
    parser.add_argument("--visual-cap", type=share, default=0.8, help="most of an image that is dropped (default: 0.8)")
    parser.add_argument("--text-cap", type=share, default=0.4, help="most of the text that is dropped (default: 0.4)")
    parser.add_argument("--limit", type=positive, metavar="N", help="count the tokens of the first N samples only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(arguments: argparse.Namespace) -> None:

    from calibration import attention_map, modality_budget, samples, survey
    from export import checkpoint as checkpoints

    folder = arguments.checkpoint
    found = attention_map.load(arguments.map or attention_map.default_path(folder))
    checkpoint = checkpoints.load(folder, weights=False)
    survey.check(found, checkpoint)
    budget = modality_budget.measured(found, visual_cap=arguments.visual_cap, text_cap=arguments.text_cap)
    chosen = samples.of(folder, arguments.samples)[: arguments.limit]
    text, visual = modality_budget.tokens(checkpoint, chosen).mean(axis=0).tolist()
    left = modality_budget.kept(budget, visual, text, arguments.keep)
    if arguments.json:
        densities = {"visual_density": budget.visual_density, "text_density": budget.text_density}
        shares = {"text_kept": left[:, 0].tolist(), "visual_kept": left[:, 1].tolist()}
        print(as_json({"keep": arguments.keep, "text": text, "visual": visual, **densities, **shares}))
        return
    print(f"a prompt of {text:.1f} text and {visual:.1f} visual tokens, of which a layer keeps {arguments.keep:.1%}")
    print("layer  density: text  image   kept: text   image")
    known = zip(budget.text_density, budget.visual_density, left, strict=True)
    for layer, (dense_t, dense_v, (of_text, of_visual)) in enumerate(known):
        print(f"{layer:5} {dense_t:14.2f} {dense_v:6.2f} {of_text:12.1%} {of_visual:7.1%}")
    print(f"\n{modality_budget.fragment(budget)}")
