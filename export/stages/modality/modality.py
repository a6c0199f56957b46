"""The interface of modality budgets: scores in, priorities out, so that one top-k takes each modality's quota."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from export.stages.stage import Stage
from export.stages.tokens import Tokens


class Modality(Stage):
    """Base of the modality budgets. Quotas may depend on the data: the graph's shapes do not know of them."""

    def by_layer(self, layers: int) -> Sequence[Modality]:
        """The stage of each layer."""
        return [self] * layers

    def forward(self, score: Tensor, tokens: Tokens, capacity: int) -> Tensor:
        """Priorities by which the `capacity` highest are kept, [batch, kv_heads, tokens], float32, finite.

        Args:
            score: what the tokens are worth, [batch, kv_heads, tokens], float32.
            tokens: the tokens to choose from. Empty slots may get any priority.
            capacity: slots of the store.
        """
        raise NotImplementedError
