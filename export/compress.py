"""Compress: store and window rows in, a smaller store out. Prefill ends with it, compaction is nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import export.operators  # noqa: F401  registers torch.ops.unicache
from export.recipe import Recipe
from export.stages.tokens import Tokens


@dataclass(frozen=True)
class KeyStatistics:
    """Calibrated per layer, over all tokens of the samples, after RoPE.

    Attributes:
        center: mean key of each head, subtracted from every key, [kv_heads, head_dim], float32.
        absmax: largest magnitude of each channel of the centred keys, [kv_heads, head_dim], float32.
    """

    center: Tensor
    absmax: Tensor


class Compress(nn.Module):
    """Score, protect, select, merge and quantize the tokens of one layer: what a recipe's stages do, in their order."""

    key_scale: Tensor

    def __init__(self, recipe: Recipe, capacity: int, depth: float, statistics: KeyStatistics | None):
        super().__init__()
        self.recipe, self.capacity, self.depth = recipe, capacity, depth
        self.importance, self.modality, self.protect = recipe.importance, recipe.modality, recipe.protect
        self.merge, self.int8 = recipe.merge, recipe.int8
        if recipe.store == "int8":
            assert statistics is not None
            self.register_buffer("key_scale", self.int8.key_scale(statistics.absmax))

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
        kept = self.select(tokens)[0]
        store = {"key_store": kept.key, "value_store": kept.value}
        if self.recipe.store == "int8":
            values, scale = self.int8.values(kept.value)
            store = {"key_store": self.int8.keys(kept.key, self.key_scale), "value_store": values, "value_scale": scale}
        elif self.recipe.store == "float16":
            store = {name: rows.half() for name, rows in store.items()}
        store |= {"store_bias": kept.bias.half(), "store_positions": kept.positions, "store_mass": kept.mass}
        return store | {"store_kinds": (kept.kinds + kept.marks).to(torch.int8)}

    def restore(self, store: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Float32 keys and values, [batch, kv_heads, capacity, head_dim], of a store."""
        key, value = store["key_store"].float(), store["value_store"].float()
        if self.recipe.store == "int8":
            key, value = key * self.key_scale[:, None], value * store["value_scale"].float()
        return key, value
