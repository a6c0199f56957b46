"""What a recipe may cost, and what the guard found that it costs.

Standard library only: a recipe sets the limits, `calibration.guard` measures, the manifest keeps both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What a recipe may cost; above, it is refused.

    Attributes:
        attention_kl: KL(compressed || uncompressed) of what a layer's heads look at, nats, mean over heads and steps.
            With tokens dropped and nothing else it is -log of the attention that the kept ones had: 0.1 is 90 % of it.
        layers: the last so many, each of which must hold it.
        logit_kl: KL(uncompressed || compressed) of the next token, nats a token. By this much grows the perplexity of
            what the uncompressed model itself would say: 0.05 are 5 %.
        perplexity: growth for the reference answers, percent.
        task: points of exact match that each task may lose.
        blindness, drift, loops: as the detectors of `calibration.failures` take them.
    """

    attention_kl: float = 0.1
    layers: int = 3
    logit_kl: float = 0.05
    perplexity: float = 5.0
    task: float = 5.0
    blindness: float = 0.5
    drift: float = 2.0
    loops: float = 0.0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")
        if wrong := [name for name, limit in dataclasses.asdict(self).items() if limit < 0]:
            raise ValueError(f"{wrong[0]} must be at least 0")


@dataclass(frozen=True)
class Task:
    """Exact match of a task's answers, percent; where a sample has no answer, the uncompressed model's counts as right.

    Attributes:
        change: points; `error` is its standard error, paired.
    """

    asked: int
    uncompressed: float
    compressed: float
    change: float
    error: float


@dataclass(frozen=True)
class Failure:
    """What a detector of a failure says.

    Attributes:
        found: whether the model fails like that; None: the samples do not tell.
        figure, limit: above which it fails; None: not measured.
        cases: what the figure is of.
        detail: in words.
        remedy: what to change in the recipe.
    """

    name: str
    found: bool | None
    figure: float | None
    limit: float
    cases: int
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a recipe, with all figures.

    Attributes:
        later: whether the question came after the compression.
        holds: whether it may be used; `reasons`: why not.
        warnings: why the figures may not hold elsewhere.
        calibrated, held_out: samples.
        tokens: of all reference answers, their ends included; `read` of them were read from the cache.
        layers: the last ones, whose `attention_kl` is [layers][heads]: mean over the tokens that were read; one mean
            over the heads where merging has made others of them.
        perplexity, perplexity_compressed: of the reference answers; `perplexity_change` in percent.
    """

    recipe: str
    later: bool
    holds: bool
    reasons: list[str]
    warnings: list[str]
    limits: Limits
    calibrated: int
    held_out: int
    tokens: int
    read: int
    layers: list[int]
    attention_kl: list[list[float]]
    logit_kl: float
    perplexity: float
    perplexity_compressed: float
    perplexity_change: float
    tasks: dict[str, Task]
    failures: list[Failure]

    @property
    def attention(self) -> float:
        """Attention KL of the layer that lost most, mean over its heads."""
        return max(sum(heads) / len(heads) for heads in self.attention_kl)


@dataclass(frozen=True)
class Guarded:
    """What the guard did about a level of a bundle.

    Attributes:
        verdicts: of the recipe as it was given, and of every lighter one that was tried; the last is of what was built.
            Empty: it was not judged.
        lightened: what the built recipe says otherwise than the given one, `table.key` -> value.
        note: why it was not judged.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    lightened: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if bool(self.verdicts) == bool(self.note):
            raise ValueError("a level has either verdicts of the guard or a note why there is none")

    @property
    def line(self) -> str:
        """For a person to read."""
        if not self.verdicts:
            return self.note
        v = self.verdicts[-1]
        later = ", the question later" if v.later else ""
        figures = [
            f"attention KL {v.attention:.3g} of {v.limits.attention_kl:g}",
            f"logit KL {v.logit_kl:.3g} of {v.limits.logit_kl:g}",
            f"perplexity {v.perplexity_change:+.1f} of {v.limits.perplexity:+g} %",
            *(f"{name} {task.change:+.1f} of {-v.limits.task:+g} points" for name, task in v.tasks.items()),
        ]
        told = f"{'holds' if v.holds else 'REFUSED'} on {v.held_out} held-out samples{later}: {', '.join(figures)}"
        found = [f"; {failure.name}: {failure.detail}" for failure in v.failures if failure.found]
        lighter = ", ".join(f"{key} = {value}" for key, value in self.lightened.items())
        return told + "".join(found) + (f"; lightened: {lighter}" if lighter else "")
