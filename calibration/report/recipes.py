"""Recipes as TOML, every knob with its value, and whether the value is the default."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from calibration.report.page import Recipe as Listing
from calibration.report.page import Section
from export.recipe import Recipe


def recipes(levels: Mapping[str, Recipe]) -> Section:
    return Section(
        "Recipes",
        "Every knob with the value that it has. Marked is what differs from the default.",
        recipes=[Listing(f"{name}.toml", lines(recipe)) for name, recipe in levels.items()],
    )


def lines(recipe: Recipe) -> list[tuple[str, bool]]:
    """The file's lines, and whether each differs from the default of its stage's method, or is another method."""
    default = Recipe(recipe.name)
    top, tables = [], []
    for f in dataclasses.fields(recipe):
        value, usual = getattr(recipe, f.name), getattr(default, f.name)
        if f.name == "name" or value is None:
            continue
        if not dataclasses.is_dataclass(value):
            top.append((f"{f.name} = {_toml(value)}", value != usual))
            continue
        other = type(value) is not type(usual)
        tables += [("", False), (f"[{f.name}]", other)]
        for knob in sorted(dataclasses.fields(value), key=lambda knob: knob.name != "method"):
            own = getattr(value, knob.name)
            fresh = knob.default if knob.default_factory is dataclasses.MISSING else knob.default_factory()
            if own is not None:
                tables.append((f"{knob.name} = {_toml(own)}", other if knob.name == "method" else own != fresh))
    return top + tables


def _toml(value: Any) -> str:
    """A value on one line: numbers, texts and lists are written as in JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return "{ " + ", ".join(f"{name} = {_toml(own)}" for name, own in known.items() if own is not None) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)
