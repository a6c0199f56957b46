"""Recipes that plant a failure of their own: the guard names it, and a lighter recipe has it no more."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from calibration import guard as guards
from calibration import samples
from calibration.failures import DRIFT, LOOPS, REMEDIES
from calibration.guard import Guard
from engines.guard import Failure, Verdict
from export import checkpoint as checkpoints
from export.stages.budget import Uniform
from tests.export import tiny

NEWEST: dict[str, Any] = {  # of the store, whatever it is asked about
    "importance": {"method": "streaming-llm"},
    "protect": {"sinks": 0, "recent": 1},
    "quantize": {"method": "float32"},
    "window": {"least": 2, "most": 2, "recent": 0.0},
}


def guard(folder: Path, words: int, attention: float = 1.0) -> Guard:
    """Of a random model whose attention counts for so much, on answers of so many words."""
    torch.set_num_threads(1)
    model, chance = tiny.llava(), random.Random(0)
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.mul_(attention)
    tiny.save(folder, model, count=7)
    answers = [" ".join(chance.choice("0123456789") for _ in range(words)) for _ in range(7)]
    lines = [
        {"images": [f"{i}.png"], "prompt": "what color is the shape ?", "answer": answer}
        for i, answer in enumerate(answers)
    ]
    (folder / "samples" / samples.FILE).write_text("\n".join(map(json.dumps, lines)))
    known = samples.read(folder / "samples")
    return Guard(checkpoints.load(folder), known[:2], known[2:])


def failure(verdict: Verdict, name: str) -> Failure:
    return next(failure for failure in verdict.failures if failure.name == name)


def test_a_store_that_gives_the_prompt_away_word_by_word_drifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first it holds all of the prompt; every word of the answer takes the place of a word of it."""
    monkeypatch.setattr(guards, "MOST", 7)
    judged = guard(tmp_path / "checkpoint", words=60)
    forgets = tiny.recipe(**NEWEST, budget={"keep": 1.0, "shallow_rate": 0.0, "deep_rate": 0.0})
    verdict = judged.judge(forgets)
    assert failure(verdict, DRIFT).found is True
    assert any(reason.startswith(f"{DRIFT}: ") and REMEDIES[DRIFT] in reason for reason in verdict.reasons)
    roomy = judged.judge(dataclasses.replace(forgets, budget=Uniform(keep=4.0)))
    assert failure(roomy, DRIFT).found is False
    assert roomy.holds


def test_a_cache_of_nothing_makes_a_model_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the next word follows from the last one alone, it comes back to itself."""
    monkeypatch.setattr(guards, "MOST", 40)
    judged = guard(tmp_path / "checkpoint", words=3, attention=0.5)
    forgets = tiny.recipe(**NEWEST, budget={"keep": 0.02})
    verdict = judged.judge(forgets)
    assert failure(verdict, LOOPS).found is True
    assert any(reason.startswith(f"{LOOPS}: ") and REMEDIES[LOOPS] in reason for reason in verdict.reasons)
    whole = judged.judge(dataclasses.replace(forgets, budget=Uniform(keep=4.0)))
    assert failure(whole, LOOPS).found is False
    assert whole.holds
