"""Recipes as the page lists them: a file that can be used, and marks where it differs from the defaults."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from calibration.report.recipes import lines
from engines.config import parse
from export import recipe as recipes
from export.recipe import Recipe

DEMO = Path(__file__).parents[3] / "models" / "demo-vlm"
OWN = [str(path) for path in sorted(DEMO.glob("recipes/*.toml"))]


@pytest.mark.parametrize("name", [*recipes.presets(), *OWN], ids=lambda name: Path(name).name)
def test_the_lines_are_a_recipe_file(name: str) -> None:
    recipe = recipes.load(name)
    text = "\n".join(line for line, _ in lines(recipe))
    assert parse(Recipe, {"name": recipe.name, **tomllib.loads(text)}, "lines").settings() == recipe.settings()


def test_a_method_for_every_layer_is_a_recipe_file_too() -> None:
    layers = ["int8", {"method": "int4", "rotate": True}]
    recipe = parse(
        Recipe, {"name": "each", "description": 'a "b" \\ é', "quantize": {"method": "by-layer", "layers": layers}}, ""
    )
    text = "\n".join(line for line, _ in lines(recipe))
    assert parse(Recipe, {"name": "each", **tomllib.loads(text)}, "lines").settings() == recipe.settings()


def test_what_differs_is_marked() -> None:
    assert not any(differs for _, differs in lines(Recipe("plain")))
    settings = {
        "description": "mine",
        "budget": {"keep": 0.5},
        "importance": {"method": "knorm"},
        "merge": {"method": "three-way", "merge_above": 0.9},
    }
    marked = [line for line, differs in lines(parse(Recipe, {"name": "mine", **settings}, "")) if differs]
    assert sorted(marked) == sorted(
        [
            'description = "mine"',
            "keep = 0.5",
            "[importance]",
            'method = "knorm"',
            "[merge]",
            'method = "three-way"',
            "merge_above = 0.9",
        ]
    )
