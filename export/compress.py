"""Compress: store and window rows in, a smaller store out. Prefill ends with it, compaction is nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import export.operators  # noqa: F401  registers torch.ops.unicache
from export.recipe import Recipe
from export.stages.merge import Evict
from export.stages.quantize.quantize import ROWS
from export.stages.quantize.quantize import KeyStatistics as KeyStatistics
from export.stages.tokens import Tokens


class Compress(nn.Module):
    """Score, protect, select, merge and quantize the tokens of one layer: what a recipe's stages do, in their order."""

    def __init__(self, recipe: Recipe, capacity: int, depth: float, statistics: KeyStatistics | None):
        super().__init__()
        self.recipe, self.capacity, self.depth = recipe, capacity, depth
        self.importance, self.modality, self.protect = recipe.importance, recipe.modality, recipe.protect
        self.merge, self.quantize = recipe.merge, recipe.quantize.of_layer(statistics)

    @property
    def moves(self) -> bool:
        """Whether a stored row that is kept moves as it is: neither merged into, nor to be quantized among others."""
        return isinstance(self.merge, Evict) and self.quantize.by_row

    def select(self, tokens: Tokens, stored: dict[str, Tensor] | None = None) -> tuple[Tokens, Tensor]:
        """The `capacity` best tokens in their original order, and their indices [batch, kv_heads, capacity].

        Args:
            stored: the tokens as the store holds them. Its keys and values are kept, in place of the tokens' own.
        """
        tokens = tokens.padded(self.capacity)
        if stored is None and tokens.key.shape[2] == self.capacity:  # nothing to choose
            return tokens, torch.arange(self.capacity).expand(tokens.mass.shape)
        score = self.modality(self.importance(tokens, self.depth), tokens, self.capacity)
        score = self.protect(score, tokens, self.depth, self.capacity)
        rows = (tokens.key, tokens.value) if stored is None else (stored[name] for name in ROWS)
        key, value, positions, bias, index = torch.ops.unicache.topk_gather(
            score, *rows, tokens.positions, tokens.bias, self.capacity
        )
        kinds, mass, marks = (x.gather(2, index) for x in (tokens.kinds, tokens.mass, tokens.marks))
        kept = Tokens(key, value, positions, kinds, bias, mass, tokens.center, marks)
        return (self.merge(tokens, kept, index) if stored is None else kept), index

    def forward(self, tokens: Tokens, stored: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The layer's store tensors by their state names, without the layer's number.

        Args:
            stored: the tokens as the store holds them, where the stage `moves` rows.
        """
        kept, index = self.select(tokens, stored)
        if stored is None:
            kept = self.quantize.arrange(kept)
            store = self.quantize.quantize(kept)
        else:
            scales = {name: x for name, x in stored.items() if name not in ROWS}
            store = dict(zip(ROWS, (kept.key, kept.value), strict=True))
            store |= {
                name: x.gather(2, index[..., None].expand(*index.shape, x.shape[3])) for name, x in scales.items()
            }
        store |= {"store_bias": kept.bias.half(), "store_positions": kept.positions, "store_mass": kept.mass}
        return store | {"store_kinds": (kept.kinds + kept.marks).to(torch.int8)}
