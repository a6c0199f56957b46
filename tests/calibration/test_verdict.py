"""What a verdict says: limits, and changes with their standard errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from calibration import guard as guards
from calibration.verdict import task_of
from engines.guard import Failure, Limits, Task, Verdict


def verdict(**figures: Any) -> Verdict:
    healthy: dict[str, Any] = {
        "recipe": "r", "later": False, "holds": True, "reasons": [], "warnings": [], "limits": Limits(),
        "calibrated": 1, "held_out": 1, "tokens": 2, "read": 1, "layers": [4, 5],
        "attention_kl": [[0.02, 0.18], [0.1, 0.1]], "logit_kl": 0.05,
        "perplexity": 1.0, "perplexity_compressed": 1.05, "perplexity_change": 5.0,
        "tasks": {"page": task_of(np.array([[1.0, 1.0]] * 19 + [[1.0, 0.0]]))}, "failures": [],
    }  # fmt: skip
    return Verdict(**(healthy | figures))


@pytest.mark.parametrize(
    ("figures", "reasons"),
    [
        ({}, []),
        ({"attention_kl": [[0.0, 0.21], [0.0, 0.0]]}, ["attention KL 0.105 in layer 4 is above 0.1"]),
        ({"attention_kl": [[0.2, 0.2], [0.3, 0.3]]}, ["attention KL 0.3 in layer 5 is above 0.1"]),
        ({"logit_kl": 0.06}, ["logit KL 0.06 nats a token is above 0.05"]),
        ({"logit_kl": math.nan}, ["logit KL nan nats a token is above 0.05"]),
        ({"perplexity_change": 5.1}, ["perplexity +5.1 % is above +5 %"]),
        ({"perplexity_change": -50.0}, []),
        ({"tasks": {"t": task_of(np.array([[1.0, 0.0]] * 6 + [[0.0, 0]] * 94))}}, ["task t: -6.0 points are below -5"]),
        ({"tasks": {"t": task_of(np.array([[0.0, 1.0]] * 9))}}, []),
        ({"tasks": {"t": Task(1, 100.0, math.nan, math.nan, 0.0)}}, ["task t: +nan points are below -5"]),
        ({"logit_kl": 0.06, "limits": Limits(logit_kl=0.07)}, []),
        ({"failures": [Failure("f", True, 1.0, 0.0, 9, "it fails", "mend it")]}, ["f: it fails; mend it"]),
        ({"failures": [Failure("f", None, None, 0.0, 9, "who knows")]}, []),
    ],
)  # fmt: skip
def test_limits_are_the_last_figure_that_holds(figures: dict[str, Any], reasons: list[str]) -> None:
    assert guards.reasons_against(verdict(**figures)) == reasons


def test_standard_errors_are_paired() -> None:
    right = np.array([[1, 1], [1, 0], [0, 1], [1, 0], [1, 1], [1, 0]], dtype=float)
    change = [b - a for a, b in right]
    mean = sum(change) / 6
    error = math.sqrt(sum((x - mean) ** 2 for x in change) / 5) / math.sqrt(6)
    found = task_of(right)
    assert (found.change, found.error) == pytest.approx((100 * mean, 100 * error))
    assert task_of(right[1:2]).error == 0  # one answer tells nothing of its error
