"""The samples run through a checkpoint's decoder, every layer observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calibration.evaluate import Prompt, prompt_of
from calibration.samples import Sample, model_inputs
from export.attention import LOWEST, LayerAttention, attention_by, blocks_of, full_attention, visible
from export.checkpoint import Checkpoint
from export.graphs import Decoder
from export.stages.tokens import PADDING

# As `LayerAttention`, and what the layer adds to the logits, [1, tokens, tokens]
MaskedAttention = Callable[[int, Tensor, Tensor, Tensor, float, Tensor], Tensor]


def observe(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    see: Callable[[int, Tensor, Tensor], None],
    progress: Callable[[], None] = lambda: None,
    reach: int = 0,
) -> int:
    """Run every sample; the number of their tokens.

    Args:
        reach: as in `run`.
        see: called with the layer, and its keys after RoPE and values of one sample, [kv_heads, tokens, head_dim].
        progress: called once a sample.
    """

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> Tensor:
        see(layer, key[0], value[0])
        return full_attention(query, key, value, mask, scale)

    return run(checkpoint, samples, attention, progress, reach)


def masks(decoder: Decoder, prompt: Prompt, answer: int = 0) -> list[Tensor]:
    """Added to the logits of a prompt without padding, one a layer, [1, tokens, tokens].

    Args:
        answer: of the tokens, the last so many follow the prompt.
    """
    kinds = prompt.kinds.clone()
    kinds[len(prompt) - answer :] = PADDING  # in no block
    blocks = blocks_of(decoder.block, kinds[None], prompt.segments[None])
    real, positions = torch.ones(1, len(prompt), dtype=torch.bool), prompt.positions[None]
    windows = [decoder.sliding_window(layer) for layer in range(decoder.num_layers)]
    seen = {window: visible(real, positions, window, decoder.block, blocks) for window in {*windows}}
    return [torch.where(seen[window], 0.0, LOWEST) for window in windows]


def forward(decoder: Decoder, prompt: Prompt, attention: LayerAttention) -> None:
    """Run the decoder's layers on a prompt, with `attention` in every one of them."""
    with torch.no_grad(), attention_by(attention):
        prompt.read(decoder)


def run(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    attention: MaskedAttention,
    progress: Callable[[], None],
    reach: int = 0,
) -> int:
    """Run every sample with `attention` in every layer, which is also given the layer's mask; the number of tokens.

    Args:
        reach: the samples begin at positions that are spread evenly over so many; 0: all begin at 0.
    """
    tokens = 0
    for number, sample in enumerate(samples):
        prompt = prompt_of(checkpoint, model_inputs(checkpoint, sample))
        start = number * max(reach - len(prompt), 0) // max(len(samples) - 1, 1)
        prompt = replace(prompt, positions=prompt.positions + start, position_ids=prompt.position_ids + start)
        forward(checkpoint.decoder, prompt, _masked(attention, masks(checkpoint.decoder, prompt)))
        tokens += len(prompt)
        progress()
    return tokens


def _masked(attention: MaskedAttention, masks: Sequence[Tensor]) -> LayerAttention:
    def by_mask(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return attention(layer, query, key, value, scale, masks[layer])

    return by_mask
