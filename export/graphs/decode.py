"""One token more."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.bundle import TensorSpec
from export.compress import KeyStatistics
from export.graphs.graph import NEW, Decoding
from export.graphs.state import State

NOT_DECODED = ("store_positions", "window_positions", "store_kinds", "window_kinds")  # decode does not read them


class Decode(Decoding):
    """One token's embedding and the state -> logits and the rows to write into the window."""

    kind = "decode"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        specs = {name: spec for name, spec in state.specs().items() if not name.startswith(NOT_DECODED)}
        self._takes(
            TensorSpec("embedding", "float32", [state.batch, 1, state.decoder.hidden_size]),
            TensorSpec("position", "int32", [state.batch, 1]),
            *specs.values(),
        )
        masses = [name for name in specs if "_mass" in name]
        self.outputs = [
            "logits",
            "new_key",
            "new_value",
            *(["new_mass", *(NEW + name for name in masses)] if masses else []),
        ]

    def compute(self, embedding: Tensor, position: Tensor, **state: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        new: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        itself = torch.zeros(self.state.batch, 1)
        window_bias = torch.cat([state["window_bias"], itself], dim=1)[:, None]  # [B, 1, W+1]

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            key = self.centred(key, layer)
            store, heads = self.state_of(state, layer), self.state.decoder.heads(layer)
            key_window = torch.cat([state["key_window"][:, heads].float(), key], dim=2)
            value_window = torch.cat([state["value_window"][:, heads].float(), value], dim=2)
            output, on_store, on_window = self.layer(layer).quantize.attend(
                query, store, key_window, value_window, window_bias, scale
            )
            new[layer] = (key, value, on_store, on_window)
            return output

        result = {"logits": self.logits(embedding, position, attention)}
        rows = [new[layer] for layer in range(self.state.decoder.num_layers)]
        dtype = getattr(torch, self.state.recipe.window.dtype)
        result["new_key"] = torch.cat([key for key, *_ in rows], dim=1).to(dtype)
        result["new_value"] = torch.cat([value for _, value, *_ in rows], dim=1).to(dtype)
        if self.state.counts_mass:
            update = self.state.recipe.importance.update
            on_old, on_new = [], []
            for layer, (_, _, on_store, on_window) in enumerate(rows):
                row, old = (on_store, on_window), state["window_mass"][:, self.state.decoder.heads(layer)]
                result[f"new_store_mass.{layer}"] = update(state[f"store_mass__{layer}"], on_store, row)
                on_old.append(update(old, on_window[..., :-1], row))
                on_new.append(update(torch.zeros_like(on_window[..., -1:]), on_window[..., -1:], row))
            result["new_window_mass"], result["new_mass"] = torch.cat(on_old, dim=1), torch.cat(on_new, dim=1)
        return result
