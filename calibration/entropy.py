"""How spread out each layer's attention is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from calibration.observe import run
from calibration.samples import Sample
from calibration.statistics.attention import entropy
from export.attention import attention_logits, mix_values
from export.checkpoint import Checkpoint
from export.graphs import Decoder
from export.recipe import Recipe
from export.stages.budget import Pyramid


def attention_entropy(
    checkpoint: Checkpoint, samples: Sequence[Sample], progress: Callable[[], None] = lambda: None
) -> list[float]:
    """H = -Σ a log a over the tokens that a query looks at, mean over queries and heads of all samples, one a layer.

    Args:
        progress: called once a sample.
    """
    total = [0.0] * checkpoint.decoder.num_layers

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> Tensor:
        weights = (attention_logits(query, key, scale) + mask).softmax(dim=-1)
        total[layer] += entropy(weights).mean(dim=(1, 2)).sum().item()
        return mix_values(weights, value)

    tokens = run(checkpoint, samples, attention, progress)
    return [summed / tokens for summed in total]


def with_entropy(
    checkpoint: Checkpoint,
    recipes: dict[str, Recipe],
    decoders: dict[str, Decoder],
    samples: Sequence[Sample],
    task: Callable[[str], Callable[[], None]] = lambda what: lambda: None,
) -> dict[str, Recipe]:
    """The recipes, the entropy filled in where a budget is shared out by it.

    Args:
        decoders: of each recipe, its heads merged and its positions stretched.
        task: called with what is about to be measured; what it returns is called once a sample.
    """
    measured: dict[int, list[float]] = {}  # by decoder

    def filled(recipe: Recipe, decoder: Decoder) -> Recipe:
        budget, key = recipe.budget, id(decoder)
        if not isinstance(budget, Pyramid) or not budget.needs_entropy:
            return recipe
        if key not in measured:
            own = dataclasses.replace(checkpoint, decoder=decoder)
            measured[key] = attention_entropy(own, samples, task("measuring attention"))
        return dataclasses.replace(recipe, budget=dataclasses.replace(budget, entropy=measured[key]))

    return {name: filled(recipe, decoders[name]) for name, recipe in recipes.items()}
