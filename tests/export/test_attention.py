"""Attention of the window and the hook inside Hugging Face's code, against PyTorch's and Hugging Face's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from export.attention import LOWEST, attention_by, full_attention
from export.checkpoint import Checkpoint
from export.stages.importance import SnapKV
from export.stages.importance.importance import Observation
from tests.export import tiny

settings.register_profile("attention", max_examples=25, deadline=None)
settings.load_profile("attention")

shapes = {
    "seed": st.integers(0, 2**32 - 1),
    "batch": st.integers(1, 2),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 4),
    "tokens": st.integers(1, 23),
    "head_dim": st.sampled_from([64, 80, 96, 128]),
}


def inputs(seed: int, batch: int, kv_heads: int, group: int, tokens: int, head_dim: int) -> list[torch.Tensor]:
    """query, key, value, and a causal bias with left padding [batch, tokens, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, heads, tokens, head_dim, generator=generator)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    first = torch.randint(0, tokens, (batch, 1, 1), generator=generator)
    order = torch.arange(tokens)
    visible = (order[:, None] >= order) & (order >= first)
    return [query, key, value, torch.where(visible, 0.0, LOWEST)]


@given(**shapes)
def test_full_attention_is_pytorchs(**shape: int) -> None:
    # In float64: a fully masked row's logits lie at -1e4, where float32 resolves a thousandth only.
    query, key, value, bias = (tensor.double() for tensor in inputs(**shape))
    got = full_attention(query, key, value, bias, 0.1)
    want = scaled_dot_product_attention(query, key, value, bias[:, None], scale=0.1, enable_gqa=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@given(window=st.integers(1, 9), **shapes)
def test_observed_mass_is_the_softmax_summed(window: int, **shape: int) -> None:
    query, key, _, bias = inputs(**shape)
    batch, heads, tokens, _ = query.shape
    kv_heads, window = key.shape[1], min(window, tokens)
    real = bias[:, -1] == 0  # the last query sees every real token
    last = slice(tokens - window, tokens)
    visible = (bias[:, last] == 0) & real[:, last, None]
    observation = Observation(query[:, :, last], key, bias[:, last], visible, real.int(), 0.1)
    got = SnapKV(window=window).observe(observation)
    want = np.zeros((batch, kv_heads, tokens))
    for b in range(batch):
        observers = [t for t in range(tokens - window, tokens) if real[b, t]]
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for t in observers:
                seen = [i for i in range(t + 1) if real[b, i]]
                logits = (key[b, kv, seen] @ query[b, h, t]).double().numpy() * 0.1
                weights = np.exp(logits - logits.max())
                want[b, kv, seen] += weights / weights.sum() / (heads // kv_heads)
        for i in range(tokens):  # as if every observer had seen the token
            want[b, :, i] *= len(observers) / max(1, sum(t >= i for t in observers))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, atol=1e-5, rtol=1e-4)


def causal(_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    order = torch.arange(query.shape[2])
    bias = torch.where(order[:, None] >= order, 0.0, LOWEST).expand(query.shape[0], -1, -1)
    return full_attention(query, key, value, bias, scale)


def check_hook(checkpoint: Checkpoint, reference: Any, image: np.ndarray) -> None:
    prompt = tiny.Prompt(checkpoint, "what color is the shape ?", [image, image[::-1]])
    with torch.no_grad():
        want = reference(**prompt.inputs).logits
        with attention_by(causal):
            got = checkpoint.model(**prompt.inputs, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)


def test_the_hook_equals_hugging_face_with_grouped_heads(checkpoint: Checkpoint, reference: Any) -> None:
    assert checkpoint.decoder.kv_heads[0] < checkpoint.text_config.num_attention_heads
    check_hook(checkpoint, reference, tiny.picture(0))


def test_the_hook_equals_hugging_face_on_the_demo(demo: Checkpoint, demo_reference: Any) -> None:
    check_hook(demo, demo_reference, tiny.picture(0))


def test_the_hook_is_called_with_every_layer_and_ends_with_its_block(checkpoint: Checkpoint) -> None:
    seen = []

    def attention(layer, query, key, value, scale):
        seen.append(layer)
        return causal(layer, query, key, value, scale)

    embeddings = checkpoint.embedding[torch.tensor([[1, 5, 6]])]
    with torch.no_grad(), attention_by(attention):
        checkpoint.decoder.language_model(inputs_embeds=embeddings, use_cache=False)
    assert seen == list(range(checkpoint.decoder.num_layers))
    with pytest.raises(LookupError), torch.no_grad():
        checkpoint.decoder.language_model(inputs_embeds=embeddings, use_cache=False)
