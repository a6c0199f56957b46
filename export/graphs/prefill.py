"""A whole prompt -> logits, a compressed store and the window."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.bundle import TensorSpec
from export.attention import LOWEST, full_attention
from export.compress import KeyStatistics
from export.graphs.graph import Decoding
from export.graphs.state import State
from export.stages.importance.importance import Observation
from export.stages.tokens import PADDING, Tokens, first_marks


class Prefill(Decoding):
    """Embeddings of a left-padded prompt -> logits of its last token, compressed store, window."""

    kind = "prefill"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        shape = [state.batch, state.length]
        self._takes(
            TensorSpec("embeddings", "float32", [*shape, state.decoder.hidden_size]),
            TensorSpec("positions", "int32", shape),
            TensorSpec("kinds", "int32", shape),
            *([TensorSpec("segments", "int32", shape)] if state.recipe.needs_segments else []),
        )
        self.outputs = ["logits", *state.specs()]

    def compute(  # type: ignore[override]
        self, embeddings: Tensor, positions: Tensor, kinds: Tensor, segments: Tensor | None = None
    ) -> dict[str, Tensor]:
        state, length = self.state, self.state.length
        real = kinds != PADDING
        order = torch.arange(length)
        visible = (order[:, None] >= order[None, :]) & real[:, None, :]
        bias = torch.where(visible, 0.0, LOWEST)  # [B, S, S]
        importance = state.recipe.importance
        observers = importance.observers(length)
        cached: dict[int, Tokens] = {}
        places = torch.where(real, positions, -1)
        empty = torch.where(real, 0.0, -torch.inf)
        marks = torch.zeros_like(kinds) if segments is None else first_marks(kinds, segments)

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            key = self.centred(key, layer)
            mass = torch.zeros(key.shape[:3])
            if observers:
                last = slice(length - observers, length)
                seen = visible[:, last] & real[:, last, None]
                mass = importance.observe(
                    Observation(
                        query[:, :, last], key, bias[:, last], seen, kinds, scale,
                        center=self.center_of(layer), positions=places,
                        rotary=lambda at: self.language_model.get_submodule("rotary_emb")(embeddings, at),
                    )
                )  # fmt: skip
            mine, its, holes, flags = (x[:, None].expand(-1, key.shape[1], -1) for x in (places, kinds, empty, marks))
            cached[layer] = Tokens(key, value, mine, its, holes, mass, self.center_of(layer), flags)
            return full_attention(query, key, value, bias, scale)

        result = {"logits": self.logits(embeddings, positions, attention)}
        split = length - state.recent
        for layer, tokens in cached.items():
            result |= {f"{name}.{layer}": t for name, t in self.layer(layer)(tokens[:split]).items()}
        free = state.window - state.recent
        rows = [cached[layer] for layer in range(state.decoder.num_layers)]
        dtype = getattr(torch, state.recipe.window.dtype)
        result["key_window"] = pad(torch.cat([t.key[:, :, split:] for t in rows], dim=1), (0, 0, 0, free)).to(dtype)
        result["value_window"] = pad(torch.cat([t.value[:, :, split:] for t in rows], dim=1), (0, 0, 0, free)).to(dtype)
        result["window_mass"] = pad(torch.cat([t.mass[:, :, split:] for t in rows], dim=1), (0, free))
        result["window_bias"] = pad(empty[:, split:], (0, free), value=-torch.inf)
        result["window_positions"] = pad(places[:, split:], (0, free), value=-1)
        result["window_kinds"] = pad((kinds + marks)[:, split:], (0, free), value=PADDING).to(torch.int8)
        return result
