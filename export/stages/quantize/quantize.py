"""The interface of quantization: how a layer's store holds its rows, and how attention reads them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from export.attention import store_window_attention
from export.stages.stage import Stage
from export.stages.tokens import Tokens

ROWS = ("key_store", "value_store")  # of a store that is `by_row`
Specs = dict[str, tuple[str, list[int]]]  # a tensor's name, without its layer -> dtype and shape


@dataclass(frozen=True)
class KeyStatistics:
    """Calibrated per layer, over all tokens of the samples; keys after RoPE.

    Attributes:
        center: mean key of each head, [kv_heads, head_dim], float32.
        absmax: largest magnitude of each channel of the centred keys, [kv_heads, head_dim], float32.
        value_absmax: of the values, alike.
        rotated_absmax, rotated_value_absmax: of the same rows after `rotate`.
        key_rows, value_rows: some of the rows, [kv_heads, rows, head_dim], float32; keys not centred.
    """

    center: Tensor
    absmax: Tensor
    value_absmax: Tensor | None = None
    rotated_absmax: Tensor | None = None
    rotated_value_absmax: Tensor | None = None
    key_rows: Tensor | None = None
    value_rows: Tensor | None = None


class Quantize(Stage):
    """Base of the methods. A subclass implements `specs`, `quantize` and `restore`.

    Attributes:
        center: whether one constant vector per head, its calibrated mean key, is subtracted from all of a layer's keys.
            It leaves the softmax unchanged and takes the k_proj-bias spikes out of the range.
    """

    center: bool
    by_operator = True  # whether `QuantKVAttention` may read the store: no knob

    @property
    def by_row(self) -> bool:
        """Whether the store holds each token by itself, in `ROWS` as wide as each other and in scales beside them."""
        return False

    @property
    def calibrated(self) -> bool:
        """Whether it needs `KeyStatistics`."""
        return self.center

    @property
    def needs_rows(self) -> bool:
        """Whether it needs `KeyStatistics.key_rows` and `value_rows`."""
        return False

    @property
    def operator_bits(self) -> tuple[int, int] | None:
        """Bits of keys and values in the codes that `QuantKVAttention` reads; None: the store is restored first."""
        return None

    def by_layer(self, layers: int) -> Sequence[Quantize]:
        """The method of each of a model's layers.

        Raises:
            UserError: it is made for another number of layers.
        """
        return [self] * layers

    def of_layer(self, statistics: KeyStatistics | None) -> Quantize:
        """The stage of one layer, with that layer's constants; the recipe's own belongs to all of them."""
        return copy.deepcopy(self)

    def specs(self, heads: list[int], slots: int, head_dim: int) -> Specs:
        """The store's tensors; `heads` is [batch, kv_heads]."""
        raise NotImplementedError

    def arrange(self, kept: Tokens) -> Tokens:
        """The tokens in the order in which the store holds them."""
        return kept

    def rearrange(self, slots: Tokens) -> Tokens:
        """The tokens of a store in their original order, as the other stages want them."""
        return slots

    def quantize(self, kept: Tokens) -> dict[str, Tensor]:
        """Arranged tokens -> the tensors of `specs`."""
        raise NotImplementedError

    def restore(self, store: dict[str, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a store, [batch, kv_heads, slots, head_dim], float32."""
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        store: dict[str, Tensor],
        key_window: Tensor,
        value_window: Tensor,
        window_bias: Tensor,
        scale: float,
        by_query: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention over a store and a window; shapes and results as `attention.store_window_attention`."""
        key, value = self.restore(store, query.shape[-1])
        return store_window_attention(
            query, key, value, store["store_bias"], key_window, value_window, window_bias, scale, by_query
        )
