"""The samples run through a checkpoint's decoder, every layer observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibration.evaluate import prompt_of
from calibration.samples import Sample, model_inputs
from export.attention import LOWEST, LayerAttention, attention_by, full_attention
from export.checkpoint import Checkpoint


def observe(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    see: Callable[[int, Tensor, Tensor], None],
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Run every sample; the number of their tokens.

    Args:
        see: called with the layer, and its keys after RoPE and values of one sample, [kv_heads, tokens, head_dim].
        progress: called once a sample.
    """

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        see(layer, key[0], value[0])
        return full_attention(query, key, value, causal(key.shape[2]), scale)

    return run(checkpoint, samples, attention, progress)


def causal(tokens: int) -> Tensor:
    """Added to the logits of a prompt without padding, [1, tokens, tokens]."""
    order = torch.arange(tokens)
    return torch.where(order[:, None] >= order, 0.0, LOWEST)[None]


def run(
    checkpoint: Checkpoint, samples: Sequence[Sample], attention: LayerAttention, progress: Callable[[], None]
) -> int:
    """Run every sample with `attention` in every layer; the number of their tokens."""
    tokens = 0
    with torch.no_grad(), attention_by(attention):
        for sample in samples:
            prompt = prompt_of(checkpoint, model_inputs(checkpoint.processor, sample))
            prompt.read(checkpoint.decoder)
            tokens += len(prompt)
            progress()
    return tokens
