"""`plan`: what of a model fits a device."""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.commands.options import Commands, size
from calibration.devices import devices, find
from engines.errors import UserError, positive

PLANNED = ("off", "balanced", "extreme", "chat")  # the levels that export/build.py builds by default


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="what fits a device: weights, KV bytes, tokens, images and turns, predicted times, by recipe",
        description="What of a model fits a device, and how fast it can be at best. Needs the checkpoint's config.json "
        "and its processor's files; weights are neither read nor needed. Times are lower bounds (roofline).",
        epilog="example:  python -m calibration plan --device h200 --model models/demo-vlm",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--device", required=True, metavar="NAME|FILE.toml", help=f"{', '.join(devices())}, or a file like devices.toml"
    )
    parser.add_argument("--model", required=True, type=Path, metavar="CHECKPOINT", help="its folder")
    parser.add_argument("--images", type=positive, default=1, metavar="N", help="in the prompt (default: 1)")
    parser.add_argument("--text", type=positive, default=24, metavar="T", help="tokens of a question (default: 24)")
    parser.add_argument("--turns", type=positive, default=1, metavar="K", help="of the chat, all about the images")
    parser.add_argument("--answer", type=positive, default=64, metavar="A", help="tokens of an answer (default: 64)")
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="NAME|FILE",
        help=f"repeat it for several (default: {', '.join(PLANNED)} and those of CHECKPOINT/recipes)",
    )
    parser.add_argument(
        "--weights",
        choices=("fp32", "fp16", "int8", "int4"),
        default="fp16",
        help="as the device would hold them, all linear layers alike (default: fp16); with int8 and int4 a build has "
        "the embedding table and the head in 8 bits and the vision encoder in fp32",
    )
    parser.add_argument(
        "--reserve",
        type=size,
        default=2.0,
        metavar="GIB",
        help="memory of system, libraries, activations (default: 2)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(arguments: argparse.Namespace) -> None:
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
