"""Compress: store and window rows in, a smaller store out. Prefill ends with it, compaction is nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import export.operators  # noqa: F401  registers torch.ops.unicache
from export.recipe import Recipe
from export.stages.quantize.quantize import KeyStatistics as KeyStatistics
from export.stages.tokens import Tokens


class Compress(nn.Module):
    """Score, protect, select, merge and quantize the tokens of one layer: what a recipe's stages do, in their order."""

    def __init__(self, recipe: Recipe, capacity: int, depth: float, statistics: KeyStatistics | None):
        super().__init__()
        self.recipe, self.capacity, self.depth = recipe, capacity, depth
        self.importance, self.modality, self.protect = recipe.importance, recipe.modality, recipe.protect
        self.merge, self.quantize = recipe.merge, recipe.quantize.of_layer(statistics)

    def select(self, tokens: Tokens) -> tuple[Tokens, Tensor]:
        """The `capacity` best tokens in their original order, and their indices [batch, kv_heads, capacity]."""
        tokens = tokens.padded(self.capacity)
        if tokens.key.shape[2] == self.capacity:  # nothing to choose
            return tokens, torch.arange(self.capacity).expand(tokens.mass.shape)
        score = self.modality(self.importance(tokens, self.depth), tokens, self.capacity)
        score = self.protect(score, tokens, self.depth, self.capacity)
        key, value, positions, bias, index = torch.ops.unicache.topk_gather(
            score, tokens.key, tokens.value, tokens.positions, tokens.bias, self.capacity
        )
        kinds, mass, marks = (x.gather(2, index) for x in (tokens.kinds, tokens.mass, tokens.marks))
        kept = Tokens(key, value, positions, kinds, bias, mass, tokens.center, marks)
        return self.merge(tokens, kept, index), index

    def forward(self, tokens: Tokens) -> dict[str, Tensor]:
        """Returns the layer's store tensors by their state names, without the layer's number."""
        kept = self.quantize.arrange(self.select(tokens)[0])
        store = {"store_bias": kept.bias.half(), "store_positions": kept.positions, "store_mass": kept.mass}
        return self.quantize.quantize(kept) | store | {"store_kinds": (kept.kinds + kept.marks).to(torch.int8)}
