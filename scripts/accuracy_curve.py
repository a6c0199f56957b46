"""Accuracy against dropped tokens: the demo VLM's held-out suites for every importance method at rising drop ratios.

    python scripts/accuracy_curve.py
    python scripts/accuracy_curve.py --suites page4 --methods snapkv,random --ratios 0.9,0.95 --json curve.json

Importance alone: every layer and KV head keeps the same number of the prompt's tokens, in float32; nothing is merged,
pruned or quantized, and what was dropped stays dropped during the answer. The question is in the prompt. Recipes run
in PyTorch without being exported (calibration/evaluate.py); scripts/accuracy.py measures whole levels of a bundle.
With --recipe, a recipe's importance and measured layer budget stand beside them: so many tokens on average of layers.

Prompts of a suite differ by a few tokens: a store has (1 - ratio) x their mean length, rounded down, and they are
padded to the longest. Padding is never kept in place of a token, so a short prompt loses a little less than a long one.

The first token of an answer comes from prefill, which sees the whole prompt: no ratio can change it. What can be lost
is what follows, the second and third digit of a page's number; of easy-VQA's one-word answers only the end.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import dataclasses
import json
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm

import curve
from calibration.evaluate import Eager, Prompt, prompt_of
from calibration.samples import processed
from curve import DEMO, MAX_NEW_TOKENS, NOTHING, QUESTIONS, RATIOS, SUITES, Cell
from demo_vlm import suites as held_out
from demo_vlm.suites import Item
from engines.config import parse
from engines.errors import Parser, UserError, command, positive
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages import importance
from reporting import choice, json_option, new_file, write

METHODS = [typing.get_args(typing.get_type_hints(m)["method"])[0] for m in typing.get_args(importance.Methods)]
SINKS = {"streaming-llm": 4}  # its paper's method is the sinks and the last tokens; the others choose for themselves
BASELINES = ("uniform", "random")
BATCH = 20


def recipe_of(method: str, slots: int, length: int, layers: Recipe | None = None) -> Recipe:
    """Importance by `method` (`NOTHING`: all is kept) and no other stage; the window is left to the answer's tokens.

    Args:
        slots: of a layer, out of `length`.
        layers: whose measured layer budget is taken; without, every layer has `slots`.
    """
    size = MAX_NEW_TOKENS - 1  # the last one is not read again
    shares = {"method": "uniform"} if layers is None else dataclasses.asdict(layers.budget)
    settings = {
        "name": method,
        "importance": {} if method == NOTHING else {"method": method},
        "budget": shares | {"keep": slots / length, "kv_bytes": None},
        "protect": {"sinks": SINKS.get(method, 0), "recent": 0},
        "quantize": {"method": "float32"},
        "window": {"least": size, "most": size, "recent": 0.0, "compact": False, "dtype": "float32"},
    }
    return parse(Recipe, settings, method)


class Evaluator:
    """The suites as prompts of a checkpoint, and how many of them a method answers."""

    def __init__(self, checkpoint: Checkpoint, suites: dict[str, list[Item]], layers: Recipe | None = None):
        """
        Args:
            layers: a recipe with a measured layer budget, of the method `layers.name`.
        """
        self.checkpoint, self.suites, self.layers = checkpoint, suites, layers
        self.prompts = {suite: [self._prompt(item) for item in items] for suite, items in suites.items()}
        ends = checkpoint.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]

    def _prompt(self, item: Item) -> Prompt:
        images = [Image.fromarray(pixels) for pixels in item.images]
        return prompt_of(self.checkpoint, processed(self.checkpoint.processor, item.question, images))

    def cell(self, suite: str, method: str, dropped: float) -> Cell:
        """Ask every question of the suite."""
        items, prompts = self.suites[suite], self.prompts[suite]
        lengths = [len(prompt) for prompt in prompts]
        mean, longest = sum(lengths) / len(lengths), max(lengths)
        slots = longest if method == NOTHING else max(1, int((1 - dropped) * mean))  # as kvpress rounds
        batch = min(BATCH, len(items))
        if self.layers is not None and method == self.layers.name:
            recipe = recipe_of(self.layers.importance.method, slots, longest, self.layers)
        else:
            recipe = recipe_of(method, slots, longest)
        eager = Eager(self.checkpoint.decoder, recipe, longest, batch)
        kept = sum(eager.state.capacities) / self.checkpoint.decoder.num_layers
        texts: list[str] = []
        for start in range(0, len(items), batch):
            part = prompts[start : start + batch]
            answers = eager.generate(part, self.checkpoint.embedding, MAX_NEW_TOKENS, self.ends)
            texts += map(self.text, answers)
        correct, digest = curve.judged(texts, [item.answer for item in items])
        return Cell(suite, method, dropped, kept, mean, len(items), correct, digest)

    def text(self, answer: list[int]) -> str:
        return self.checkpoint.processor.tokenizer.decode(answer, skip_special_tokens=True)

    def says(self, answer: list[int], item: Item) -> bool:
        return curve.judged([self.text(answer)], [item.answer])[0] == 1


def measure(evaluator: Evaluator, methods: Sequence[str], ratios: Sequence[float]) -> Iterator[Cell]:
    """Every suite with nothing dropped, then by every method at every ratio."""
    wanted = [(NOTHING, 0.0), *((method, ratio) for method in methods for ratio in ratios)]
    total = len(wanted) * sum(map(len, evaluator.suites.values()))
    with tqdm(total=total, unit="question", disable=not sys.stderr.isatty()) as bar:
        for suite in evaluator.suites:
            for method, ratio in wanted:
                yield (cell := evaluator.cell(suite, method, ratio))
                bar.update(cell.questions)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEMO, help="default: the demo VLM's")
    parser.add_argument("--suites", default=SUITES, help="comma-separated; default: %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; default: all of importance")
    parser.add_argument("--recipe", help="by name or file: its importance with its measured layer budget, too")
    parser.add_argument("--ratios", type=curve.numbers, default=RATIOS, help="of tokens dropped; default: %(default)s")
    parser.add_argument(
        "--limit", type=positive, default=QUESTIONS, metavar="N", help="questions a suite; default: 100"
    )
    parser.add_argument(
        "--peers", type=Path, metavar="FILE.json", help="figures of kvpress_curve.py, to stand beside ours"
    )
    json_option(parser, "")
    parser.add_argument(
        "--plot", type=new_file("--plot"), metavar="FILE.svg", help="draw them there too; needs matplotlib"
    )
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    if arguments.plot is not None:
        import matplotlib  # noqa: F401  missing: say so before measuring
    names = choice(arguments.suites, held_out.NAMES, "suite")
    methods = choice(arguments.methods, METHODS, "method")
    layers = recipes.load(arguments.recipe, arguments.checkpoint) if arguments.recipe else None
    if layers is not None:
        if layers.budget.method != "measured":
            raise UserError(f"recipe {layers.name} has no measured layer budget")
        methods.append(layers.name)
    started = time.perf_counter()
    evaluator = Evaluator(checkpoints.load(arguments.checkpoint), held_out.suites(names, arguments.limit), layers)
    if arguments.peers is not None:  # refuse a file that does not fit before everything is measured
        whole = [evaluator.cell(suite, NOTHING, 0.0) for suite in names]
        curve.peers(arguments.peers, whole, arguments.checkpoint)
    cells = list(measure(evaluator, methods, arguments.ratios))
    seconds = time.perf_counter() - started
    if arguments.peers is not None:
        cells += curve.peers(arguments.peers, cells, arguments.checkpoint)
    print(curve.table(cells))
    print(f"\n{curve.summary(cells, [METHODS[0], *([layers.name] if layers else []), *BASELINES])}")
    print(f"{sum(cell.questions for cell in cells)} questions, {seconds:.0f} s, {torch.get_num_threads()} threads")
    if arguments.json is not None:
        packages = ("numpy", "torch", "transformers")
        write(arguments.json, json.dumps(curve.report(cells, arguments.checkpoint, seconds, packages), indent=1) + "\n")
    if arguments.plot is not None:
        write(arguments.plot, curve.plot(cells))


if __name__ == "__main__":
    sys.exit(main())
