"""What share of its visual tokens a request drops: two formulas with their knobs, and what a level offers.

Rates are limits: of the counts that a level offers, an image gets the smallest that drops no more.

Standard library only: a recipe sets the knobs, the manifest keeps them, the runtime (or a calibration) asks for a rate.
Both look at the input before anything of it is compressed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def _clamp(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _check_rates(least: float, most: float) -> None:
    if not 0 <= least <= most < 1:
        raise ValueError(f"0 <= least <= most < 1 is needed, got {least} and {most}")


@dataclass(frozen=True)
class Gate:
    """By memory and by the image: base * (0.5 + pressure) * (0.5 + (1 - entropy)), from `least` to `most`.

    Attributes:
        base: the rate at half the memory and half the entropy.
        least, most: limits of the rate.
        high, low: pressure over `high` counts as at least `high` until it is under `low`: the rate does not follow
            every rise and fall of the memory in use.
        budget_mib: memory of this process that is a pressure of 1, MiB; 0: the pressure is the share of the machine's
            memory that is in use.
    """

    base: float = 0.4
    least: float = 0.2
    most: float = 0.7
    high: float = 0.8
    low: float = 0.6
    budget_mib: int = 0

    def __post_init__(self) -> None:
        _check_rates(self.least, self.most)
        if not 0 < self.base <= 1:
            raise ValueError(f"base must be in (0, 1], got {self.base}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"0 <= low <= high <= 1 is needed, got {self.low} and {self.high}")
        if self.budget_mib < 0:
            raise ValueError(f"budget_mib must be at least 0, got {self.budget_mib}")

    def rate(self, pressure: float, entropy: float) -> float:
        """Share of an image's tokens to drop.

        Args:
            pressure: memory in use / budget.
            entropy: how evenly the image's tokens stand out, from 0 (a few do) to 1 (all alike).
        """
        pressure, entropy = _clamp(pressure, 0, 1), _clamp(entropy, 0, 1)
        return _clamp(self.base * (0.5 + pressure) * (0.5 + (1 - entropy)), self.least, self.most)


@dataclass(frozen=True)
class Fallback:
    """By the prompt: complexity = log V + log T + alignment * N_align / (T + V); the more complex, the less is dropped.

    The rate falls linearly from `most`, at a complexity of `simple`, to `least`, at `complex`, and stays there.

    Attributes:
        most, least: rate of a simple and of a complex prompt.
        simple, complex: 6 is one image of 64 tokens and 6 words, 14 five images of 576 tokens and 420 words.
        alignment: weight of the share of alignment tokens, where they are known. The runtime does not know them before
            prefill, and counts none.
    """

    most: float = 0.75
    least: float = 0.4
    simple: float = 6.0
    complex: float = 14.0
    alignment: float = 2.0

    def __post_init__(self) -> None:
        _check_rates(self.least, self.most)
        if not self.simple < self.complex:
            raise ValueError(f"simple must be less than complex, got {self.simple} and {self.complex}")
        if self.alignment < 0:
            raise ValueError(f"alignment must be at least 0, got {self.alignment}")

    def complexity(self, visual: int, text: int, aligned: int = 0) -> float:
        """Of a prompt of V visual and T text tokens, N_align of them alignment tokens; log 0 counts as 0."""
        share = aligned / max(visual + text, 1)
        return math.log(max(visual, 1)) + math.log(max(text, 1)) + self.alignment * share

    def rate(self, visual: int, text: int, aligned: int = 0) -> float:
        """Share of the visual tokens to drop."""
        complexity = self.complexity(visual, text, aligned)
        share = _clamp((complexity - self.simple) / (self.complex - self.simple), 0, 1)
        return self.most - (self.most - self.least) * share


@dataclass(frozen=True)
class Adaptive:
    """What decides how many visual tokens of an image a request takes; the vision graph returns the most it may be.

    Attributes:
        counts: how many it may be, ascending: the smallest whose coverage reaches `coverage`, else the last. A gate or
            a fallback decides in its place.
        coverage: the threshold: mean over the image's tokens of the highest cosine to a kept one.
        floor: tokens that every image keeps, whatever the quota.
        quota: share of their tokens that the images of a request keep together; None: each for itself.
        gate, fallback: share to drop, by memory and entropy, and by the length of the prompt; None: all may stay.
    """

    counts: list[int]
    coverage: float = 1.0
    floor: int = 1
    quota: float | None = None
    gate: Gate | None = None
    fallback: Fallback | None = None

    def __post_init__(self) -> None:
        if not self.counts or self.counts != sorted({*self.counts}):
            raise ValueError(f"counts must be ascending, got {self.counts}")
        if not 1 <= self.floor <= self.counts[0]:
            raise ValueError(f"1 <= floor <= counts is needed, got {self.floor} and {self.counts}")
        if not 0 < self.coverage <= 1:
            raise ValueError(f"coverage must be in (0, 1], got {self.coverage}")
        if self.quota is not None and not 0 < self.quota <= 1:
            raise ValueError(f"quota must be in (0, 1], got {self.quota}")

    @property
    def rule(self) -> tuple[float, float | None, Gate | None, Fallback | None]:
        """What is the same for images of every size."""
        return self.coverage, self.quota, self.gate, self.fallback
