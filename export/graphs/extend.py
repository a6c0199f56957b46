"""Several tokens more: the next of a long prompt, or a new turn of a chat."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.bundle import TensorSpec
from export.attention import LOWEST
from export.graphs.decode import Decode
from export.stages.tokens import PADDING


class Extend(Decode):
    """A left-padded chunk of tokens and the state -> what decoding them one after another would give.

    The logits are the last token's; `new_key`, `new_value` and `new_mass` have a row for each of the chunk, of which
    those of padding are for nobody. The window must have a free slot for every token.
    """

    kind = "extend"

    def tokens(self) -> list[TensorSpec]:
        shape = [self.state.batch, self.state.chunk]
        return [
            TensorSpec("embeddings", "float32", [*shape, self.state.decoder.hidden_size]),
            *([] if self.state.decoder.mrope else [TensorSpec("positions", "int32", shape)]),
            TensorSpec("kinds", "int32", shape),
            *self.more(shape),
        ]

    def compute(self, embeddings: Tensor, kinds: Tensor, **tensors: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        order, real = torch.arange(self.state.chunk), kinds != PADDING
        causal, itself = order[:, None] >= order, order[:, None] == order
        among = torch.where(causal & real[:, None], 0.0, -torch.inf)
        # A row of padding looks at itself only: no token of store and window receives anything from it.
        among = torch.where(itself & ~real[:, None], -LOWEST, among)
        positions = tensors["position_ids" if self.state.decoder.mrope else "positions"]
        return self.read(embeddings, positions, among, real.sum(dim=1), tensors, tensors.get("deepstack"))
