"""One token more."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.bundle import TensorSpec
from export.attention import near
from export.compress import KeyStatistics
from export.graphs.graph import NEW, Decoding, Kind
from export.graphs.state import State


class Decode(Decoding):
    """One token's embedding and the state -> logits and the rows to write into the window."""

    kind: Kind = "decode"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        specs = {name: spec for name, spec in state.specs().items() if self._reads(name)}
        self._takes(*self.tokens(), *specs.values())
        masses = [name for name in specs if "_mass" in name]
        self.outputs = [
            "logits",
            "new_key",
            "new_value",
            *(["new_mass", *(NEW + name for name in masses)] if masses else []),
        ]

    def _reads(self, name: str) -> bool:
        """Where a token lies matters to sliding windows only; what it is, to compaction only."""
        kind, _, layer = name.partition(".")
        if kind == "store_positions":
            return self.state.decoder.sliding_window(int(layer)) is not None
        return kind not in ("store_kinds", "window_kinds") and (kind != "window_positions" or self.state.decoder.slides)

    def tokens(self) -> list[TensorSpec]:
        """What is read, beside the state."""
        batch = self.state.batch
        return [
            TensorSpec("embedding", "float32", [batch, 1, self.state.decoder.hidden_size]),
            TensorSpec("position", "int32", [batch, 1]),
        ]

    def compute(self, embedding: Tensor, position: Tensor, **state: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return self.read(embedding, position, torch.zeros(self.state.batch, 1, 1), 1, state)

    def read(
        self,
        embeddings: Tensor,
        positions: Tensor,
        among: Tensor,
        count: int | Tensor,
        state: dict[str, Tensor],
        deepstack: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Read `tokens` rows at once.

        Args:
            embeddings: [batch, tokens, hidden_size]; positions: [batch, tokens], position ids [3, batch, tokens].
            among: added to what the rows look at of each other, [batch, tokens, tokens], as `window_bias` in
                `operators.quant_kv_attention`.
            count: of the rows that are no padding, [batch].
            deepstack: [taps, batch, tokens, hidden_size].
        """
        new: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        rows, importance, edge = among.shape[1], self.state.recipe.importance, self.state.window
        window_bias = torch.cat([state["window_bias"][:, None].expand(-1, rows, -1), among], dim=2)
        by_query = self.state.counts_mass and importance.by_query and rows > 1

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            key = self.centred(key, layer)
            store, heads = self.state_of(state, layer), self.state.decoder.heads(layer)
            store, bias = self._in_sight(layer, positions, store, window_bias, state.get("window_positions"))
            key_window = torch.cat([state["key_window"][:, heads].float(), key], dim=2)
            value_window = torch.cat([state["value_window"][:, heads].float(), value], dim=2)
            attend = self.layer(layer).quantize.attend
            rest = (query, store, key_window, value_window, bias, scale)
            output, *received = attend(*rest, by_query=True) if by_query else attend(*rest)
            on_store, on_window = received if by_query else [mass[:, :, None] for mass in received]
            new[layer] = (key, value, on_store, on_window)
            return output

        result = {"logits": self.logits(embeddings, positions, attention, deepstack)}
        layers = [new[layer] for layer in range(self.state.decoder.num_layers)]
        dtype = getattr(torch, self.state.recipe.window.dtype)
        result["new_key"] = torch.cat([key for key, *_ in layers], dim=1).to(dtype)
        result["new_value"] = torch.cat([value for _, value, *_ in layers], dim=1).to(dtype)
        if self.state.counts_mass:
            on_old, on_new = [], []
            for layer, (_, _, on_store, on_window) in enumerate(layers):
                row, old = (on_store, on_window), state["window_mass"][:, self.state.decoder.heads(layer)]
                of_old, of_new = on_window[..., :edge], on_window[..., edge:]
                store_mass = state[f"store_mass__{layer}"]
                result[f"new_store_mass.{layer}"] = importance.update(store_mass, on_store, row, count)
                on_old.append(importance.update(old, of_old, row, count))
                on_new.append(importance.update(torch.zeros_like(of_new[:, :, 0]), of_new, row, count))
            result["new_window_mass"], result["new_mass"] = torch.cat(on_old, dim=1), torch.cat(on_new, dim=1)
        return result

    def _in_sight(
        self,
        layer: int,
        positions: Tensor,
        store: dict[str, Tensor],
        bias: Tensor,
        window_positions: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Store and window bias as the rows at `positions` see them through the layer's sliding window.

        One row's bias of the store is what the operator takes; that of several is [batch, kv_heads, rows, slots].
        """
        sliding = self.state.decoder.sliding_window(layer)
        if sliding is None or window_positions is None:
            return store, bias
        slots = near(positions[:, None], store["store_positions"], sliding)
        on_store = torch.where(slots, store["store_bias"][:, :, None], -torch.inf)
        rows = near(positions, torch.cat([window_positions, positions], dim=1), sliding)
        on_store = on_store[:, :, 0] if on_store.shape[2] == 1 else on_store
        return store | {"store_bias": on_store}, torch.where(rows, bias, -torch.inf)
