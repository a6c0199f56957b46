"""Store and full window -> a new store, and a window with room."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from export.compress import KeyStatistics
from export.graphs.graph import NEW, Stateful
from export.graphs.state import State
from export.stages.tokens import PADDING, TEXT, Tokens, unpacked


def _kinds(tensors: dict[str, Tensor], region: str) -> tuple[Tensor, Tensor]:
    """Kinds and marks of the tokens in store or window, int32; all TEXT where no stage needs them, and none is kept."""
    if (name := f"{region}_kinds") in tensors:
        return unpacked(tensors[name].int())
    kinds = torch.full_like(tensors[f"{region}_positions"], TEXT)
    return kinds, torch.zeros_like(kinds)


class Compact(Stateful):
    """A full window and the store -> a new store, and a window with only its last `recent` tokens."""

    kind = "compact"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        self._takes(*state.specs().values())
        self.outputs = [NEW + name for name in state.specs()]

    def compute(self, **state: Tensor) -> dict[str, Tensor]:
        window, kept = self.state.window, self.state.recent
        old, decoder = window - kept, self.state.decoder
        window_mass = state.get("window_mass", torch.zeros(state["key_window"].shape[:3]))
        newest = state["window_positions"].amax(dim=1)
        result: dict[str, Tensor] = {}
        for layer in range(decoder.num_layers):
            heads, shared = decoder.heads(layer), (-1, decoder.kv_heads[layer], -1)
            store, compress = self.state_of(state, layer), self.layer(layer)
            key, value = compress.quantize.restore(store, decoder.head_dim)
            kinds, marks = _kinds(store, "store")
            new_kinds, new_marks = (x[:, None, :old].expand(shared) for x in _kinds(state, "window"))
            center = self.center_of(layer)
            slots = Tokens(
                key=key,
                value=value,
                positions=store["store_positions"],
                kinds=kinds,
                bias=store["store_bias"].float(),
                mass=store.get("store_mass", torch.zeros(store["store_bias"].shape)),
                center=center,
                marks=marks,
            )
            rows = Tokens(
                key=state["key_window"][:, heads, :old].float(),
                value=state["value_window"][:, heads, :old].float(),
                positions=state["window_positions"][:, None, :old].expand(shared),
                kinds=new_kinds,
                bias=state["window_bias"][:, None, :old].expand(shared),
                mass=window_mass[:, heads, :old],
                center=center,
                marks=new_marks,
            )
            tokens = self.reachable(compress.quantize.rearrange(slots) + rows, layer, newest)
            stored = None
            if compress.moves:
                new = compress.quantize.quantize(rows)
                stored = {name: torch.cat([store[name], each], dim=2) for name, each in new.items()}
            result |= {f"{name}.{layer}": t for name, t in compress(tokens, stored).items()}
        for name in ("key_window", "value_window"):
            result[name] = pad(state[name][:, :, old:], (0, 0, 0, old))
        result["window_mass"] = pad(window_mass[..., old:], (0, old))
        result["window_bias"] = pad(state["window_bias"][:, old:], (0, old), value=-torch.inf)
        result["window_positions"] = pad(state["window_positions"][:, old:], (0, old), value=-1)
        if "window_kinds" in state:
            moved = state["window_kinds"].int()[:, old:]  # TensorRT takes an int8 constant for a quantized number
            result["window_kinds"] = pad(moved, (0, old), value=PADDING).to(torch.int8)
        return {NEW + name: tensor for name, tensor in result.items()}
