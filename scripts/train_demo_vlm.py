"""Train the demo vision-language model from scratch on one CPU thread, score it, and write a Hugging Face checkpoint.

    python scripts/train_demo_vlm.py --out models/demo-vlm          train, score, write
    python scripts/train_demo_vlm.py --score models/demo-vlm        print the held-out figures of a checkpoint
    python scripts/train_demo_vlm.py --samples models/demo-vlm/samples    write the calibration prompts again

Needs torch, transformers and easy-vqa (whose wheel ships the training images). The steps, the seed and the sizes are
written in scripts/demo_vlm/curriculum.py; no schedule reads a clock. The run keeps its state in OUT.partial every
50 steps: after an interruption the same command goes on from there and ends with the same weights.
"""

import installed  # noqa: F401

# isort: split

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from demo_vlm.curriculum import PLAN
from demo_vlm.evaluate import Score, duplicates, evaluate, generate_agrees, table
from demo_vlm.model import build_model
from demo_vlm.samples import write_samples
from demo_vlm.saving import replace_files, save_checkpoint
from demo_vlm.training import train
from engines.bundle import check_outside
from engines.errors import Parser, UserError, command


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="train, and write the checkpoint into this folder")
    what.add_argument("--score", type=Path, metavar="CHECKPOINT", help="only score this checkpoint folder")
    what.add_argument("--samples", type=Path, metavar="FOLDER", help="only write the calibration prompts here")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training data (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1; figures are from 1)")
    return parser.parse_args()


def score(folder: Path) -> list[Score]:
    """Print the held-out figures of a checkpoint."""
    same, asked = generate_agrees(folder)
    print(f"packed scoring agrees with generate() on {same} of {asked} prompts")
    if same != asked:
        raise UserError(f"{folder}: packed scoring differs from generate(), its figures would mean nothing")
    found = duplicates()
    print(f"easy-VQA test images equal to a training image: {found.plain} of {found.images}, mirrored {found.mirrored}")
    scores = evaluate(folder)
    print(table(scores))
    return scores


def prepare(partial: Path, seed: int) -> None:
    """Open the folder that holds an unfinished run; refuse one that another plan or seed left."""
    partial.mkdir(parents=True, exist_ok=True)
    identity = json.dumps({"seed": seed, "plan": asdict(PLAN)}, sort_keys=True)
    note = partial / "run.json"
    if note.is_file() and note.read_text(encoding="utf-8") != identity:
        raise UserError(f"{partial} holds an unfinished run with another seed or plan: remove it, then start again")
    note.write_text(identity, encoding="utf-8")


@command
def main() -> None:
    """Train, score or write samples."""
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.samples:
        print(f"{write_samples(args.samples)} prompts in {args.samples}")
        return
    if args.score:
        score(args.score)
        return
    check_outside(args.out)
    partial = args.out.with_name(args.out.name + ".partial")
    prepare(partial, args.seed)
    model = build_model(args.seed)
    train(model, args.seed, PLAN, tqdm.write, partial)
    finished = partial / "checkpoint"
    save_checkpoint(model, finished)
    scores = score(finished)
    figures = {"seed": args.seed, "scores": [asdict(s) for s in scores]}
    (finished / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    replace_files(finished, args.out)
    shutil.rmtree(partial)
    print(f"checkpoint in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
