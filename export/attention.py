"""Attention as this project needs it, and the hook that puts it inside Hugging Face's modelling code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from engines.errors import UserError

IMPLEMENTATION = "unicache"
LOWEST = -1e4  # masks are finite (and fit float16), so that a fully masked row stays finite

# (layer index, query, key, value, softmax scale) -> output, all [batch, heads, tokens, head_dim], after RoPE
LayerAttention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
_active: ContextVar[LayerAttention] = ContextVar("layer_attention")


UNSUPPORTED = ("softcap", "s_aux")  # what some models do to their logits, and this attention does not


def _hook(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, **options):
    if asked := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise UserError(f"this model's attention has {asked[0]}, which is not supported yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _active.get()(int(module.layer_idx), query, key, value, float(scale))  # type: ignore[arg-type]
    return output.transpose(1, 2).contiguous(), None


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


def attention_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Grouped-query logits without repeating keys.

    Args:
        query: [batch, heads, queries, head_dim]; key: [batch, kv_heads, tokens, head_dim].

    Returns:
        [batch, kv_heads, group, queries, tokens].
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, -1, head_dim)
    logits = grouped @ key.transpose(2, 3) * scale
    return logits.reshape(batch, kv_heads, heads // kv_heads, queries, key.shape[2])


def mix_values(attention: Tensor, value: Tensor) -> Tensor:
    """Weigh the values of every KV head by its group's attention.

    Args:
        attention: [batch, kv_heads, group, queries, tokens]; value: [batch, kv_heads, tokens, head_dim].

    Returns:
        [batch, heads, queries, head_dim].
    """
    batch, kv_heads, group, queries, tokens = attention.shape
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
        by_query: do not sum the attention that slots receive over the queries: [batch, kv_heads, queries, tokens].
    """
    slots = key_store.shape[2]
    store = attention_logits(query, key_store, scale) + store_bias.to(query.dtype).clamp(min=LOWEST)[:, :, None, None]
    window = attention_logits(query, key_window, scale) + window_bias.to(query.dtype).clamp(min=LOWEST)[:, None, None]
    attention = torch.cat([store, window], dim=-1).softmax(dim=-1)
    on_store, on_window = attention[..., :slots], attention[..., slots:]
    output = mix_values(on_store, value_store) + mix_values(on_window, value_window)
    if by_query:
        return output, on_store.mean(dim=2), on_window.mean(dim=2)
    return output, on_store.sum(dim=3).mean(dim=2), on_window.sum(dim=3).mean(dim=2)
