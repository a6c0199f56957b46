"""The guard: a recipe beside the uncompressed model on samples that it was not calibrated on, and a verdict.

Both models read the same answers token by token (teacher-forced), then answer greedily, then read the answers again
behind other images. What is compared: what the last layers look at, what is said of the next token, and the answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibration import failures
from calibration.attention_map import AttentionMap
from calibration.entropy import with_entropy
from calibration.evaluate import Prompt, prompt_of
from calibration.observed import Observed, Reading
from calibration.perceive import Perceive
from calibration.prepare import prepare
from calibration.ranges import exceeding, measure_ranges, of_map
from calibration.samples import Sample, model_inputs
from calibration.sensitivity import ends
from calibration.survey import check, warnings
from calibration.verdict import few, reasons_against, task_of
from engines.errors import UserError
from engines.guard import Limits, Task, Verdict
from export import recipe as recipes
from export.buckets import bucket_length
from export.checkpoint import Checkpoint
from export.graphs import State
from export.pipeline import Prepared
from export.recipe import Recipe
from export.stages.tokens import TEXT

MOST = 64  # tokens of an answer that a model gives, at most
Progress = Callable[[str], Callable[[], None]]  # takes what is about to be measured; what it gives, once a sample


def size_of(checkpoint: Checkpoint, sample: Sample) -> tuple[int, int]:
    """Images and text tokens of a prompt."""
    ids, images = model_inputs(checkpoint, sample)["input_ids"][0], len(sample.images)
    return images, len(ids) - images * checkpoint.image_tokens


def check_fits(checkpoint: Checkpoint, recipe: Recipe, samples: Sequence[Sample]) -> None:
    """Refuse, before anything is read, a recipe whose bytes leave no room for the samples' prompts.

    Raises:
        UserError: that.
    """
    if recipe.heads.merge:  # how much room there is, is known once heads are merged
        return
    sizes = {size_of(checkpoint, sample) for sample in samples}
    for length in {bucket_length(checkpoint, recipe, max(images, 1), text) for images, text in sizes}:
        _ = State(checkpoint.decoder, recipe, length).capacities


@dataclass(eq=False)
class Reader:
    """A recipe ready to read and to answer, one graph a bucket."""

    checkpoint: Checkpoint
    recipe: Recipe
    prepared: Prepared
    layers: list[int]
    reach: int
    later: bool = False
    buckets: dict[int, Observed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.perceive = Perceive(self.checkpoint, self.recipe, self.later)

    def _on(self, prompt: Prompt) -> tuple[Observed, Prompt]:
        text = int((prompt.kinds == TEXT).sum())
        images = (len(prompt) - text) // max(self.checkpoint.image_tokens, 1)
        length = bucket_length(self.checkpoint, self.recipe, max(images, 1), text)  # nobody builds one for text alone
        if length not in self.buckets:
            decoder, known = self.prepared.decoder, self.prepared.statistics
            sizes = (length, self.layers, self.reach)
            self.buckets[length] = Observed(decoder, self.recipe, *sizes, known, self.later)
        return self.buckets[length], self.perceive(prompt)

    def read(self, prompt: Prompt, answer: Sequence[int]) -> Reading:
        observed, prompt = self._on(prompt)
        return observed.read(prompt, answer, self.checkpoint.embedding, self.checkpoint.sentence_ends)

    def say(self, prompt: Prompt, answer: Sequence[int] = (), reading: Reading | None = None) -> list[int]:
        """The greedy answer; the one that was read, if nothing else was likelier at any of its places."""
        if reading and len(answer) <= MOST and reading.log_probs.argmax(dim=-1).tolist() == [*answer]:
            return [*answer]
        observed, prompt = self._on(prompt)
        c = self.checkpoint
        return observed.generate([prompt], c.embedding, MOST, ends(c), c.sentence_ends)[0]


@dataclass(eq=False)
class Reference:
    """A held-out sample by the uncompressed model.

    Attributes:
        answer: token ids, the one that ends it last.
        other: the prompt with another sample's images; None if there is none that has as many.
        changes: whether the likeliest token at the answer's places is another with these.
        said: its own answer.
    """

    sample: Sample
    prompt: Prompt
    answer: list[int]
    reading: Reading
    said: list[int]
    other: Prompt | None
    changes: NDArray[np.bool_] | None


class Guard:
    """Judges recipes on held-out samples; the uncompressed model reads them once.

    Attributes:
        layers: whose attention is kept.
        whole: the recipe of the uncompressed model, with room for its longest answer.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        calibration: Sequence[Sample],
        held_out: Sequence[Sample],
        layers: int = Limits().layers,
        known: AttentionMap | None = None,
        progress: Progress = lambda what: lambda: None,
    ):
        """
        Args:
            calibration: what recipes are calibrated on.
            held_out: none of them.
            layers: the last so many are kept for comparison; the most that the `[guard]` of any recipe asks for.
            known: whose ranges are the calibrated ones; without, they are those of `calibration`.
            progress: called with the name of every recipe; what it returns is called once a held-out sample.

        Raises:
            UserError: a sample that makes no prompt, or nothing is read from the cache.
        """
        self.checkpoint, self.calibration, self.held_out = checkpoint, list(calibration), list(held_out)
        self.known, self.progress = known, progress
        self._prepared: dict[str, Prepared] = {}  # by the settings that matter to it
        self.layers, done = list(range(checkpoint.decoder.num_layers))[-layers:], progress("uncompressed")
        prompts = [prompt_of(checkpoint, model_inputs(checkpoint, sample)) for sample in held_out]
        answers = [self._answer(sample) for sample in held_out]
        longest, most = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)), checkpoint.max_positions()
        if longest > most:
            raise UserError(f"a held-out sample has {longest} tokens, the model reads {most}: shorten it")
        self.reach = max(map(len, prompts)) + max(MOST, *map(len, answers)) + 1
        whole = recipes.load("off")
        window = max(whole.window.least, self.reach - max(map(len, prompts)))
        whole = dataclasses.replace(whole, window=dataclasses.replace(whole.window, least=window, most=window))
        self.whole = whole
        reader = Reader(checkpoint, whole, Prepared(checkpoint.decoder), self.layers, self.reach)
        self.warnings = self._warnings()
        self.references = []
        for i, (sample, prompt) in enumerate(zip(held_out, prompts, strict=True)):
            answer = answers[i] or reader.say(prompt)
            reading = reader.read(prompt, answer)
            said = reader.say(prompt, answer, reading)
            other = self._with_others_images(i)
            changes = None if other is None else _changes(reading, reader.read(other, answer))
            self.references.append(Reference(sample, prompt, answer, reading, said, other, changes))
            done()
        if not any(reference.reading.attention for reference in self.references):
            raise UserError("no answer has a token that is read from the cache: give samples with answers")

    def _answer(self, sample: Sample) -> list[int]:
        if not sample.answer:
            return []
        ids = self.checkpoint.processor.tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
        return [*ids, ends(self.checkpoint)[0]]

    def _with_others_images(self, index: int) -> Prompt | None:
        """The prompt with the images of the next sample that has as many and other ones."""
        own = self.held_out[index]
        for sample in (*self.held_out[index + 1 :], *self.held_out[:index]):
            if own.images and len(sample.images) == len(own.images) and not {*sample.images} & {*own.images}:
                swapped = dataclasses.replace(own, images=sample.images)
                return prompt_of(self.checkpoint, model_inputs(self.checkpoint, swapped))
        return None

    def _warnings(self) -> list[str]:
        found = warnings(
            len(self.calibration), sum(bool(sample.images) for sample in self.calibration), self.checkpoint
        )
        if self.checkpoint.takes_images and not any(sample.images for sample in self.held_out):
            found.append("no held-out sample has an image: what becomes of images is not guarded")
        if self.known:
            check(self.known, self.checkpoint)
        ranges = of_map(self.known) if self.known else measure_ranges(self.checkpoint, self.calibration)
        return found + exceeding(ranges, measure_ranges(self.checkpoint, self.held_out))

    def judge(self, recipe: Recipe, later: bool = False) -> Verdict:
        """Compare a recipe with the uncompressed model, by the limits in its `[guard]`.

        Args:
            later: whether the question comes after the compression.

        Raises:
            UserError: a prompt or an answer does not fit the recipe.
        """
        name, done = recipe.name, self.progress(recipe.name)
        quantize = recipe.quantize
        key = str((recipe.positions, recipe.heads, quantize.calibrated, quantize.needs_rows))
        if key not in self._prepared:
            self._prepared[key] = prepare(self.checkpoint, {name: recipe}, self.calibration)[name]
        prepared = self._prepared[key]
        recipe = with_entropy(self.checkpoint, {name: recipe}, {name: prepared.decoder}, self.calibration)[name]
        layers = self.layers[-recipe.guard.layers :]
        reader = Reader(self.checkpoint, recipe, prepared, layers, self.reach, later)
        readings, said, changes = [], [], []
        for reference in self.references:
            readings.append(reader.read(reference.prompt, reference.answer))
            said.append(reader.say(reference.prompt, reference.answer, readings[-1]))
            if reference.other is not None:
                changes.append(_changes(readings[-1], reader.read(reference.other, reference.answer)))
            done()
        return self._verdict(reader, readings, said, changes)

    def _verdict(
        self, reader: Reader, readings: list[Reading], said: list[list[int]], changes: list[NDArray[np.bool_]]
    ) -> Verdict:
        recipe, limits, references = reader.recipe, reader.recipe.guard, self.references
        pairs = [(reference.reading, reading) for reference, reading in zip(references, readings, strict=True)]
        apart = [logit_kl(whole.log_probs, compressed.log_probs) for whole, compressed in pairs]
        heads = {layer: self._real_heads(reader.prepared, layer) for layer in reader.layers}
        attention = [_mean_attention_kl(pairs, layer, real) for layer, real in heads.items()]
        likelihoods = [
            [_of_answer(pair[side].log_probs, r.answer) for pair, r in zip(pairs, references, strict=True)]
            for side in (0, 1)
        ]
        perplexity, compressed = (math.exp(-torch.cat(told).mean()) for told in likelihoods)
        tasks = self._tasks(said)
        watched = [reference.changes for reference in references if reference.changes is not None]
        found = [
            failures.blindness(watched, changes, limits.blindness),
            failures.drift([row[1:].tolist() for row in apart], limits.logit_kl, limits.drift),
            failures.loops([reference.said for reference in references], said, limits.loops),
        ]
        verdict = Verdict(
            recipe=recipe.name,
            later=reader.later,
            holds=True,
            reasons=[],
            warnings=[*self.warnings, *few(tasks, limits.task)],
            limits=limits,
            calibrated=len(self.calibration),
            held_out=len(references),
            tokens=sum(map(len, apart)),
            read=sum(len(row) - 1 for row in apart),
            layers=reader.layers,
            attention_kl=attention,
            logit_kl=float(torch.cat(apart).mean()),
            perplexity=perplexity,
            perplexity_compressed=compressed,
            perplexity_change=100 * (compressed / perplexity - 1),
            tasks=tasks,
            failures=found,
        )
        reasons = reasons_against(verdict)
        return dataclasses.replace(verdict, holds=not reasons, reasons=reasons)

    def _real_heads(self, prepared: Prepared, layer: int) -> Tensor | None:
        """Which query heads of a layer whose KV heads were merged are no copies that fill a group up; None: none were.

        A copy's output counts nothing: its columns of o_proj are 0.
        """
        decoder = prepared.decoder
        if decoder.kv_heads[layer] == self.checkpoint.decoder.kv_heads[layer]:
            return None
        modules: list[Any] = [m for m in decoder.language_model.modules() if getattr(m, "layer_idx", None) == layer]
        weight = next(module.o_proj.weight for module in modules if hasattr(module, "o_proj"))
        return weight.unflatten(1, (-1, decoder.head_dim)).abs().sum(dim=(0, 2)) > 0

    def _tasks(self, said: list[list[int]]) -> dict[str, Task]:
        right: dict[str, list[tuple[bool, bool]]] = {}
        for reference, answer in zip(self.references, said, strict=True):
            own = self._text(reference.said)
            wanted = reference.sample.answer.strip().lower() or own
            judged = (own == wanted, self._text(answer) == wanted)
            right.setdefault(reference.sample.task or "all", []).append(judged)
        return {task: task_of(np.array(judged, dtype=float)) for task, judged in sorted(right.items())}

    def _text(self, answer: list[int]) -> str:
        return self.checkpoint.processor.tokenizer.decode(answer, skip_special_tokens=True).strip().lower()

    def first(self, candidates: Iterable[Recipe], later: bool = False) -> list[tuple[Recipe, Verdict]]:
        """Judge recipes in their order, the lightest last, up to the first that holds; none after the last one does."""
        judged: list[tuple[Recipe, Verdict]] = []
        for recipe in candidates:
            judged.append((recipe, self.judge(recipe, later)))
            if judged[-1][1].holds:
                break
        return judged


