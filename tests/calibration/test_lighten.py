"""Lighter recipes, in the order in which the guard tries them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calibration.lighten import changes, lighter
from engines.config import parse
from export import recipe as recipes
from export.recipe import Recipe
from tests.export import tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"


def steps(**tables: Any) -> Iterator[dict[str, Any]]:
    base = tiny.recipe(**tables)
    return (changes(recipe, base) for recipe in lighter(base))


def test_lighter_recipes_give_tokens_first_and_then_bits() -> None:
    assert list(steps(quantize={"method": "float32"}, window={"compact": False})) == []
    assert list(steps(quantize={"method": "float32"})) == [
        {"budget.keep": 1.5, "budget.method": "uniform"}  # room for the answer
    ]
    kept = list(steps(budget={"keep": 0.5}, quantize={"method": "kivi"}))
    assert [step["budget.keep"] for step in kept] == [0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5]
    assert [step.get("quantize.method") for step in kept] == [None, None, "int4", "k8v4", "int8", "float16", "float16"]
    in_bytes = list(steps(budget={"kv_bytes": 0.25}, quantize={"method": "int8", "margin": 1.5, "center": False}))
    assert [step.get("budget.kv_bytes") for step in in_bytes] == [0.375, 0.5625, None, None, None]
    assert [step.get("quantize.method") for step in in_bytes] == [None, None, None, "float16", "float16"]
    seen = list(steps(perception={"keep": 0.8, "buckets": [0.25, 0.5], "quota": 0.5}))
    assert [step["perception.buckets"] for step in seen] == [(0.375, 0.75), (0.5625, 1.0), (0.84375, 1.0), (), ()]
    assert seen[-1]["perception.keep"] == 1.0
    assert [step["heads.merge"] for step in steps(heads={"merge": True})] == [False, False]
    mixed = [step["quantize.layers"] for step in steps(quantize={"method": "by-layer", "layers": ["int4", "float32"]})]
    assert [[layer["method"] for layer in layers] for layers in mixed[:3]] == [
        ["k8v4", "float32"], ["int8", "float32"], ["float16", "float32"]
    ]  # fmt: skip
    fewer = list(steps(shorten={"method": "fastv", "keep": 0.5}))
    assert [step.get("shorten.keep") for step in fewer[:1]] == [0.75]
    assert fewer[-1]["shorten.method"] == "none"


@pytest.mark.parametrize("name", [*recipes.presets(), "pages"])
def test_every_preset_can_be_lightened_to_the_end(name: str) -> None:
    base = recipes.load(name, DEMO)
    tried = list(lighter(base))
    assert len(tried) <= 20
    for recipe in tried:
        assert parse(Recipe, recipe.settings(), recipe.name).settings() == recipe.settings()
    last = [base, *tried][-1]
    assert last.quantize.method in ("float16", "float32")
    assert (last.budget.kv_bytes, last.perception.keep, last.shorten.method) == (None, 1.0, "none")
