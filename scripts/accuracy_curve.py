"""Accuracy against dropped tokens: the demo VLM's held-out suites for every importance method at rising drop ratios.

    python scripts/accuracy_curve.py
    python scripts/accuracy_curve.py --suites page4 --methods snapkv,random --ratios 0.9,0.95 --json curve.json

Importance alone: every layer and KV head keeps the same number of the prompt's tokens, in float32; nothing is merged,
pruned or quantized, and what was dropped stays dropped during the answer. The question is in the prompt. Recipes run
in PyTorch without being exported (calibration/evaluate.py); scripts/accuracy.py measures whole levels of a bundle.

Prompts of a suite differ by a few tokens: a store has (1 - ratio) x their mean length, rounded, and they are padded to
the longest. Padding is never kept in place of a token, so a short prompt loses a little less than a long one.

The first token of an answer comes from prefill, which sees the whole prompt: no ratio can change it. What can be lost
is what follows, the second and third digit of a page's number; of easy-VQA's one-word answers only the end.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import io
import json
import platform
import shlex
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from calibration.evaluate import Eager, Prompt, prompt_of
from calibration.samples import processed
from demo_vlm import suites as held_out
from demo_vlm.suites import Item
from engines.bundle import sha256
from engines.config import parse
from engines.errors import Parser, command, positive
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages import importance
from reporting import binomial_error, check_folder, choice, markdown, write

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-vlm"
METHODS = [typing.get_args(typing.get_type_hints(m)["method"])[0] for m in typing.get_args(importance.Methods)]
SUITES, RATIOS = "page1,page4,easy1,easy4", "0.25,0.5,0.75,0.9"  # by default
SINKS = {"streaming-llm": 4}  # its paper's method is the sinks and the last tokens; the others choose for themselves
NOTHING = "none"  # in place of a method where nothing is dropped
MAX_NEW_TOKENS = 8  # the longest answer has three
BATCH = 20


@dataclass(frozen=True)
class Cell:
    """One suite by one method at one ratio.

    Attributes:
        dropped: ratio that was asked for.
        slots: tokens that a layer's store keeps, of `tokens` in the suite's mean prompt.
    """

    suite: str
    method: str
    dropped: float
    slots: int
    tokens: float
    questions: int
    correct: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions

    @property
    def standard_error(self) -> float:
        return binomial_error(self.accuracy, self.questions)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"accuracy": self.accuracy, "standard_error": self.standard_error}


def recipe_of(method: str, slots: int, length: int) -> Recipe:
    """Importance by `method` (`NOTHING`: all is kept) and no other stage; the window is left to the answer's tokens."""
    size = MAX_NEW_TOKENS - 1  # the last one is not read again
    settings = {
        "name": method,
        "importance": {} if method == NOTHING else {"method": method},
        "budget": {"method": "uniform", "keep": slots / length},
        "protect": {"sinks": SINKS.get(method, 0), "recent": 0},
        "quantize": {"method": "float32"},
        "window": {"least": size, "most": size, "recent": 0.0, "compact": False, "dtype": "float32"},
    }
    return parse(Recipe, settings, method)


class Evaluator:
    """The suites as prompts of a checkpoint, and how many of them a method answers."""

    def __init__(self, checkpoint: Checkpoint, suites: dict[str, list[Item]]):
        self.checkpoint, self.suites = checkpoint, suites
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
        slots = longest if method == NOTHING else max(1, round((1 - dropped) * mean))
        batch = min(BATCH, len(items))
        eager = Eager(self.checkpoint.decoder, recipe_of(method, slots, longest), longest, batch)
        assert eager.state.capacities == [slots] * self.checkpoint.decoder.num_layers
        correct = 0
        for start in range(0, len(items), batch):
            part = slice(start, start + batch)
            answers = eager.generate(prompts[part], self.checkpoint.embedding, MAX_NEW_TOKENS, self.ends)
            correct += sum(self.says(*pair) for pair in zip(answers, items[part], strict=True))
        return Cell(suite, method, dropped, slots, mean, len(items), correct)

    def says(self, answer: list[int], item: Item) -> bool:
        text = self.checkpoint.processor.tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip().lower() == item.answer.strip().lower()


