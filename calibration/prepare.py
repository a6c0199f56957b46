"""What the sample prompts tell before graphs are made: each recipe's decoder, and where its keys lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from calibration.heads import head_moments
from calibration.keys import key_statistics
from calibration.samples import Sample
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Decoder
from export.pipeline import Prepared
from export.recipe import Recipe
from export.stages.heads import HeadMoments, Heads


def prepare(
    checkpoint: Checkpoint,
    recipes: dict[str, Recipe],
    samples: Sequence[Sample],
    task: Callable[[str], Callable[[], None]] = lambda what: lambda: None,
) -> dict[str, Prepared]:
    """Merge heads as each recipe wants it, then measure the keys of the decoder that results.

    Args:
        samples: may be empty if no recipe `needs_samples`.
        task: called with what is about to be measured; what it returns is called once a sample.
    """
    moments: list[HeadMoments] = []
    decoders: dict[str, Decoder] = {}  # by the settings that change it
    statistics: dict[str, list[KeyStatistics]] = {}
    prepared = {}
    for name, recipe in recipes.items():
        heads, note = recipe.heads, ""
        if heads.merge:
            moments = moments or head_moments(checkpoint, samples, task("comparing KV heads"))
            note = _note(heads, moments)
        key, known = str(heads), None
        if key not in decoders:
            decoders[key] = _merged(checkpoint.decoder, heads, moments)
        if recipe.quantize.calibrated:
            if key not in statistics:
                changed = dataclasses.replace(checkpoint, decoder=decoders[key])
                statistics[key] = key_statistics(changed, samples, task("calibrating keys"))
            known = statistics[key]
        prepared[name] = Prepared(decoders[key], known, note)
    return prepared


def _merged(decoder: Decoder, heads: Heads, moments: Sequence[HeadMoments]) -> Decoder:
    if not heads.merge:
        return decoder
    model, kv_heads = heads.fold(decoder.language_model, moments)
    return dataclasses.replace(decoder, language_model=model, kv_heads=kv_heads)


def _note(heads: Heads, moments: Sequence[HeadMoments]) -> str:
    """What was found, for a person to read."""
    alike = [known.similarity(heads.align) for known in moments]
    before, after = sum(map(len, alike)), sum(len(heads.clusters(layer)) for layer in alike)
    closest = max(layer.fill_diagonal_(-1).max().item() for layer in alike)
    found = f"{after} of {before} KV heads are left" if after < before else "no KV heads are merged"
    return f"{found}: the two most alike have a cosine of {closest:.2f}, the threshold is {heads.threshold}"
