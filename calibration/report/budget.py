"""What each level allocates for a prompt of one image: slots and bytes, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calibration.report import plots
from calibration.report.page import Plot, Section, Table
from engines.errors import UserError, one_line
from export.arguments import DEFAULT_TEXT
from export.buckets import bucket_length, text_tokens
from export.checkpoint import Checkpoint
from export.graphs import State
from export.pipeline import Prepared
from export.recipe import Recipe

QUESTION = DEFAULT_TEXT[True][0]  # tokens
KIB = 1024


@dataclass(frozen=True)
class Size:
    """A level's KV state for a prompt of one image and a question.

    Attributes:
        length: of its bucket.
        slots, layers: of every layer's store, and its bytes.
        total: bytes, as `State.nbytes` counts them: what the runtime allocates; the window's are in it.
        uncompressed: bytes of an fp16 cache of the prompt before anything of it is dropped.
    """

    length: int
    slots: list[int]
    layers: list[int]
    window: int
    total: int
    uncompressed: int

    @property
    def share(self) -> float:
        return self.total / self.uncompressed


def size_of(checkpoint: Checkpoint, recipe: Recipe, prepared: Prepared) -> Size:
    """
    Raises:
        UserError: such a prompt does not fit the recipe.
    """
    text = text_tokens(checkpoint, 1, QUESTION)
    state = State(prepared.decoder, recipe, bucket_length(checkpoint, recipe, 1, text))
    layers = [0] * prepared.decoder.num_layers
    for spec in state.specs().values():
        _, _, layer = spec.name.partition(".")
        if layer:
            layers[int(layer)] += spec.nbytes
    tokens = text + checkpoint.image_tokens
    return Size(
        length=state.length,
        slots=state.capacities,
        layers=layers,
        window=state.window,
        total=state.nbytes,
        uncompressed=tokens * prepared.decoder.fp16_token_bytes,
    )


def budget(checkpoint: Checkpoint, levels: Mapping[str, Recipe], prepared: Mapping[str, Prepared]) -> Section:
    sizes, unfit = {}, []
    for name, recipe in levels.items():
        try:
            sizes[name] = size_of(checkpoint, recipe, prepared[name])
        except UserError as error:
            unfit.append(f" {one_line(error)}.")
    if not sizes:
        return Section("Budget")
    tokens = text_tokens(checkpoint, 1, QUESTION) + checkpoint.image_tokens
    whole = np.array(checkpoint.decoder.model_kv_heads) * checkpoint.decoder.head_dim * 4 * tokens / KIB
    header = ["level", "of fp16", "all, KiB", "store, KiB", "slots a layer", "window, tokens", "description"]
    rows = [[name, *_cells(size), levels[name].description] for name, size in sizes.items()]
    # A level in full precision would leave no room for the others in a plot of bytes.
    drawn = {name: size for name, size in sizes.items() if size.share <= 1} or sizes
    beyond = [name for name in sizes if name not in drawn]
    note = f" Not drawn, since larger than that cache: {', '.join(beyond)}." if beyond else ""
    parts = {name: {"store": sum(size.layers), "window": size.total - sum(size.layers)} for name, size in drawn.items()}
    bars = {name: {part: held / KIB for part, held in own.items()} for name, own in parts.items()}
    plotted = [
        (
            "Slots by layer",
            "Tokens that each layer's store holds, beside the whole prompt.",
            plots.by_layer(
                # In this order a level has one color in every plot.
                {name: np.array(sizes[name].slots, float) for name in (*drawn, *beyond)},
                "slots",
                "slots",
                {"prompt": np.full(len(whole), tokens)},
            ),
        ),
        (
            "Bytes by layer",
            f"What each layer's store takes, beside an fp16 cache of the whole prompt.{note}",
            plots.by_layer(
                {name: np.array(size.layers) / KIB for name, size in drawn.items()},
                "KiB",
                "bytes",
                {"fp16 cache": whole},
            ),
        ),
        (
            "Bytes by level",
            f"All that the runtime allocates for the cache, beside an fp16 cache of the whole prompt.{note}",
            plots.bars(bars, "KiB", "bytes by level", {"fp16 cache": whole.sum()}),
        ),
    ]
    return Section(
        "Budget",
        f"For a prompt of one image and a question of {QUESTION} tokens, {tokens} tokens before anything is dropped; "
        f"an fp16 cache of them takes {whole.sum():.0f} KiB.{''.join(unfit)}",
        tables=[
            Table(
                "What the runtime allocates: store and window; scales, positions and biases included.", [header, *rows]
            )
        ],
        plots=[Plot(*plot) for plot in plotted],
    )


def _cells(size: Size) -> list[str]:
    low, high = min(size.slots), max(size.slots)
    spread = f"{low}" if low == high else f"{low} to {high}"
    held = [f"{nbytes / KIB:.1f}" for nbytes in (size.total, sum(size.layers))]
    return [f"{size.share:.1%}", *held, spread, str(size.window)]