def attention_kl(whole: Tensor, compressed: Tensor) -> Tensor:
    """KL(compressed || whole) over the last axis, in nats, never below 0.

    In this direction a dropped token counts nothing for itself, since nobody looks at it any more; in the other the
    divergence would be infinite as soon as one is dropped.
    """
    apart = torch.special.xlogy(compressed, compressed) - torch.special.xlogy(compressed, whole.clamp(min=1e-30))
    return apart.sum(dim=-1).clamp(min=0)


def logit_kl(whole: Tensor, compressed: Tensor) -> Tensor:
    """KL(whole || compressed) of log probabilities over the last axis, in nats, never below 0."""
    return (whole.exp() * (whole - compressed)).sum(dim=-1).clamp(min=0)


def _mean_attention_kl(pairs: Sequence[tuple[Reading, Reading]], layer: int, real: Tensor | None) -> list[float]:
    """By head, mean over all tokens that were read; of the heads' mean, where they are other ones in another order.

    Args:
        real: which of the compressed model's heads count, if they are others.
    """
    apart = []
    for whole, compressed in pairs:
        if layer in whole.attention:
            p, q = whole.attention[layer], compressed.attention[layer]
            if real is not None:
                p, q = p.mean(dim=1, keepdim=True), q[:, real].mean(dim=1, keepdim=True)
            apart.append(attention_kl(p, q))
    return torch.cat(apart).mean(dim=0).tolist()


def _of_answer(log_probs: Tensor, answer: Sequence[int]) -> Tensor:
    return log_probs[torch.arange(len(answer)), torch.tensor(answer)].double()


def _changes(with_own: Reading, with_other: Reading) -> NDArray[np.bool_]:
    return (with_own.log_probs.argmax(dim=-1) != with_other.log_probs.argmax(dim=-1)).numpy()
