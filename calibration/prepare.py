"""What the sample prompts tell before graphs are made: each recipe's decoder, and where its keys lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn

from calibration.heads import head_moments
from calibration.keys import key_statistics
from calibration.samples import Sample
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.pipeline import Prepared
from export.recipe import Recipe
from export.stages.heads import HeadMoments, Heads

ROWS = 2048  # of keys and of values, of every layer, that static scales by percentile and mean squared error are of


def prepare(
    checkpoint: Checkpoint,
    recipes: dict[str, Recipe],
    samples: Sequence[Sample],
    task: Callable[[str], Callable[[], None]] = lambda what: lambda: None,
    reach: int = 0,
) -> dict[str, Prepared]:
    """Stretch positions and merge heads as each recipe wants it, then measure the keys of the decoder that results.

    Args:
        samples: may be empty if no recipe `needs_samples`.
        task: called with what is about to be measured; what it returns is called once a sample.
        reach: positions of the longest prompts, see `key_statistics`; 0: the samples' own.
    """
    checkpoints: dict[str, Checkpoint] = {}  # with each decoder, by the settings that change it
    moments: dict[str, list[HeadMoments]] = {}
    statistics: dict[str, list[KeyStatistics]] = {}
    rows = ROWS if any(recipe.quantize.needs_rows for recipe in recipes.values()) else 0
    prepared = {}
    for name, recipe in recipes.items():
        heads, note, known = recipe.heads, "", None
        plain = str(recipe.positions)
        if plain not in checkpoints:
            model = recipe.positions.stretch(checkpoint.decoder.language_model)
            checkpoints[plain] = _with(checkpoint, model, checkpoint.decoder.kv_heads)
        key = f"{plain} {heads}" if heads.merge else plain
        if heads.merge:
            if plain not in moments:
                moments[plain] = head_moments(checkpoints[plain], samples, task("comparing KV heads"))
            note = _note(heads, moments[plain])
            if key not in checkpoints:
                folded = heads.fold(checkpoints[plain].decoder.language_model, moments[plain])
                checkpoints[key] = _with(checkpoint, *folded)
                checkpoint.weights.quantize(checkpoints[key].decoder)  # means of rows lie on no grid
        if recipe.quantize.calibrated:
            if key not in statistics:
                statistics[key] = key_statistics(checkpoints[key], samples, task("calibrating keys"), rows, reach)
            known = statistics[key]
        prepared[name] = Prepared(checkpoints[key].decoder, known, note)
    return prepared


def _with(checkpoint: Checkpoint, language_model: nn.Module, kv_heads: list[int]) -> Checkpoint:
    decoder = dataclasses.replace(checkpoint.decoder, language_model=language_model, kv_heads=kv_heads)
    return dataclasses.replace(checkpoint, decoder=decoder)


def _note(heads: Heads, moments: Sequence[HeadMoments]) -> str:
    """What was found, for a person to read."""
    alike = [known.similarity(heads.align) for known in moments]
    before, after = sum(map(len, alike)), sum(map(len, heads.groups(moments)))
    closest = max(layer.fill_diagonal_(-1).max().item() for layer in alike)
    wanted = f"{min(heads.thresholds):g} to {max(heads.thresholds):g}" if heads.thresholds else heads.threshold
    found = f"{after} of {before} KV heads are left" if after < before else "no KV heads are merged"
    return f"{found}: the two most alike have a cosine of {closest:.2f}, the threshold is {wanted}"
