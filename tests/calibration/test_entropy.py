"""The entropy of each layer's attention against Hugging Face's attention weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from calibration import entropy, samples
from engines.config import parse
from export import checkpoint as checkpoints
from export.graphs import State
from export.recipe import Recipe
from tests.export import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


def test_entropy_is_that_of_hugging_faces_attention(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    calls: list[None] = []
    got = entropy.attention_entropy(checkpoint, known, lambda: calls.append(None))
    assert len(calls) == len(known)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    found: list[list[float]] = [[] for _ in got]
    for sample in known:
        with torch.no_grad():
            out = model(**samples.model_inputs(checkpoint, sample), output_attentions=True)
        for layer, weights in enumerate(out.attentions):
            for row in weights[0].double().numpy().reshape(-1, weights.shape[-1]):
                seen = row[row > 0]
                found[layer].append(float(-(seen * np.log(seen)).sum()))
    np.testing.assert_allclose(got, [np.mean(layer) for layer in found], rtol=1e-4)


def test_it_is_filled_in_where_a_budget_asks_for_it(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    tables = {
        "asks": {"method": "pyramid", "keep": 0.5, "measure": True},
        "has": {"method": "pyramid", "measure": True, "entropy": [1.0, 2.0, 3.0]},
        "other": {"keep": 0.5},
    }
    recipes = {name: parse(Recipe, {"name": name, "budget": table}, name) for name, table in tables.items()}
    assert [recipe.budget.needs_entropy for recipe in recipes.values()] == [True, False, False]
    assert recipes["asks"].needs_samples
    filled = entropy.with_entropy(checkpoint, recipes, dict.fromkeys(recipes, checkpoint.decoder), known)
    assert filled["has"] is recipes["has"]
    assert filled["other"] is recipes["other"]
    measured = entropy.attention_entropy(checkpoint, known)
    assert filled["asks"].settings() == {
        **recipes["asks"].settings(),
        "budget": {**recipes["asks"].settings()["budget"], "entropy": measured},
    }
    slots = State(checkpoint.decoder, filled["asks"], 100).capacities
    np.testing.assert_allclose(slots, np.array(measured) / np.mean(measured) * 50, atol=0.51)
