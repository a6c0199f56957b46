"""Attention as this project needs it, and the hook that puts it inside Hugging Face's modelling code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor, nn

from engines.errors import UserError
from engines.tokens import PADDING, VISUAL

IMPLEMENTATION = "unicache"
LOWEST = -1e4  # masks are finite (and fit float16), so that a fully masked row stays finite

# (layer index, query, key, value, softmax scale) -> output, all [batch, heads, tokens, head_dim], after RoPE
LayerAttention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
_active: ContextVar[LayerAttention] = ContextVar("layer_attention")


Block = Literal["image", "prompt"]


class Scale(float):
    """A softmax scale, and with it the cap c that some models put on their logits x: c tanh(x / c)."""

    softcap: float | None

    def __new__(cls, scale: float, softcap: float | None = None) -> Scale:
        self = super().__new__(cls, scale)
        self.softcap = softcap
        return self


def softcap_of(scale: float) -> float | None:
    return scale.softcap if isinstance(scale, Scale) else None


def _hook(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, softcap=None, **options
):
    if options.get("s_aux") is not None:
        raise UserError("this model's attention has s_aux (sinks that are no tokens), which is not supported yet")
    scale = Scale(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
    output = active()(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    return output.transpose(1, 2).contiguous(), None


def active() -> LayerAttention:
    """What the innermost `attention_by` has put in place."""
    return _active.get()


@contextlib.contextmanager
def attention_by(layer_attention: LayerAttention) -> Iterator[None]:
    """Within the block, every attention layer of a model prepared by `use_hook` calls `layer_attention`."""
    token = _active.set(layer_attention)
    try:
        yield
    finally:
        _active.reset(token)


def use_hook(language_model: nn.Module) -> None:
    """Make a Hugging Face decoder call our attention; it then builds no mask and needs no cache of its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _hook)
    language_model.config._attn_implementation = IMPLEMENTATION  # type: ignore[union-attr]


def visible(
    real: Tensor,
    positions: Tensor,
    window: int | None = None,
    block: Block | None = None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Whether a prompt's query may look at a key, bool [batch, queries, tokens]; padding queries too.

    Args:
        real: which of the tokens are no padding, bool [batch, tokens].
        positions: original ones, [batch, tokens], int32.
        window: what lies so many positions back is out of sight; None: nothing is.
        block: what a block is, within which tokens look both ways: an image, as far as the window allows, or the whole
            prompt, whatever the window.
        blocks: number of a token's block, 0 if it is in none, [batch, tokens].
    """
    order = torch.arange(real.shape[1])
    seen = order[:, None] >= order[None, :]
    same = None if blocks is None else (blocks[:, :, None] == blocks[:, None]) & (blocks[:, None] > 0)
    if block == "image" and same is not None:
        seen = seen | same
    if window:
        seen = seen & near(positions, positions, window)
    if block == "prompt" and same is not None:
        seen = seen | same
    return seen & real[:, None, :]


def blocks_of(block: Block | None, kinds: Tensor, segments: Tensor | None) -> Tensor | None:
    """The number of each token's block in a prompt, by kind and segment [batch, tokens]; None where there are none."""
    if block == "image":
        assert segments is not None
        return torch.where(kinds == VISUAL, segments, 0)
    return (kinds != PADDING).int() if block == "prompt" else None


def near(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Whether a key lies within a query's sliding window, by position: [..., queries], [..., keys] -> both."""
    return queries[..., :, None] - keys[..., None, :] < window


def attention_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Grouped-query logits without repeating keys.

    A single query of each head is a product of its own: ONNX Runtime multiplies one row by keys as they lie, and for
    several it copies them first. A scale behind the product would become a part of it, which it then copies for too.

    Args:
        query: [batch, heads, queries, head_dim]; key: [batch, kv_heads, tokens, head_dim].
        scale: a `Scale` where the model caps its logits.

    Returns:
        [batch, kv_heads, group, queries, tokens].
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    if queries == 1:
        single = (query * float(scale)).reshape(batch, kv_heads, -1, 1, head_dim)
        logits = single @ key[:, :, None].transpose(3, 4)
    else:
        logits = query.reshape(batch, kv_heads, -1, head_dim) @ key.transpose(2, 3) * float(scale)
    if cap := softcap_of(scale):
        logits = (logits / cap).tanh() * cap
    return logits.reshape(batch, kv_heads, heads // kv_heads, queries, key.shape[2])


def mix_values(attention: Tensor, value: Tensor) -> Tensor:
    """Weigh the values of every KV head by its group's attention.

    Args:
        attention: [batch, kv_heads, group, queries, tokens]; value: [batch, kv_heads, tokens, head_dim].

    Returns:
        [batch, heads, queries, head_dim].
    """
    batch, kv_heads, group, queries, tokens = attention.shape
    if queries == 1:
        return (attention @ value[:, :, None]).reshape(batch, kv_heads * group, 1, value.shape[-1])
    rows = attention.reshape(batch, kv_heads, group * queries, tokens) @ value
    return rows.reshape(batch, kv_heads * group, queries, value.shape[-1])


def full_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of all queries over all keys; `bias` [batch, queries, tokens], finite, is added to the logits."""
    attention = (attention_logits(query, key, scale) + bias[:, None, None]).softmax(dim=-1)
    return mix_values(attention, value)


def store_window_attention(
    query: Tensor,
    key_store: Tensor,
    value_store: Tensor,
    store_bias: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    window_bias: Tensor,
    scale: float,
    by_query: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over a dequantized store and a window; shapes and results as `operators.quant_kv_attention`.

    Args:
        store_bias: may differ from query to query, [batch, kv_heads, queries, slots].
        scale: may be a `Scale`.
        by_query: do not sum the attention that slots receive over the queries: [batch, kv_heads, queries, tokens].
    """
    slots = key_store.shape[2]
    on_slots = store_bias.to(query.dtype).clamp(min=LOWEST)
    on_slots = on_slots[:, :, None, None] if on_slots.dim() == 3 else on_slots[:, :, None]
    store = attention_logits(query, key_store, scale) + on_slots
    window = attention_logits(query, key_window, scale) + window_bias.to(query.dtype).clamp(min=LOWEST)[:, None, None]
    attention = torch.cat([store, window], dim=-1).softmax(dim=-1)
    on_store, on_window = attention[..., :slots], attention[..., slots:]
    output = mix_values(on_store, value_store) + mix_values(on_window, value_window)
    if by_query:
        return output, on_store.mean(dim=2), on_window.mean(dim=2)
    return output, on_store.sum(dim=3).mean(dim=2), on_window.sum(dim=3).mean(dim=2)
