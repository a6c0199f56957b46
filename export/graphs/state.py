"""The KV state of a bucket: names, shapes and dtypes, stated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from engines.bundle import Shortened, TensorSpec
from engines.errors import UserError
from engines.mrope import MRope
from export.attention import Block
from export.recipe import Recipe
from export.stages.quantize.quantize import Quantize


@dataclass(frozen=True)
class Decoder:
    """The parts of a Hugging Face model that make logits from embeddings, and its sizes.

    Attributes:
        kv_heads: KV heads of each layer, H_l.
        model_kv_heads: the same before heads were merged: what the uncompressed cache holds.
        mrope: how it counts position ids, three a token; None: a token has one, its position.
        deepstack: taps of the vision encoder that are added to visual tokens behind the first layers, one a layer.
        sliding_windows: positions that each layer looks back, itself among them; None: to the first. Empty: all do.
        softcap: of the logits of attention, if they have one. The layers' own code applies it.
        block: within what a prompt's tokens look both ways, as `attention.visible` says.
        first_position: that RoPE gives to the first token of a sequence; everybody else counts from 0.
    """

    language_model: nn.Module
    head: nn.Module
    kv_heads: list[int]
    model_kv_heads: list[int]
    head_dim: int
    hidden_size: int
    mrope: MRope | None = None
    deepstack: int = 0
    sliding_windows: Sequence[int | None] = ()
    softcap: float | None = None
    block: Block | None = None
    first_position: int = 0

    def sliding_window(self, layer: int) -> int | None:
        """Of one layer."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def turned(self, positions: Tensor) -> Tensor:
        """Positions in a sequence as RoPE counts them, int64."""
        return positions.long() + self.first_position if self.first_position else positions.long()

    @property
    def slides(self) -> bool:
        """Whether a layer has a sliding window."""
        return any(self.sliding_windows)

    @property
    def num_layers(self) -> int:
        return len(self.kv_heads)

    @property
    def fp16_token_bytes(self) -> int:
        """What a token takes in an uncompressed cache."""
        return 2 * sum(self.model_kv_heads) * self.head_dim * 2

    def heads(self, layer: int) -> slice:
        """Where a layer's KV heads lie among those of all layers side by side: that is how the window holds them."""
        first = sum(self.kv_heads[:layer])
        return slice(first, first + self.kv_heads[layer])


