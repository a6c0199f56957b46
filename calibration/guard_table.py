"""The guard's verdict for a person to read."""

from __future__ import annotations

import numpy as np

from calibration.map_table import markdown
from engines.guard import Limits, Task, Verdict


def figures(verdict: Verdict) -> list[list[str]]:
    """Every figure beside its limit, the first row the header."""
    limits = verdict.limits
    rows = [["figure", "uncompressed", verdict.recipe, "change", "limit", "holds"]]
    for layer, heads in zip(verdict.layers, verdict.attention_kl, strict=True):
        mean, worst = float(np.mean(heads)), int(np.argmax(heads))
        of_head = f" (head {worst}: {heads[worst]:.3g})" if len(heads) > 1 else ""
        limit, holds = f"{limits.attention_kl:g}", _said(mean <= limits.attention_kl)
        rows.append([f"attention KL, layer {layer}", "", f"{mean:.3g}{of_head}", "", limit, holds])
    holds = _said(verdict.logit_kl <= limits.logit_kl)
    rows.append(["logit KL, nats a token", "", f"{verdict.logit_kl:.3g}", "", f"{limits.logit_kl:g}", holds])
    before, after, change = verdict.perplexity, verdict.perplexity_compressed, verdict.perplexity_change
    told = [f"{before:.4g}", f"{after:.4g}", f"{change:+.2f} %", f"{limits.perplexity:+g} %"]
    rows.append(["perplexity", *told, _said(change <= limits.perplexity)])
    rows += [_task(name, task, limits) for name, task in verdict.tasks.items()]
    for failure in verdict.failures:
        figure = "" if failure.figure is None else f"{failure.figure:.3g}"
        found = "not measured" if failure.found is None else _said(not failure.found)
        rows.append([failure.name, "", figure, "", f"{failure.limit:g}", found])
    return rows


def notes(verdict: Verdict) -> list[str]:
    """What there is to say of the figures, the last line the verdict itself."""
    unknown = [
        f"{failure.name} is not measured: {failure.detail}" for failure in verdict.failures if failure.found is None
    ]
    end = "holds" if verdict.holds else "is refused: " + "; ".join(verdict.reasons)
    return [
        f"{verdict.held_out} held-out samples, {verdict.tokens} tokens of answers, {verdict.read} told by the cache; "
        f"calibrated on {verdict.calibrated} other samples",
        *unknown,
        f"{verdict.recipe} {end}",
    ]


def lines(verdict: Verdict) -> list[str]:
    """What the guard's command prints of one recipe."""
    return [*markdown(figures(verdict)), *notes(verdict)]


def _task(name: str, task: Task, limits: Limits) -> list[str]:
    figures = [f"{task.uncompressed:.1f} %", f"{task.compressed:.1f} %", f"{task.change:+.1f} ± {task.error:.1f}"]
    return [f"task {name}, {task.asked} asked", *figures, f"{-limits.task:+g}", _said(task.change >= -limits.task)]


def _said(holds: bool) -> str:
    return "yes" if holds else "NO"
