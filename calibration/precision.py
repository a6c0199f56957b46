"""The narrowest precision that each layer bears: `quantize.method = "by-layer"`.

As in `sensitivity`, a prompt is read once and its answer again, here from caches of which one layer is quantized and
the others are not. A layer's loss by a method is the KL divergence of the answer's logits from those by the
uncompressed cache. Losses of layers are taken as independent: each layer has an equal share of what all may lose.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.evaluate import prompt_of
from calibration.prepare import prepare
from calibration.samples import Sample, model_inputs
from calibration.sensitivity import divergence, read
from engines.config import parse
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.recipe import Recipe
from export.stages.quantize import Methods
from export.stages.quantize.blockwise import Blockwise
from export.stages.quantize.quantize import Quantize
from export.stages.tokens import Tokens

METHODS = ("int4", "k8v4", "int8", "float16")  # narrowest first

Through = Callable[[Tokens], Tokens]  # the tokens of a layer, as its store gives them back


def tables(recipe: Recipe, methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
    """`[quantize]` by each method, with the knobs of the recipe's own that it has, too, where they are set.

    Raises:
        UserError: no such method, or the recipe has one for each layer already.
    """
    own = recipe.quantize
    if own.method == "by-layer" or "by-layer" in methods:
        raise UserError(f"recipe {recipe.name}: give one, and methods, that are of all layers, not by-layer")
    found = []
    for method in dict.fromkeys(methods):
        default = method_of(recipe, {"method": method})
        shared = dataclasses.fields(default) if isinstance(own, Blockwise) and isinstance(default, Blockwise) else ()
        knobs = {f.name: getattr(own, f.name) for f in shared if f.name != "method" and hasattr(own, f.name)}
        found.append({"method": method} | {k: v for k, v in knobs.items() if v != getattr(default, k)})
    return found


def method_of(recipe: Recipe, table: dict[str, Any]) -> Methods:
    """The method that a table describes, as part of a recipe."""
    return parse(Recipe, {"name": recipe.name, "quantize": table}, f"recipe {recipe.name}").quantize


def through(method: Quantize, known: KeyStatistics | None) -> Through:
    """How a layer's store, by its calibrated constants, gives back its tokens; their order may be another."""
    layer, center = method.of_layer(known), known.center[:, None] if known and method.center else 0.0

    def store_and_restore(tokens: Tokens) -> Tokens:
        kept = layer.arrange(dataclasses.replace(tokens, key=tokens.key - center))
        key, value = layer.restore(layer.quantize(kept), kept.key.shape[-1])
        return dataclasses.replace(kept, key=key + center, value=value)

    return store_and_restore


def measure(
    checkpoint: Checkpoint,
    recipe: Recipe,
    samples: Sequence[Sample],
    choices: Sequence[dict[int, Through]],
    later: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Read the samples' answers from caches some layers of which went through a store.

    Args:
        recipe: of the checkpoint's decoder; nothing is dropped and nothing shortened.
        choices: what to try: the layers that are quantized, and how.
        later: whether the question follows the compression; samples without image are left out then.
        progress: called once a sample.

    Returns:
        Loss by each choice, nats a token of the answers, [choices].

    Raises:
        UserError: no sample is left.
    """
    losses, tokens = np.zeros(len(choices)), 0
    for sample in samples:
        if sample.images or not later:
            known = read(checkpoint, recipe, prompt_of(checkpoint, model_inputs(checkpoint, sample)), later)
            for i, choice in enumerate(choices):
                cache = [choice[layer](whole) if layer in choice else whole for layer, whole in enumerate(known.cache)]
                losses[i] += divergence(checkpoint.decoder, cache, known)
            tokens += len(known.log_probs)
        progress()
    if not tokens:
        raise UserError("no sample has an answer that is read from the cache: give others by --samples")
    return losses / tokens


def choose(losses: NDArray[np.float64], limit: float) -> list[int]:
    """The first method of each layer whose loss is at most the layer's share of the limit; the last if none is.

    Args:
        losses: [layers, methods], the narrowest method first.
    """
    fits = losses <= limit / len(losses)
    fits[:, -1] = True
    return fits.argmax(axis=1).tolist()


@dataclass(frozen=True)
class Found:
    """The losses [layers, methods], the number of each layer's method, and what all layers lose by these."""

    losses: NDArray[np.float64]
    chosen: list[int]
    together: float


def find(
    checkpoint: Checkpoint,
    recipe: Recipe,
    samples: Sequence[Sample],
    tables: Sequence[dict[str, Any]],
    limit: float,
    later: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Found:
    """The narrowest method that each layer bears.

    Args:
        tables: the methods, narrowest first.
        limit: what all layers may lose, nats a token of an answer.
        progress: called twice a sample.
    """
    # Layers are those of the decoder that the recipe makes; calibrated is what any of the methods needs.
    every = method_of(recipe, {"method": "by-layer", "layers": [*tables]})
    recipe = dataclasses.replace(recipe, quantize=every)
    found = prepare(checkpoint, {recipe.name: recipe}, samples)[recipe.name]
    checkpoint = dataclasses.replace(checkpoint, decoder=found.decoder)
    layers, known = range(found.decoder.num_layers), found.statistics
    methods = [method_of(recipe, table) for table in tables]
    ways = [[through(method, known[layer] if known else None) for method in methods] for layer in layers]

    def measured(choices: list[dict[int, Through]]) -> NDArray[np.float64]:
        return measure(checkpoint, recipe, samples, choices, later, progress)

    losses = measured([{layer: way} for layer in layers for way in ways[layer]]).reshape(len(layers), -1)
    chosen = choose(losses, limit)
    return Found(losses, chosen, float(measured([{layer: ways[layer][i] for layer, i in enumerate(chosen)}])[0]))


def fragment(chosen: Sequence[dict[str, Any]]) -> str:
    """`[quantize]` of a recipe with these tables, one a layer."""

    def inline(table: dict[str, Any]) -> str:
        if len(table) == 1:
            return json.dumps(table["method"])
        return f"{{ {', '.join(f'{name} = {json.dumps(value)}' for name, value in table.items())} }}"

    return f'[quantize]\nmethod = "by-layer"\nlayers = [{", ".join(map(inline, chosen))}]'
