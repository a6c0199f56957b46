"""All trials of a search for a recipe, as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibration.map_table import markdown
from calibration.tune import Trial

HEAD = [
    "step", "tried", "bytes a token", "KV", "exact %", "change, points", "logit KL", "perplexity", "attention KL",
    "blind", "drift", "loops", "kept", "why",
]  # fmt: skip


def rows(trials: Sequence[Trial]) -> list[list[str]]:
    """A row a trial, with every figure of the guard, behind the header."""
    return [HEAD, *map(_row, trials)]


def lines(trials: Sequence[Trial]) -> list[str]:
    """The same as a Markdown table."""
    return markdown(rows(trials))


def _row(trial: Trial) -> list[str]:
    told, kept = trial.verdict, "yes" if trial.kept else ""
    if told is None or trial.bytes_per_token is None:
        return [trial.step, trial.change, *[""] * (len(HEAD) - 4), kept, trial.why]
    asked = sum(task.asked for task in told.tasks.values())
    change = sum(task.asked * task.change for task in told.tasks.values()) / asked
    error = sum((task.asked * task.error) ** 2 for task in told.tasks.values()) ** 0.5 / asked
    figures = [
        f"{trial.bytes_per_token:.1f}",
        f"{trial.kv_share:.3f}",
        f"{trial.accuracy:.1f}",
        f"{change:+.1f} ± {error:.1f}",
        f"{told.logit_kl:.2g}",
        f"{told.perplexity_change:+.1f} %",
        f"{max(map(np.mean, told.attention_kl)):.2g}",
        *("" if failure.figure is None else f"{failure.figure:.2g}" for failure in told.failures),
    ]
    return [trial.step, trial.change, *figures, kept, trial.why]


def description(trial: Trial) -> str:
    """Of a recipe that was confirmed by this trial, in a line."""
    assert trial.verdict is not None
    return (
        f"Tuned for this model: {trial.bytes_per_token:.0f} bytes of KV a prompt token, {trial.kv_share:.1%} of fp16; "
        f"{trial.accuracy:.1f} % of {trial.verdict.held_out} samples right that had no part in it."
    )
