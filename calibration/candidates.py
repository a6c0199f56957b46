"""What the search for a recipe tries, in the tuning order: layers, modalities, weights, bits, heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engines.config import parse
from engines.errors import UserError
from export.recipe import Recipe
from export.stages.importance.importance import Windowed
from export.stages.importance.signals import Signals

KNOWN_QUESTION = ("snapkv", "vl-cache", "h2o", "decayed", "frequency", "signals", "expected-attention", "value-norm")
UNKNOWN_QUESTION = ("snapkv", "expected-attention", "value-norm", "keydiff", "knorm", "signals")
WINDOWED = {"window": (4, 8, 16, 32), "pool": (1, 3, 5, 7), "value_norm": (True, False)}
SIGNALS = {"attention": (0.8,), "cross_modal": (0.0, 0.6), "redundancy": (0.0,), "recency": (0.0,)}
LEAST = (0.0, 0.25, 0.5)  # of the mean: what every layer keeps at least, where slots go by what was measured
THRESHOLDS = (0.95, 0.92, 0.88, 0.85)


@dataclass(frozen=True)
class Draft:
    """A recipe whose bytes are not set yet.

    Attributes:
        least: the layers' slots are as measured, at least this part of the mean in each; None: as the recipe's budget
            shares them out.
    """

    recipe: Recipe
    least: float | None = None

    def but(self, **stages: Any) -> Draft:
        """The same with other stages.

        Raises:
            UserError: there is no such recipe.
        """
        return dataclasses.replace(self, recipe=_but(self.recipe, **stages))


def _but(known: Any, **values: Any) -> Any:
    try:
        return dataclasses.replace(known, **values)
    except ValueError as error:
        raise UserError(str(error)) from error


Move = tuple[str, Callable[[Draft], Draft]]  # what is changed, in words, and the change of the best draft so far


def knobs(table: str, **values: Any) -> Move:
    """Other values for some knobs of a stage."""
    told = ", ".join(f"{table}.{name} = {value}" for name, value in values.items())
    return told, lambda draft: draft.but(**{table: _but(getattr(draft.recipe, table), **values)})


def method(table: str, name: str, **values: Any) -> Move:
    """Another method for a stage, with those knobs of the recipe's own that it has, too."""

    def move(draft: Draft) -> Draft:
        own, settings = getattr(draft.recipe, table), {"method": name, **values}
        new = getattr(parse(Recipe, {"name": "new", table: settings}, table), table)
        names = {f.name for f in dataclasses.fields(new)} & {f.name for f in dataclasses.fields(own)} - {*settings}
        return draft.but(**{table: _but(new, **{knob: getattr(own, knob) for knob in names})})

    return ", ".join([f"{table}.method = {name}", *(f"{knob} = {value}" for knob, value in values.items())]), move


def layers() -> list[Move]:
    def measured(least: float) -> Move:
        told = f"layers as measured, each at least {least:g} of the mean" if least else "layers as measured"
        return told, lambda draft: dataclasses.replace(draft, least=least)

    def plain(told: str, move: Callable[[Draft], Draft]) -> Move:
        return told, lambda draft: move(dataclasses.replace(draft, least=None))

    cosine = method("budget", "cosine", shallow_rate=0.75, deep_rate=0.45)
    return [*map(measured, LEAST), plain(*cosine), plain(*method("budget", "uniform"))]


def modalities(measured: Callable[..., Draft]) -> list[Move]:
    """
    Args:
        measured: the draft with densities as measured.
    """
    without_caps = {"visual_cap": 1.0, "text_cap": 1.0, "many_rate": 1.0}
    return [
        method("modality", "joint"),
        method("modality", "density"),
        method("modality", "density", visual_cap=0.95),
        ("modality by densities as measured", measured),
        ("modality by densities as measured, without caps", partial(measured, **without_caps)),
    ]


def importance(later: bool) -> list[Move]:
    return [method("importance", name) for name in (UNKNOWN_QUESTION if later else KNOWN_QUESTION)]


def weights(best: Draft) -> list[Move]:
    """Of the importance measure that was found best, and of what overrules it: protected tokens, the window."""
    own, window = best.recipe.importance, best.recipe.window
    tried: dict[str, tuple[Any, ...]] = {}
    tried |= WINDOWED if isinstance(own, Windowed) else {}
    tried |= SIGNALS if isinstance(own, Signals) else {}
    return [
        *(knobs("importance", **{name: value}) for name, values in tried.items() for value in values),
        *(knobs("protect", sinks=count) for count in (0, 4)),
        *(knobs("protect", recent=count) for count in (0, 4)),
        *(knobs("window", least=max(2, round(window.least * times)), share=window.share * times) for times in (0.5, 2)),
        method("merge", "three-way"),
    ]


def bits() -> list[Move]:
    """At equal bytes, fewer bits leave slots for more tokens."""
    return [method("quantize", name) for name in ("int8", "k8v4", "int4")] + [method("quantize", "int4", rotate=True)]


def heads(threshold: float, align: bool) -> Move:
    return knobs("heads", merge=True, threshold=threshold, align=align)
