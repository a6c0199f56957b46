"""The KV state of a bucket: names, shapes and dtypes, stated once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from engines.bundle import TensorSpec
from engines.errors import UserError
from export.recipe import Recipe


@dataclass(frozen=True)
class Decoder:
    """The parts of a Hugging Face model that make logits from embeddings, and its sizes."""

    language_model: nn.Module
    head: nn.Module
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class State:
    """Names, shapes and dtypes of the KV state of one bucket (batch B, layers L, window W, capacities C_l)."""

    decoder: Decoder
    recipe: Recipe
    length: int
    batch: int = 1

    @property
    def capacities(self) -> list[int]:
        """C_l of every layer: by the recipe's share of tokens, or by what its share of bytes leaves for the store.

        Raises:
            UserError: the window alone takes the bytes that the recipe allows.
        """
        budget, layers = self.recipe.budget, self.decoder.num_layers
        if budget.kv_bytes is None:
            return budget.capacities(budget.keep * self.length, layers, self.length)
        fp16_token = 2 * layers * self.decoder.num_kv_heads * self.decoder.head_dim * 2 * self.batch
        window = sum(spec.nbytes for spec in self._specs([0] * layers).values())
        slot = sum(spec.nbytes for spec in self._specs([1] * layers).values()) - window  # one in every layer
        slots = (budget.kv_bytes * self.length * fp16_token - window) / slot
        if slots < budget.least:
            raise UserError(
                f"recipe {self.recipe.name}: kv_bytes = {budget.kv_bytes} leaves {slots:.1f} slots a layer beside the "
                f"window of {self.window} in a bucket of {self.length} tokens: raise kv_bytes or shorten the window"
            )
        return budget.capacities(slots, layers, self.length)

    @property
    def window(self) -> int:
        return self.recipe.window.sizes(self.length)[0]

    @property
    def recent(self) -> int:
        return self.recipe.window.sizes(self.length)[1]

    @property
    def compacts(self) -> bool:
        return self.recipe.window.compact

    def specs(self) -> dict[str, TensorSpec]:
        """name -> spec, store first."""
        return self._specs(self.capacities)

    def _specs(self, capacities: list[int]) -> dict[str, TensorSpec]:
        d, heads = self.decoder, [self.batch, self.decoder.num_kv_heads]
        specs: dict[str, tuple[str, list[int]]] = {}
        for layer, slots in enumerate(capacities):
            store = {
                "key_store": (self.recipe.store, [*heads, slots, d.head_dim]),
                "value_store": (self.recipe.store, [*heads, slots, d.head_dim]),
                "value_scale": ("float16", [*heads, slots, 1]),
                "store_bias": ("float16", [*heads, slots]),
                "store_positions": ("int32", [*heads, slots]),
                "store_mass": ("float32", [*heads, slots]),
                "store_kinds": ("int8", [*heads, slots]),
            }
            specs |= {f"{name}.{layer}": spec for name, spec in store.items() if self._used(name)}
        window = {
            "key_window": (self.recipe.window.dtype, [d.num_layers, *heads, self.window, d.head_dim]),
            "value_window": (self.recipe.window.dtype, [d.num_layers, *heads, self.window, d.head_dim]),
            "window_mass": ("float32", [d.num_layers, *heads, self.window]),
            "window_bias": ("float32", [self.batch, self.window]),
            "window_positions": ("int32", [self.batch, self.window]),
            "window_kinds": ("int8", [self.batch, self.window]),
        }
        specs |= {name: spec for name, spec in window.items() if self._used(name)}
        return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in specs.items()}

    def _used(self, name: str) -> bool:
        if name == "value_scale":
            return self.recipe.store == "int8"
        if name.endswith("_kinds"):
            return self.compacts and self.recipe.needs_kinds
        return not name.endswith("_mass") or self.compacts
