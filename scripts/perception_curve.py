"""Adaptive perception against fixed: the demo VLM's held-out suites with the same number of visual tokens in the mean.

    python scripts/perception_curve.py
    python scripts/perception_curve.py --suites page1 --stage 'method = "attention", layers = [4, 5]' --thresholds 0.9

A threshold gives every image the smallest of the buckets (of the stage, if it has its own) that reaches this coverage,
a quota shares so many of their tokens out among the images of a prompt; beside each stands what a fixed `keep` of the
same mean answers. Perception alone: nothing of the cache is dropped or quantized, and the question is in the prompt.
Which tokens stay is decided by the recipe's stage, how many by the runtime's own code (engines/visual_counts.py);
nothing is exported.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import dataclasses
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from accuracy_curve import BATCH, Evaluator, recipe_of
from calibration.evaluate import Eager, Prompt
from calibration.perceive import Perceive
from curve import DEMO, MAX_NEW_TOKENS, NOTHING, numbers
from demo_vlm import suites as held_out
from engines.config import parse
from engines.errors import Parser, command, positive
from engines.visual_counts import visual_counts
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.perception.adaptive import coverage, entropy
from export.stages.tokens import VISUAL
from reporting import binomial_error, choice, markdown

SUITES, THRESHOLDS, QUOTAS = "easy1,page1,mixed4,easy8,mixed8", "0.8,0.9,0.95", "0.25,0.5"  # by default
BUCKETS = [0.25, 0.5, 0.75]


@dataclass(frozen=True)
class Run:
    """One suite by one recipe.

    Attributes:
        tokens: visual tokens of an image, in the mean.
        right: of every question, whether it was answered.
    """

    tokens: float
    right: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


class Pruner:
    """Leaves of a prompt's visual tokens those that a recipe keeps."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe):
        self.perceive, self.longest = Perceive(checkpoint, recipe), checkpoint.max_positions()
        self.adaptive = recipe.adaptive(checkpoint.image_tokens)

    def __call__(self, prompt: Prompt) -> tuple[Prompt, list[int]]:
        """The pruned prompt, and how many tokens each image kept."""
        visual = prompt.kinds == VISUAL
        features, chosen = self.perceive.order(prompt)
        counts, text = [chosen.shape[1]] * len(chosen), int((~visual).sum())
        if self.adaptive:
            curves, entropies = list(coverage(features, chosen).numpy()), entropy(features).tolist()
            room = self.longest - text
            adaptive, tokens = [self.adaptive] * len(curves), [features.shape[1]] * len(curves)
            counts = visual_counts(adaptive, tokens, curves, entropies, text=text, room=room)
        kept = torch.zeros(features.shape[:2], dtype=torch.bool)
        for mine, order, count in zip(kept, chosen, counts, strict=True):
            mine[order[:count]] = True
        rows = (~visual).masked_scatter(visual, kept)
        return Prompt(**{f.name: getattr(prompt, f.name)[rows] for f in dataclasses.fields(Prompt)}), counts


def run(evaluator: Evaluator, suite: str, perception: dict[str, Any]) -> Run:
    """Ask every question of a suite."""
    checkpoint, items = evaluator.checkpoint, evaluator.suites[suite]
    pruner = Pruner(checkpoint, parse(Recipe, {"name": "recipe", "perception": perception}, "recipe"))
    with torch.no_grad():
        prompts, counts = zip(*map(pruner, evaluator.prompts[suite]), strict=True)
    longest, batch = max(map(len, prompts)), min(BATCH, len(items))
    eager = Eager(checkpoint.decoder, recipe_of(NOTHING, longest, longest), longest, batch)
    right: list[bool] = []
    for start in range(0, len(items), batch):
        part = slice(start, start + batch)
        answers = eager.generate(prompts[part], checkpoint.embedding, MAX_NEW_TOKENS, evaluator.ends)
        right += [evaluator.says(*pair) for pair in zip(answers, items[part], strict=True)]
    kept = [count for of_prompt in counts for count in of_prompt]
    return Run(sum(kept) / len(kept), right)


def rows(
    evaluator: Evaluator, stage: dict[str, Any], thresholds: Sequence[float], quotas: Sequence[float]
) -> Iterator[list[str]]:
    """Lines of the table, without its header."""
    adaptive = [(f"coverage {t}", {"buckets": stage.get("buckets", BUCKETS), "coverage": t}) for t in thresholds]
    adaptive += [(f"quota {q}", {"quota": q, "buckets": []}) for q in quotas]
    with tqdm(total=len(evaluator.suites) * (1 + len(adaptive)), disable=not sys.stderr.isatty()) as bar:
        for suite in evaluator.suites:
            all_tokens = run(evaluator, suite, {})
            bar.update()
            yield [suite, "all tokens", f"{all_tokens.tokens:.1f}", _percent(all_tokens), "", ""]
            for name, knobs in adaptive:
                one = run(evaluator, suite, {**stage, **knobs})
                share = one.tokens / evaluator.checkpoint.image_tokens
                fixed = run(evaluator, suite, {**stage, "keep": share, "buckets": []})
                bar.update()
                change = 100 * torch.tensor([a - b for a, b in zip(one.right, fixed.right, strict=True)]).float()
                error = change.std(correction=0) / len(change) ** 0.5
                difference = f"{change.mean():+.1f} ± {error:.1f}"
                yield [suite, name, f"{one.tokens:.1f}", _percent(one), _percent(fixed), difference]


def _percent(of: Run) -> str:
    return f"{100 * of.accuracy:.1f} ± {100 * binomial_error(of.accuracy, len(of.right)):.1f}"


def _table(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(f"stage = {{{text}}}")["stage"]
    except tomllib.TOMLDecodeError as error:
        raise argparse.ArgumentTypeError(f"give settings of the perception stage, got {text!r}: {error}") from None


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEMO, help="default: the demo VLM's")
    parser.add_argument("--suites", default=SUITES, help="comma-separated; default: %(default)s")
    parser.add_argument("--stage", type=_table, default='method = "diversity"', help="TOML; default: %(default)s")
    parser.add_argument("--thresholds", type=numbers, default=THRESHOLDS, help="of coverage; default: %(default)s")
    parser.add_argument("--quotas", type=numbers, default=QUOTAS, help="of an image's tokens; default: %(default)s")
    parser.add_argument("--limit", type=positive, default=100, metavar="N", help="questions a suite; default: 100")
    arguments = parser.parse_args(argv)
    names = choice(arguments.suites, held_out.NAMES, "suite")
    started = time.perf_counter()
    evaluator = Evaluator(checkpoints.load(arguments.checkpoint), held_out.suites(names, arguments.limit))
    header = ["suite", "adaptive", "tokens an image", "exact %", "fixed, as many tokens", "change, points"]
    table = [header, *rows(evaluator, arguments.stage, arguments.thresholds, arguments.quotas)]
    print("\n".join(markdown(table)))
    print(f"\n{arguments.stage}, {arguments.limit} questions a suite. ±: one standard error; of the change, paired.")
    print(f"{time.perf_counter() - started:.0f} s, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    sys.exit(main())
