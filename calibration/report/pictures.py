"""Galleries: heat maps, selectors' choices and the cache's content, drawn over the images that the model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calibration.report import overlay
from calibration.report.looks import Look, cached, choose, look, selected, selectors
from calibration.report.page import Gallery, Picture, Section
from calibration.samples import Sample
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.pipeline import Prepared
from export.recipe import Recipe

IMAGES = 3  # that are drawn
LAYERS = 6  # whose heat maps are drawn, at most
KEEP = 0.25  # share of an image's tokens that every selector keeps

Drawn = list[tuple[Look, tuple[int, int]]]  # images and their grids of patches


def drawable(checkpoint: Checkpoint, samples: Sequence[Sample]) -> Drawn:
    """Some of the samples' images; none if it takes none, or the tokens are no grid of square patches."""
    if not checkpoint.takes_images:
        return []
    shape = overlay.grid(checkpoint.image_tokens, *checkpoint.pixel_size)
    return [(look(checkpoint, sample), shape) for sample in choose(samples, IMAGES)] if shape else []


def attention(drawn: Drawn) -> Section:
    return Section(
        "Where it looks",
        "Each patch of the picture is a visual token. Bright is what gets the most attention of the picture's patches; "
        "the picture behind is what the preprocessor makes of the image.",
        galleries=[_attention(seen, shape) for seen, shape in drawn],
    )


def _attention(seen: Look, shape: tuple[int, int]) -> Gallery:
    layers = len(seen.answering)
    colors, explained = overlay.principal(seen.answering.reshape(-1, seen.answering.shape[2]).T)
    pictures = [
        Picture("the picture", overlay.uri(seen.picture)),
        Picture("of the answer", overlay.uri(overlay.heat(seen.picture, seen.answering.mean(axis=(0, 1)), shape))),
        Picture("of the question", overlay.uri(overlay.heat(seen.picture, seen.asking.mean(axis=(0, 1)), shape))),
        Picture("principal components", overlay.uri(overlay.tinted(seen.picture, colors, shape, 0.85))),
    ]
    for layer in np.unique(np.linspace(0, layers - 1, LAYERS).round().astype(int)):
        mass = seen.answering[layer].mean(axis=0)
        pictures.append(Picture(f"of the answer, layer {layer}", overlay.uri(overlay.heat(seen.picture, mass, shape))))
    asked, said = (figures.sum(axis=2).mean() for figures in (seen.asking, seen.answering))
    caption = (
        f"Attention on each patch, mean over layers and heads: the picture gets {said:.0%} of the answer's and "
        f"{asked:.0%} of the question's. Principal components: patches of one color are looked at by the same of the "
        f"{layers} x {seen.answering.shape[1]} layers and heads; the three colors show {explained:.0%} of what differs."
    )
    return Gallery(_title(seen), caption, pictures)


def _title(seen: Look) -> str:
    several = len(seen.sample.images)
    which = f" (image {seen.number + 1} of {several}, the one most looked at)" if several > 1 else ""
    answer = f" Answer: {seen.sample.answer}" if seen.sample.answer else ""
    return f"{seen.sample.prompt}{answer}{which}"


def selection(checkpoint: Checkpoint, drawn: Drawn) -> Section:
    galleries = []
    for seen, shape in drawn:
        kept = {name: selected(checkpoint, seen, method, KEEP) for name, method in selectors().items()}
        on_kept = {name: seen.answering.mean(axis=(0, 1))[own].sum() for name, own in kept.items()}
        whole = seen.answering.mean(axis=(0, 1)).sum()
        pictures = [
            Picture(
                f"{name}: {on_kept[name] / whole:.0%}",
                overlay.uri(overlay.faded(seen.picture, own.astype(float), shape)),
            )
            for name, own in kept.items()
        ]
        count = int(next(iter(kept.values())).sum())
        caption = (
            f"{count} of {len(seen.places)} patches are kept, the others faded; the number is the share of the "
            "answer's attention on this picture that the kept ones get in the whole model."
        )
        galleries.append(Gallery(_title(seen), caption, pictures))
    return Section(
        "What each selector keeps",
        f"Perception drops visual tokens before the language model reads them. Every selector at keep = {KEEP:g}, the "
        "question known; random and uniform are the baselines.",
        galleries=galleries,
    )


def eviction(
    checkpoint: Checkpoint, drawn: Drawn, levels: Mapping[str, Recipe], prepared: Mapping[str, Prepared]
) -> Section:
    galleries = []
    for seen, shape in drawn:
        pictures, left_out = [], []
        for name, recipe in levels.items():
            try:
                share = cached(checkpoint, seen, recipe, prepared[name])
            except UserError:  # a build's buckets may have room for the question of no sample
                share = None
            if share is None:
                left_out.append(name)
                continue
            most = float(share.max())
            picture = overlay.uri(overlay.faded(seen.picture, share / most if most else share, shape))
            pictures.append(Picture(f"{name}: {share.mean():.0%}, most {most:.0%}", picture))
        caption = (
            "The clearer a patch, the more layers and KV heads hold it, beside the patch that is held by most; the "
            "numbers are the share that holds a patch, the mean over all and the most."
        )
        if left_out:
            caption += (
                f" Not drawn: {', '.join(left_out)} (the store keeps no positions, or has no room for this prompt)."
            )
        if pictures:
            galleries.append(Gallery(_title(seen), caption, pictures))
    return Section(
        "What each level keeps in the cache",
        "Visual tokens behind prefill, the question known. A token that was merged into another counts as dropped.",
        galleries=galleries,
    )
