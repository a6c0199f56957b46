"""Lighter versions of a recipe, step by step: more tokens, more bits, no merged heads, and room for the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from export.recipe import Recipe
from export.stages.budget import Uniform
from export.stages.quantize.blockwise import Blockwise
from export.stages.quantize.by_layer import (
    K8V4,
    ByLayer,
    Float16,
    Int4,
    Int8,
    Kivi,
    Mixed,
    PerHead,
    PerToken,
    TurboQuant,
)
from export.stages.quantize.quantize import Quantize
from export.stages.shorten import FastV, ToMe, Whole

STEP = 1.5  # how many times as much is kept a step
ROOM = 0.75  # of the fp16 bytes: from there on a budget in bytes holds every token in 8 bits
# What holds a number in more bits, one step from each.
WIDER: dict[type[Quantize], type[Quantize]] = {
    TurboQuant: Int4,
    Kivi: Int4,
    Int4: K8V4,
    K8V4: Int8,
    Mixed: Int8,
    PerToken: Int8,
    PerHead: Int8,
    Int8: Float16,
}


def lighter(recipe: Recipe) -> Iterator[Recipe]:
    """Ever lighter recipes; the last one keeps every token, of answers too, in 16 bits, in heads as they are."""
    base, number = recipe, 0
    steps = (_more_tokens, _more_bits, _own_heads, _room_for_answers)
    while changed := next(filter(None, (step(recipe) for step in steps)), None):
        number += 1
        recipe = dataclasses.replace(recipe, name=f"{base.name}-lighter-{number}", **changed)
        yield recipe


def changes(recipe: Recipe, base: Recipe) -> dict[str, Any]:
    """What a recipe says otherwise than another, `table.key` -> value."""
    told: dict[str, Any] = {}
    for table, settings in recipe.settings().items():
        before = base.settings()[table]
        if isinstance(settings, dict) and isinstance(before, dict):
            told |= {f"{table}.{key}": v for key, v in settings.items() if key not in before or before[key] != v}
    return told


def _more_tokens(recipe: Recipe) -> dict[str, Any]:
    budget, perception, shorten = recipe.budget, recipe.perception, recipe.shorten
    changed: dict[str, Any] = {}
    if budget.kv_bytes is not None:
        kv_bytes = budget.kv_bytes * STEP
        keeps = {"keep": 1.0, "kv_bytes": None} if kv_bytes >= ROOM else {"kv_bytes": kv_bytes}
        changed["budget"] = dataclasses.replace(budget, **keeps)
    elif budget.keep < 1:
        changed["budget"] = dataclasses.replace(budget, keep=min(1.0, budget.keep * STEP))
    if perception.keep < 1 or perception.adaptive:
        keep, *shares = (min(1.0, share * STEP) for share in (perception.keep, *perception.buckets))
        quota = perception.quota and min(1.0, perception.quota * STEP)
        if min(keep, *shares, quota or 1.0) < 1:
            changed["perception"] = dataclasses.replace(perception, keep=keep, buckets=tuple(shares), quota=quota)
        else:
            whole = dataclasses.replace(perception, keep=1.0, buckets=(), quota=None)
            changed |= {"perception": whole, "gate": None, "fallback": None}
    if isinstance(shorten, FastV):
        keep = shorten.keep * STEP
        changed["shorten"] = Whole() if keep >= 1 else dataclasses.replace(shorten, keep=keep)
    if isinstance(shorten, ToMe):
        rates = [rate / STEP for rate in shorten.rates]
        changed["shorten"] = Whole() if max(rates) < 0.05 else dataclasses.replace(shorten, rates=rates)
    return changed


def _more_bits(recipe: Recipe) -> dict[str, Any]:
    wider = _wider(recipe.quantize)
    return {"quantize": wider} if wider else {}


def _wider(quantize: Any) -> Any:
    """One step wider, every layer if each has a method of its own; None if nothing is left to give back."""
    if isinstance(quantize, ByLayer):
        layers = [_wider(layer) for layer in quantize.layers]
        kept = [new or old for new, old in zip(layers, quantize.layers, strict=True)]
        return dataclasses.replace(quantize, layers=kept) if any(layers) else None
    wider = WIDER.get(type(quantize))
    if wider is None:
        return None
    known = {f.name for f in dataclasses.fields(wider)} - {"method"} if issubclass(wider, Blockwise) else set()
    return wider(**{f.name: getattr(quantize, f.name) for f in dataclasses.fields(quantize) if f.name in known})


def _own_heads(recipe: Recipe) -> dict[str, Any]:
    return {"heads": dataclasses.replace(recipe.heads, merge=False)} if recipe.heads.merge else {}


def _room_for_answers(recipe: Recipe) -> dict[str, Any]:
    """A store that a full prompt fills drops something for every token of the answer that leaves the window."""
    room = recipe.window.compact and recipe.budget.keep < STEP
    return {"budget": Uniform(keep=STEP)} if room else {}
