"""What the search for a recipe works with: measurements of the samples, remembered, and sizes in bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration import modality_budget, precision, sensitivity, survey
from calibration.candidates import THRESHOLDS, Draft, Move, heads
from calibration.guard import Guard, size_of
from calibration.memory import Memory, digest_of
from calibration.prepare import prepare
from calibration.samples import Sample, split
from calibration.survey import FEW, fingerprint
from engines.config import parse
from engines.errors import UserError
from engines.guard import Verdict
from export.buckets import bucket_length
from export.checkpoint import Checkpoint
from export.graphs import Decoder, State
from export.recipe import Recipe
from export.stages.budget import Measured, Uniform
from export.stages.modality import Density
from export.stages.quantize import Float32

CHOOSE, CONFIRM = 0.5, 0.25  # shares of the samples; what one in a hundred loses is seen by hundreds only
MEASURED = 32  # samples, at most, that tell what layers need
NEAR, HALVINGS = 0.1, 8  # how far, and by how many bisections, `kv_bytes` moves for whole slots to meet a target
BITS_KL = 0.001  # nats a token that all layers together may lose by few bits, where each has its own

Progress = Callable[[str, int], Callable[[], None]]  # takes what is measured, and how often its result will be called


class Workbench:
    """A checkpoint and its samples.

    Attributes:
        calibrate, choose, confirm: the parts of the samples: to measure and calibrate on, to choose recipes by, and to
            confirm the choice by.
        memory: what was measured.
        doing: what is being judged, in words.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        base: Recipe,
        samples: Sequence[Sample],
        folder: Path,
        seed: int = 0,
        later: bool = False,
        progress: Progress = lambda what, times: lambda: None,
    ):
        """
        Args:
            base: the recipe that the search begins with.
            folder: where what is measured is kept.
            seed: chooses the parts.
            later: whether the question comes after the compression.

        Raises:
            UserError: too few samples for three parts.
        """
        self.checkpoint, self.base, self.later, self.progress = checkpoint, base, later, progress
        try:
            rest, self.confirm = split(samples, seed, CONFIRM)
            self.calibrate, self.choose = split(rest, seed, CHOOSE / (1 - CONFIRM))
        except UserError as error:
            told = "samples are too few for three parts, with images that no other sample has: give more"
            raise UserError(f"{len(samples)} {told}") from error
        parts = [digest_of(part) for part in (self.calibrate, self.choose, self.confirm)]
        self.memory = Memory(folder, fingerprint(checkpoint), parts, later)
        self.doing = ""
        self._decoders: dict[str, Decoder] = {}
        self._sizes = [Counter(size_of(checkpoint, sample) for sample in part) for part in (self.choose, self.confirm)]

    @property
    def warnings(self) -> list[str]:
        parts = {"choose": self.choose, "confirm": self.confirm}
        told = "{} samples to {} recipes by are few: from {} on the figures hold better"
        return [told.format(len(part), what, FEW) for what, part in parts.items() if len(part) < FEW]

    def states(self, recipe: Recipe, confirm: bool = False) -> Iterator[tuple[State, int]]:
        """The KV states of the prompts to choose or to confirm by, and how many prompts have each."""
        lengths = Counter[int]()
        for (images, text), count in self._sizes[confirm].items():  # nobody builds a bucket for text alone
            lengths[bucket_length(self.checkpoint, recipe, max(images, 1), text)] += count
        for length, count in lengths.items():
            yield State(self.decoder(recipe), recipe, length), count

    def tokens(self, confirm: bool = False) -> int:
        """Of these prompts, before anything is pruned."""
        each = self.checkpoint.image_tokens
        return sum((text + images * each) * count for (images, text), count in self._sizes[confirm].items())

    def bytes_per_token(self, recipe: Recipe, confirm: bool = False) -> float:
        """What the runtime allocates for these prompts, divided by their tokens."""
        return sum(state.nbytes * count for state, count in self.states(recipe, confirm)) / self.tokens(confirm)

    def at(self, draft: Draft, bytes_per_token: float) -> Recipe:
        """The recipe of a draft that takes at most so many bytes, and as near to it as whole slots come.

        Raises:
            UserError: its window alone takes more.
        """
        recipe = draft.recipe
        rows = sum(state.length * count for state, count in self.states(recipe))
        kv_bytes = bytes_per_token * self.tokens() / rows / self.checkpoint.decoder.fp16_token_bytes
        budget = dataclasses.replace(recipe.budget, keep=1.0, kv_bytes=kv_bytes)
        if draft.least is not None:
            plain = dataclasses.replace(recipe, budget=Uniform(kv_bytes=kv_bytes))
            slots = sum(float(np.mean(state.capacities)) * count for state, count in self.states(plain))
            keep = min(1.0, slots / rows)
            shares = sensitivity.allocate(self.losses, sensitivity.RATIOS, keep, draft.least * keep)
            budget = Measured(kv_bytes=kv_bytes, shares=[float(f"{share:.3g}") for share in shares])

        def sized(times: float) -> tuple[float, Recipe]:
            other = dataclasses.replace(budget, kv_bytes=round(kv_bytes * times, 5))
            made = dataclasses.replace(recipe, budget=other)
            return self.bytes_per_token(made), made

        low, high, best = 1 - NEAR, 1 + NEAR, sized(1.0)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            size, made = sized(middle)
            if size <= bytes_per_token:
                low, best = middle, (size, made)
            else:
                high = middle
        return best[1]

    def decoder(self, recipe: Recipe) -> Decoder:
        """What a recipe makes of the checkpoint's: positions stretched, KV heads merged."""
        self._prepare([recipe])
        return self._decoders[_decoder_key(recipe)]

    def _prepare(self, recipes: Sequence[Recipe]) -> None:
        wanted = {_decoder_key(recipe): dataclasses.replace(recipe, quantize=Float32()) for recipe in recipes}
        if missing := {key: recipe for key, recipe in wanted.items() if key not in self._decoders}:
            count = len(self.calibrate)
            found = prepare(self.checkpoint, missing, self.calibrate, lambda what: self.progress(what, count))
            self._decoders |= {key: prepared.decoder for key, prepared in found.items()}

    @cached_property
    def _choosing(self) -> Guard:
        return self._guard(self.choose)

    @cached_property
    def _confirming(self) -> Guard:
        return self._guard(self.confirm)

    def _guard(self, held_out: Sequence[Sample]) -> Guard:
        def progress(what: str) -> Callable[[], None]:
            return self.progress(self.doing, len(held_out))

        return Guard(self.checkpoint, self.calibrate, held_out, self.base.guard.layers, progress=progress)

    def judge(self, recipe: Recipe, confirm: bool = False) -> Verdict:
        """The guard's verdict, by the part to choose by or by the one to confirm by."""

        def measure() -> dict[str, Any]:
            guard = self._confirming if confirm else self._choosing
            return dataclasses.asdict(guard.judge(recipe, self.later))

        return self.memory(measure, lambda told: parse(Verdict, told, "verdict"), "guard", confirm, recipe.settings())

    @cached_property
    def _few(self) -> Sequence[Sample]:
        """Of those to calibrate on, spread evenly."""
        return self.calibrate[:: -(-len(self.calibrate) // MEASURED)]

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """What every layer loses with ever fewer tokens, by the base's stages, as `sensitivity.measure`."""
        recipe = dataclasses.replace(self.base, quantize=Float32())

        def measure() -> list[list[float]]:
            done = self.progress("what each layer needs", len(self._few))
            checkpoint = dataclasses.replace(self.checkpoint, decoder=self.decoder(recipe))
            return sensitivity.measure(checkpoint, recipe, self._few, self.later, progress=done).tolist()

        shape = self.checkpoint.decoder.num_layers, len(sensitivity.RATIOS)
        read = partial(parse, list[list[float]], where="losses")
        return self.memory(measure, lambda told: np.array(read(told)).reshape(shape), "sensitivity", recipe.settings())

    def densities(self, draft: Draft, **knobs: Any) -> Draft:
        """Slots for text and images by the densities of an attention map."""

        def measure() -> list[list[float]]:
            done = self.progress("how much text and images repeat themselves", len(self._few))
            found = survey.measure(self.checkpoint, self._few, self.memory.folder / "map", progress=done)
            budget = modality_budget.measured(found)
            return [budget.visual_density, budget.text_density]

        def read(told: Any) -> tuple[list[float], list[float]]:
            visual, text = parse(list[list[float]], told, "densities")
            return visual, text

        visual, text = self.memory(measure, read, "densities")
        return draft.but(modality=Density(visual_density=visual, text_density=text, **knobs))

    def by_layer(self, draft: Draft) -> Draft:
        """The narrowest bits that every layer bears."""
        recipe = draft.recipe
        tables = precision.tables(recipe)

        def measure() -> list[int]:
            done = self.progress("what each layer bears", 2 * len(self._few))
            return precision.find(self.checkpoint, recipe, self._few, tables, BITS_KL, self.later, done).chosen

        def read(told: Any) -> list[dict[str, Any]]:
            chosen = parse(list[int], told, "chosen")
            if len(chosen) != self.checkpoint.decoder.num_layers:
                raise ValueError("not a method for each layer")
            return [tables[i] for i in chosen]

        every = {"method": "by-layer", "layers": self.memory(measure, read, "precision", recipe.settings())}
        return draft.but(quantize=precision.method_of(recipe, every))

    def thresholds(self, draft: Draft) -> list[Move]:
        """Those of head merging that merge something, and no two the same number of heads; aligned heads after others.

        Raises:
            UserError: the heads of this model cannot be merged in its weights.
        """
        moves, seen = [], {str(self.checkpoint.decoder.kv_heads)}
        for align in (False, True):
            tried = [heads(threshold, align) for threshold in THRESHOLDS]
            recipes = [move(draft).recipe for _, move in tried]
            self._prepare(recipes)
            for move, recipe in zip(tried, recipes, strict=True):
                if (left := str(self.decoder(recipe).kv_heads)) not in seen:
                    seen.add(left)
                    moves.append(move)
        return moves


def _decoder_key(recipe: Recipe) -> str:
    return str((recipe.positions, recipe.heads))
