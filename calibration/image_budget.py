"""From sample images to the knobs by which an image keeps more or fewer of its visual tokens.

An image *needs* as many tokens as it takes to cover it to a threshold. One threshold for all images, the highest that
keeps a wanted share of the tokens in the mean, tells the rest: the buckets, the floor, and what the gate may drop.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.evaluate import prompt_of
from calibration.perceive import Perceive
from calibration.samples import Sample, model_inputs
from calibration.statistics.rank import spearman
from engines.errors import UserError
from engines.gate import Gate
from engines.visual_counts import visual_counts
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.perception import Methods
from export.stages.perception.adaptive import coverage, entropy
from export.stages.tokens import VISUAL

STEPS = 10_000  # thresholds and rates are found to one part of so many


@dataclass(frozen=True)
class Image:
    """What the vision graph tells the runtime of an image.

    Attributes:
        curve: its coverage by its first 1, 2, ... N tokens, [N].
        entropy: how evenly its tokens stand out.
    """

    curve: NDArray[np.float32]
    entropy: float


def look(
    checkpoint: Checkpoint,
    recipe: Recipe,
    samples: Sequence[Sample],
    later: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[list[Image]]:
    """The images of each sample's prompt, their tokens chosen by the recipe's perception.

    Args:
        later: whether the question is not known yet.
        progress: called once a sample.
    """
    whole = dataclasses.replace(recipe.perception, keep=1.0, floor=1, buckets=(), quota=None)
    perceive = Perceive(checkpoint, dataclasses.replace(recipe, perception=whole, gate=None, fallback=None), later)
    found = []
    for sample in samples:
        prompt = prompt_of(checkpoint, model_inputs(checkpoint, sample))
        images = []
        if (prompt.kinds == VISUAL).any():
            features, order = perceive.order(prompt)
            curves, entropies = coverage(features, order).numpy(), entropy(features).tolist()
            images = [Image(curve, known) for curve, known in zip(curves, entropies, strict=True)]
        found.append(images)
        progress()
    return found


def need(curve: NDArray[np.float32], threshold: float) -> int:
    """The fewest first tokens that cover an image to the threshold; all if none do."""
    covered = curve >= threshold
    return int(covered.argmax()) + 1 if covered.any() else len(curve)


def buckets(needs: Sequence[int], number: int) -> list[int]:
    """At most so many counts, ascending, of which each image gets the smallest that is enough, with the least sum.

    A count between two needs is no better than the lower of them: the counts are needs, and the highest is one.
    """
    sizes, images = np.unique(needs, return_counts=True)
    # cost[first, last]: tokens of the images that need sizes[first] to sizes[last], if all of them get sizes[last].
    before = np.concatenate([[0], images.cumsum()])
    cost = (before[1:] - before[:-1, None]) * sizes.astype(float)
    cost[np.tri(len(sizes), k=-1, dtype=bool)] = np.inf
    # Up to each size: the least sum, and the first size of its last bucket.
    least, starts = cost[0], [np.zeros(len(sizes), dtype=int)]
    for _ in range(number - 1):
        sums = cost.copy()
        sums[1:] += least[:-1, None]
        least = sums.min(axis=0)
        starts.append(sums.argmin(axis=0))  # of equal ones the first: no bucket that saves nothing
    last, counts = len(sizes) - 1, []
    while last >= 0:
        counts.append(int(sizes[last]))
        last = int(starts.pop()[last]) - 1
    return counts[::-1]


def rounded_up(needs: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """The smallest count that is enough, of each image."""
    return np.array(counts)[np.searchsorted(counts, needs)]


def threshold_for(curves: Sequence[NDArray[np.float32]], mean: float, number: int) -> tuple[float, list[int]]:
    """The highest threshold at which images, rounded up to their buckets, keep at most `mean` tokens; and the buckets.

    With the threshold all needs rise, and with them what the best buckets cost: the threshold is found by halving.
    """

    def at(step: int) -> tuple[list[int], list[int]]:
        needs = [need(curve, step / STEPS) for curve in curves]
        return needs, buckets(needs, number)

    low, high = 1, STEPS + 1
    while high - low > 1:
        middle = (low + high) // 2
        needs, counts = at(middle)
        low, high = (middle, high) if rounded_up(needs, counts).mean() <= mean else (low, middle)
    needs, counts = at(low)
    if rounded_up(needs, counts).mean() > mean:
        raise UserError(f"no threshold is low enough for {mean:.1f} tokens an image: raise --keep")
    return low / STEPS, counts


def by_coverage(images: Sequence[Image], stage: Methods, keep: float, number: int) -> Methods:
    """Perception by which an image gets the smallest of `number` buckets that covers it, `keep` of all tokens."""
    tokens = len(images[0].curve)
    threshold, counts = threshold_for([image.curve for image in images], keep * tokens, number)
    return _bucketed(stage, counts, tokens, coverage=threshold)


def _bucketed(stage: Methods, counts: Sequence[int], tokens: int, **knobs: Any) -> Methods:
    *smaller, most = (round(count / tokens, 4) for count in counts)  # shares that round to the counts
    return dataclasses.replace(stage, keep=most, floor=counts[0], buckets=tuple(smaller), quota=None, **knobs)


def by_quota(images: Sequence[Image], stage: Methods, keep: float) -> Methods:
    """Perception that shares `keep` of their tokens out among the images of a prompt.

    Each image gets at least what the easiest sample needs, where all are covered alike and `keep` is met in the mean.
    """
    tokens = len(images[0].curve)
    _, counts = threshold_for([image.curve for image in images], keep * tokens, tokens)
    return dataclasses.replace(stage, keep=1.0, floor=counts[0], buckets=(), quota=keep)


def by_gate(images: Sequence[Image], stage: Methods, keep: float, number: int, pressure: float) -> tuple[Methods, Gate]:
    """Perception whose buckets lie evenly between what the easiest and the hardest image need, and the gate over them.

    Its limits are the shares that the largest and the smallest bucket drop. Its base is the lowest by which the images
    keep `keep` of their tokens on average at a memory pressure; 1 if none does.
    """
    tokens, curves = len(images[0].curve), [image.curve for image in images]
    threshold, counts = threshold_for(curves, keep * tokens, tokens)
    if counts[0] == counts[-1]:
        raise UserError("all images need as many tokens: there is nothing for a gate to choose, fit by coverage")
    even = sorted({round(count) for count in np.linspace(counts[0], counts[-1], max(number, 2))})
    fitted = _bucketed(stage, even, tokens, coverage=threshold)
    # Rounded up, so that a rate leaves the count and no token more.
    least, most = (min(math.ceil((1 - count / tokens) * STEPS), STEPS - 1) / STEPS for count in (even[-1], even[0]))
    prompts = [[image] for image in images]

    def mean(base: float) -> float:
        return float(np.mean(kept(prompts, fitted, Gate(base, least, most), pressure)))

    low, high = 0, STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if mean(middle / STEPS) <= keep * tokens else (middle, high)
    return fitted, Gate(high / STEPS, least, most)


def kept(
    prompts: Sequence[Sequence[Image]], stage: Methods, gate: Gate | None = None, pressure: float = 0.0
) -> list[list[int]]:
    """Tokens that each image of each prompt keeps, by the runtime's own rule."""
    tokens = next(len(image.curve) for images in prompts for image in images)
    adaptive = Recipe("fitted", perception=stage, gate=gate).adaptive(tokens)
    if adaptive is None:
        return [[stage.count(tokens)] * len(images) for images in prompts]

    def counts(images: Sequence[Image]) -> list[int]:
        curves, entropies, number = [i.curve for i in images], [i.entropy for i in images], len(images)
        return visual_counts([adaptive] * number, [tokens] * number, curves, entropies, pressure)

    return [counts(images) for images in prompts]


def fragment(stage: Methods, gate: Gate | None = None) -> str:
    """The recipe's tables: what is not as it is by default."""
    lines = []
    for table, known in {"perception": stage, "gate": gate}.items():
        if known is not None:
            fields = [
                f for f in dataclasses.fields(known) if f.name != "method" and getattr(known, f.name) != f.default
            ]
            lines += ["", f"[{table}]"] + [f'method = "{stage.method}"'] * (known is stage)
            lines += [f"{f.name} = {json.dumps(getattr(known, f.name))}" for f in fields]
    return "\n".join(lines[1:])


def agreement(images: Sequence[Image], threshold: float) -> float:
    """Rank correlation (Spearman) of the images' entropies and needs: whether a gate can tell by one the other.

    NaN where all are alike.
    """
    return spearman([image.entropy for image in images], [need(image.curve, threshold) for image in images])