def measure(evaluator: Evaluator, methods: Sequence[str], ratios: Sequence[float]) -> Iterator[Cell]:
    """Every suite with nothing dropped, then by every method at every ratio."""
    wanted = [(NOTHING, 0.0), *((method, ratio) for method in methods for ratio in ratios)]
    total = len(wanted) * sum(map(len, evaluator.suites.values()))
    with tqdm(total=total, unit="question", disable=not sys.stderr.isatty()) as bar:
        for suite in evaluator.suites:
            for method, ratio in wanted:
                yield (cell := evaluator.cell(suite, method, ratio))
                bar.update(cell.questions)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: exact match in per cent, a line a method, a column a suite and ratio."""
    found = {(cell.suite, cell.method, cell.dropped): cell for cell in cells}
    suites, methods, ratios = (list(dict.fromkeys(values)) for values in zip(*found, strict=True))
    rows = [["suite", "method", *(f"{ratio:.0%} dropped" for ratio in ratios)]]
    for suite in suites:
        for method in methods:
            mine = (found.get((suite, method, ratio)) for ratio in ratios)
            texts = ["" if c is None else f"{100 * c.accuracy:.1f} ± {100 * c.standard_error:.1f}" for c in mine]
            rows.append([suite, method, *texts])
    return "\n".join([*markdown(rows), "", "Exact match, %. ±: one standard error."])


def report(cells: Sequence[Cell], checkpoint: Path, seconds: float) -> dict[str, Any]:
    """The cells with all that is needed to measure them again."""
    return {
        "command": shlex.join(["python", "scripts/accuracy_curve.py", *sys.argv[1:]]),
        "checkpoint_sha256": {file.name: sha256(file) for file in sorted(checkpoint.glob("*.safetensors"))},
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("numpy", "torch", "transformers")},
        "machine": platform.machine(),
        "suites_sha256": {name: held_out.fingerprint(name) for name in dict.fromkeys(cell.suite for cell in cells)},
        "seconds": round(seconds, 1),
        "cells": [cell.as_json() for cell in cells],
    }


def plot(cells: Sequence[Cell]) -> str:
    """An SVG with one panel a suite and one line a method, in the order of the cells: from nothing dropped on."""
    import matplotlib
    from matplotlib.figure import Figure

    suites = list(dict.fromkeys(cell.suite for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells if cell.method != NOTHING))
    figure = Figure(figsize=(4 * len(suites) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(suites), sharey=True, squeeze=False)[0]
    for suite, panel in zip(suites, panels, strict=True):
        for number, method in enumerate(methods):
            line = [cell for cell in cells if cell.suite == suite and cell.method in (NOTHING, method)]
            style = {
                "marker": "osD^vPX*<>hp"[number % 12],
                "linestyle": "--" if number > 9 or method == "random" else "-",
            }
            x, y = [100 * c.dropped for c in line], [100 * c.accuracy for c in line]
            panel.plot(x, y, label=method, color=f"C{number % 10}", markersize=4, **style)
        panel.set(title=suite, xlabel="tokens dropped, %", ylim=(-3, 103))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("exact match, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    with io.StringIO() as out, matplotlib.rc_context({"svg.hashsalt": "unicache"}):  # the same bytes every time
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def numbers(text: str) -> list[float]:
    try:
        ratios = sorted({float(part) for part in text.split(",") if part})
    except ValueError:
        ratios = []
    if not ratios or not all(0 < ratio < 1 for ratio in ratios):
        raise argparse.ArgumentTypeError(f"give numbers between 0 and 1, got {text!r}")
    return ratios


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEMO, help="default: the demo VLM's")
    parser.add_argument("--suites", default=SUITES, help="comma-separated; default: %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; default: all of importance")
    parser.add_argument("--ratios", type=numbers, default=RATIOS, help="of tokens dropped; default: %(default)s")
    parser.add_argument("--limit", type=positive, default=100, metavar="N", help="questions a suite; default: 100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw them there too; needs matplotlib")
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    check_folder(arguments.json, "--json")
    check_folder(arguments.plot, "--plot")
    if arguments.plot is not None:
        import matplotlib  # noqa: F401  missing: say so before measuring
    names = choice(arguments.suites, held_out.NAMES, "suite")
    methods = choice(arguments.methods, METHODS, "method")
    started = time.perf_counter()
    evaluator = Evaluator(checkpoints.load(arguments.checkpoint), held_out.suites(names, arguments.limit))
    cells = list(measure(evaluator, methods, arguments.ratios))
    seconds = time.perf_counter() - started
    print(table(cells))
    print(f"{sum(cell.questions for cell in cells)} questions, {seconds:.0f} s, {torch.get_num_threads()} threads")
    if arguments.json is not None:
        write(arguments.json, json.dumps(report(cells, arguments.checkpoint, seconds), indent=1) + "\n")
    if arguments.plot is not None:
        write(arguments.plot, plot(cells))


if __name__ == "__main__":
    sys.exit(main())
