"""What the guard's figures say: changes with their standard errors, and why a recipe is refused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engines.guard import Task, Verdict


def task_of(right: NDArray[np.float64]) -> Task:
    """Of [answers, 2], whether each is right without and with compression."""
    whole, compressed = 100 * right.mean(axis=0)
    error = 100 * (right[:, 1] - right[:, 0]).std(ddof=min(1, len(right) - 1)) / len(right) ** 0.5
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
        if not task.change >= -limits.task:
            reasons.append(f"task {name}: {task.change:+.1f} points are below {-limits.task:+g}")
    reasons += [f"{f.name}: {f.detail}; {f.remedy}" for f in verdict.failures if f.found]
    return reasons
