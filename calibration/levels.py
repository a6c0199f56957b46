"""The guard of a bundle's levels: judged as each will be used, lightened or refused, before anything is exported."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from calibration import samples
from calibration.guard import Guard, check_fits
from calibration.lighten import changes, lighter
from calibration.samples import Sample
from calibration.survey import warnings
from engines.errors import UserError
from engines.guard import Guarded, Verdict
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.recipe import Recipe

HELD_OUT = 64  # samples that levels are judged by, at most
UNCOMPRESSED = "uncompressed: the other levels are compared with it"
LIGHTEN, REFUSE, WARN, OFF = "lighten", "refuse", "warn", "off"
Levels = dict[str, Recipe]


def guarded(
    checkpoint: Checkpoint,
    levels: Levels,
    ways: dict[str, str],
    folder: Path | None,
    held_out: str | None,
    say: Callable[[str], None],
    task: Callable[[str, int], Callable[[], None]],
) -> tuple[Levels, dict[str, Guarded], list[Sample]]:
    """The levels as the guard lets them be, what it says of each, and the samples to calibrate on.

    A level that another names for unknown questions is judged with the question after the compression.

    Args:
        ways: by level, what becomes of a recipe that breaks its limits: `lighten`, `refuse` or `warn`; or `off`.
        folder: with samples; None: the checkpoint's, if it has some.
        held_out: a folder of samples to judge by; None: a share of the first folder's.
        say: prints a line.
        task: called with what is about to be done and how often; what it returns, each time it is.

    Raises:
        UserError: a recipe is refused, or there are no samples where some are needed.
    """
    needed = any(recipe.needs_samples for recipe in levels.values())
    found = {name: Guarded(note=UNCOMPRESSED if uncompressed(r) else "not guarded: off") for name, r in levels.items()}
    judged = [name for name in levels if found[name].note != UNCOMPRESSED and ways[name] != OFF]
    if not judged:
        return levels, found, samples.of(checkpoint.path, folder) if needed else []
    known, others, why = split_samples(checkpoint, folder, held_out, needed, say)
    if not others:
        notes = warnings(len(known), sum(bool(sample.images) for sample in known), checkpoint) if known else []
        for warning in (f"not guarded: {why}", *notes):
            say(f"warning: {warning}")
        return levels, found | {name: Guarded(note=f"not guarded: {why}") for name in judged}, known

    for name in judged:
        with _named(levels[name]):
            check_fits(checkpoint, levels[name], others)
    layers = max(levels[name].guard.layers for name in judged)
    guard = Guard(
        checkpoint,
        known,
        others,
        layers,
        progress=lambda what: task(f"guard: {what} on {len(others)} samples", len(others)),
    )
    later = {recipe.unknown for name, recipe in levels.items() if recipe.unknown != name}
    chosen = dict(levels)
    for name in judged:
        chosen[name], found[name] = _judge(guard, levels[name], name in later, ways[name])
    for warning in dict.fromkeys(warning for name in judged for warning in found[name].verdicts[-1].warnings):
        say(f"warning: {warning}")
    for name in judged:
        if found[name].lightened:
            say(f"level {name} is refused as it was given: {'; '.join(found[name].verdicts[0].reasons)}")
        say(f"level {name}: {found[name].line}")
    return chosen, found, known


def uncompressed(recipe: Recipe) -> bool:
    """Whether it is what others are compared with."""
    off = recipes.load("off")
    return dataclasses.replace(recipe, guard=off.guard).settings() == off.settings()


def split_samples(
    checkpoint: Checkpoint, folder: Path | None, held_out: str | None, needed: bool, say: Callable[[str], None]
) -> tuple[list[Sample], list[Sample], str]:
    """Those to calibrate on, those to judge by, and why there are none of these."""
    own = checkpoint.path / "samples"
    if checkpoint.takes_images and not (folder or needed or held_out or (own / samples.FILE).is_file()):
        return [], [], f"no samples in {own}"
    given = samples.of(checkpoint.path, folder, text_only=True)
    if held_out:
        others, notes = samples.apart(given, samples.read(held_out, text_only=True))
        for note in notes:
            say(f"warning: {note}")
        return given, others[:HELD_OUT], ""
    try:
        known, others = samples.split(given)
    except UserError as error:
        return given, [], str(error)
    return known, others[:HELD_OUT], ""


@contextlib.contextmanager
def _named(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(
            f"the guard cannot judge recipe {recipe.name}: {error}; --guard off builds it unjudged"
        ) from error


def _judge(guard: Guard, recipe: Recipe, later: bool, way: str) -> tuple[Recipe, Guarded]:
    with _named(recipe):
        tried = guard.first(itertools.chain([recipe], lighter(recipe) if way == LIGHTEN else ()), later)
    chosen, verdict = tried[-1]
    if not (verdict.holds or (way == WARN and _finite(verdict))):
        lightest = f", even as {verdict.recipe}, the lightest of it" if way == LIGHTEN else ""
        raise UserError(
            f"recipe {recipe.name} is refused{lightest}: {'; '.join(verdict.reasons)}: let it drop less"
            f"{'' if lightest else ' (--guard lighten does that)'}, state other limits in its [guard], or build it as "
            "it is (--guard warn)"
        )
    told = changes(chosen, recipe)
    if told:
        chosen = dataclasses.replace(chosen, name=recipe.name, description=f"{recipe.name}, lightened by the guard")
    return chosen, Guarded([judged for _, judged in tried if _finite(judged)], told)


def _finite(verdict: Verdict) -> bool:
    """Whether a manifest can hold it; a recipe that computes no numbers makes no level either."""
    figures = (verdict.logit_kl, verdict.perplexity, verdict.perplexity_compressed, verdict.attention)
    return all(map(math.isfinite, figures))