@dataclass(frozen=True)
class State:
    """Names, shapes and dtypes of the KV state of one bucket.

    Stores are [B, H_l, C_l, D] a layer. Layers may differ in KV heads, so the window holds the heads of all layers
    side by side, [B, sum of H_l, W, D]: one tensor, and one write for a new token, whatever the number of layers.
    """

    decoder: Decoder
    recipe: Recipe
    length: int
    batch: int = 1

    @cached_property
    def quantize(self) -> Sequence[Quantize]:
        """How each layer's store holds keys and values; not centred where logits are capped, which see a shift."""
        methods = self.recipe.quantize.by_layer(self.decoder.num_layers)
        return [replace(own, center=False) for own in methods] if self.decoder.softcap else methods  # type: ignore[type-var]

    @property
    def shortened(self) -> Shortened | None:
        """What is left of a prompt behind `shorten.layer`; None if that is all of it.

        Raises:
            UserError: the decoder has no such layer, or nothing is left for visual tokens.
        """
        shorten, fixed = self.recipe.shorten, max(self.recent, 1)  # the window's rows and the last one always go on
        tokens = [self.length, *shorten.lengths(self.length)][-1]
        if tokens == self.length:
            return None
        where, text = f"recipe {self.recipe.name}: shorten", shorten.text(self.length) - fixed
        if shorten.layer >= (layers := self.decoder.num_layers):
            raise UserError(f"{where}.layer = {shorten.layer} has no layer behind it: the model has {layers}")
        if shorten.layer < (taps := self.decoder.deepstack):
            raise UserError(f"{where}.layer = {shorten.layer}: DeepStack adds to images behind the first {taps}")
        if text < 0:
            raise UserError(f"{where} leaves no room beside {fixed} tokens in a bucket of {self.length}: keep more")
        return Shortened(tokens, text)

    @property
    def lengths(self) -> list[int]:
        """Tokens of a full prompt in every layer: S, then S' where it is shortened."""
        short, layers = self.shortened, range(self.decoder.num_layers)
        return [short.tokens if short and layer >= self.recipe.shorten.layer else self.length for layer in layers]

    @property
    def most(self) -> list[int]:
        """Tokens of a full prompt that a later query could see in every layer."""
        windows = (self.decoder.sliding_window(layer) for layer in range(self.decoder.num_layers))
        return [min(length, window or length) for length, window in zip(self.lengths, windows, strict=True)]

    @property
    def capacities(self) -> list[int]:
        """C_l of every layer: by the recipe's share of tokens, or by what its share of bytes leaves for the store.

        The same for every batch: its rows are states of single requests.

        Raises:
            UserError: the window alone takes the bytes that the recipe allows.
        """
        if self.batch > 1:
            return replace(self, batch=1).capacities
        budget, layers = self.recipe.budget, self.decoder.num_layers
        if budget.kv_bytes is None:
            return budget.capacities(budget.keep * self.length, layers, self.most)
        window = self._nbytes([0] * layers)
        slot = (self._nbytes([self.length] * layers) - window) / self.length  # one in every layer
        allowed = budget.kv_bytes * self.length * self.decoder.fp16_token_bytes - window
        slots = allowed / slot
        if slots < budget.least:
            raise UserError(
                f"recipe {self.recipe.name}: kv_bytes = {budget.kv_bytes} leaves {slots:.1f} slots a layer beside the "
                f"window of {self.window} in a bucket of {self.length} tokens: raise kv_bytes or shorten the window"
            )
        unlike = len(set(zip(self.decoder.kv_heads, map(str, self.quantize), strict=True))) > 1
        if unlike:  # a slot costs less in some layers: the mean slot depends on the shares
            for _ in range(8):
                slots *= allowed / (self._nbytes(budget.capacities(slots, layers, self.most)) - window)
        capacities = budget.capacities(slots, layers, self.most)
        excess = (self._nbytes(capacities) - window - allowed) / slot
        if excess < 1:
            return capacities
        return budget.capacities(slots - excess, layers, self.most)  # last groups of few tokens have whole scales

    @property
    def window(self) -> int:
        return self.recipe.window.sizes(self.length)[0]

    @property
    def recent(self) -> int:
        return self.recipe.window.sizes(self.length)[1]

    @property
    def chunk(self) -> int:
        """T, tokens that `extend` reads at once: no more than a window that was just compacted has room for."""
        return min(self.recipe.window.chunk, self.window - self.recent)

    @property
    def compacts(self) -> bool:
        return self.recipe.window.compact

    @property
    def needs_segments(self) -> bool:
        """Whether prefill must know which image or sentence a token belongs to."""
        return self.recipe.needs_segments or self.decoder.block == "image"

    @property
    def counts_mass(self) -> bool:
        """Whether decode counts the attention that tokens receive."""
        return self.compacts and self.recipe.needs_mass

    @property
    def nbytes(self) -> int:
        """What the runtime allocates for the cache of one request."""
        return self._nbytes(self.capacities)

    def _nbytes(self, capacities: list[int]) -> int:
        return sum(spec.nbytes for spec in self._specs(capacities).values())

    def specs(self) -> dict[str, TensorSpec]:
        """name -> spec, store first."""
        return self._specs(self.capacities)

    def _specs(self, capacities: list[int]) -> dict[str, TensorSpec]:
        d = self.decoder
        specs: dict[str, tuple[str, list[int]]] = {}
        for layer, slots in enumerate(capacities):
            heads = [self.batch, d.kv_heads[layer]]
            store = {
                **self.quantize[layer].specs(heads, slots, d.head_dim),
                "store_bias": ("float16", [*heads, slots]),
                "store_positions": ("int32", [*heads, slots]),
                "store_mass": ("float32", [*heads, slots]),
                "store_kinds": ("int8", [*heads, slots]),
            }
            specs |= {f"{name}.{layer}": spec for name, spec in store.items() if self._used(name)}
        rows = [self.batch, sum(d.kv_heads), self.window]
        window = {
            "key_window": (self.recipe.window.dtype, [*rows, d.head_dim]),
            "value_window": (self.recipe.window.dtype, [*rows, d.head_dim]),
            "window_mass": ("float32", rows),
            "window_bias": ("float32", [self.batch, self.window]),
            "window_positions": ("int32", [self.batch, self.window]),
            "window_kinds": ("int8", [self.batch, self.window]),
        }
        specs |= {name: spec for name, spec in window.items() if self._used(name)}
        return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in specs.items()}

    def _used(self, name: str) -> bool:
        """What only compaction reads is not there without it; positions are what sliding windows need too."""
        if name.endswith("_kinds"):
            return self.compacts and self.recipe.needs_kinds
        if name.endswith("_mass"):
            return self.counts_mass
        return not name.endswith("_positions") or self.compacts or self.decoder.slides
