"""What a recipe may cost, what the guard found that it costs, and why it is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.failures import Failure


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
        blindness, drift, loops: as the detectors of `failures` take them.
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
class Verdict:
    """What the guard says of a recipe, with all figures; plain data, for JSON and a manifest.

    Attributes:
        holds: whether it may be used; `reasons`: why not.
        warnings: why the figures may not hold elsewhere.
        calibrated, held_out: samples.
        tokens: of all reference answers, their ends included; `read` of them were read from the cache.
        layers: the last ones, whose `attention_kl` is [layers][heads]: mean over the tokens that were read; one mean
            over the heads where merging has made others of them.
        perplexity, perplexity_compressed: of the reference answers; `perplexity_change` in percent.
    """

    recipe: str
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


def task_of(right: NDArray[np.float64]) -> Task:
    """Of [answers, 2], whether each is right without and with compression."""
    whole, compressed = 100 * right.mean(axis=0)
    error = 100 * (right[:, 1] - right[:, 0]).std() / len(right) ** 0.5
    return Task(len(right), float(whole), float(compressed), float(compressed - whole), float(error))


def few(tasks: dict[str, Task], limit: float) -> list[str]:
    """Warnings: tasks where a single answer decides."""
    told = "task {}: of {} held-out samples one is {:.1f} points"
    return [told.format(name, t.asked, 100 / t.asked) for name, t in tasks.items() if 100 / t.asked > limit]


def reasons_against(verdict: Verdict) -> list[str]:
    """Why it is refused. A figure that is not a number is within no limit."""
    limits, reasons = verdict.limits, []
    means = [float(np.mean(heads)) for heads in verdict.attention_kl]
    if over := [pair for pair in zip(means, verdict.layers, strict=True) if not pair[0] <= limits.attention_kl]:
        mean, layer = max(over)
        reasons.append(f"attention KL {mean:.3g} in layer {layer} is above {limits.attention_kl:g}")
    if not verdict.logit_kl <= limits.logit_kl:
        reasons.append(f"logit KL {verdict.logit_kl:.3g} nats a token is above {limits.logit_kl:g}")
    if not verdict.perplexity_change <= limits.perplexity:
        reasons.append(f"perplexity {verdict.perplexity_change:+.3g} % is above {limits.perplexity:+g} %")
    for name, task in verdict.tasks.items():
        if task.change < -limits.task:
            reasons.append(f"task {name}: {task.change:+.1f} points are below {-limits.task:+g}")
    reasons += [f"{f.name}: {f.detail}; {f.remedy}" for f in verdict.failures if f.found]
    return reasons
