"""What each importance measure counts of the attention, in prefill and decoding, against a plain numpy statement."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.stages.importance import H2O, Decayed, ExpectedAttention, Frequency, Signals, SnapKV, VLCache
from export.stages.tokens import TEXT, VISUAL
from tests.export import tiny
from tests.export.stages.prompts import THETA, Prompt, prompts, rope
from tests.export.stages.strategies import seeds, tensor

windows = st.integers(1, 9)


def counted(prompt: Prompt, window: int, chosen: Callable[[int, int], bool]) -> np.ndarray:
    """Attention from the real, chosen ones of the last `window` queries, or all if none; scaled up by who sees it."""
    batch, heads, tokens, _ = prompt.key.shape
    mass = np.zeros((batch, heads, tokens))
    for b in range(batch):
        observers = [t for t in range(max(0, tokens - window), tokens) if prompt.real[b, t]]
        observers = [t for t in observers if chosen(b, t)] or observers
        for h in range(heads):
            for t in observers:
                mass[b, h] += prompt.looks(b, h, t)
        for i in range(tokens):
            mass[b, :, i] *= len(observers) / max(1, sum(t >= i for t in observers))
    return mass


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-4)


@given(prompt=prompts(), window=windows)
def test_snapkv_counts_the_window(prompt: Prompt, window: int) -> None:
    close(prompt.observe(SnapKV(window=window)), counted(prompt, window, lambda b, t: True))


@given(prompt=prompts(), window=windows)
def test_vl_cache_counts_what_follows_the_last_visual_token(prompt: Prompt, window: int) -> None:
    def after(b: int, t: int) -> bool:
        return VISUAL not in prompt.kinds[b, t:]

    close(prompt.observe(VLCache(window=window)), counted(prompt, window, after))


@given(prompt=prompts(), window=windows)
def test_signals_count_text_queries(prompt: Prompt, window: int) -> None:
    close(prompt.observe(Signals(window=window)), counted(prompt, window, lambda b, t: prompt.kinds[b, t] == TEXT))


@given(prompt=prompts())
def test_h2o_sums_every_query(prompt: Prompt) -> None:
    want = np.zeros(prompt.key.shape[:3])
    for b, h, t in np.ndindex(want.shape):
        want[b, h] += prompt.looks(b, h, t)
    close(prompt.observe(H2O()), want)


@given(prompt=prompts(), window=windows, gamma=st.sampled_from([0.5, 0.9, 1.0]))
def test_decayed_is_token_by_token_decoding(prompt: Prompt, window: int, gamma: float) -> None:
    stage = Decayed(gamma=gamma, window=window)
    batch, heads, tokens, _ = prompt.key.shape
    want, mass = np.zeros((batch, heads, tokens)), torch.zeros(batch, heads, tokens)
    for t in range(max(0, tokens - window), tokens):
        row = np.stack([[prompt.looks(b, h, t) for h in range(heads)] for b in range(batch)])
        want = gamma * want + row
        received = tensor(row.astype(np.float32))
        mass = stage.update(mass, received[:, :, None], (received[:, :, None],))
    close(prompt.observe(stage), want)
    close(mass.numpy(), want)


def best(row: np.ndarray, share: float) -> np.ndarray:
    """Tokens that receive at least as much as the k-th of those that receive anything."""
    seen = np.sort(row[row > 0])[::-1]
    wanted = max(1, math.ceil(np.float32(share) * np.float32(len(seen))))
    return (row > 0) & (row >= seen[wanted - 1]) if len(seen) else np.zeros(row.shape, bool)


@given(prompt=prompts(), window=windows, share=st.sampled_from([0.05, 0.1, 0.3, 0.5, 1.0]))
def test_frequency_counts_memberships(prompt: Prompt, window: int, share: float) -> None:
    batch, heads, tokens, _ = prompt.key.shape
    want = np.zeros((batch, heads, tokens))
    for b in range(batch):
        observers = [t for t in range(max(0, tokens - window), tokens) if prompt.real[b, t]]
        for h in range(heads):
            for t in observers:
                want[b, h] += best(prompt.looks(b, h, t), share)
        for i in range(tokens):
            want[b, :, i] *= len(observers) / max(1, sum(t >= i for t in observers))
    close(prompt.observe(Frequency(share=share, window=window)), want)


@given(
    seed=seeds,
    store=st.integers(1, 15),
    window=st.integers(1, 9),
    levels=st.integers(1, 9),
    share=st.sampled_from([0.1, 0.25, 0.7, 1.0]),
)
def test_frequency_of_a_decoded_token_is_of_store_and_window_together(
    seed: int, store: int, window: int, levels: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    row = rng.integers(0, levels + 1, (2, 3, store + window)).astype(np.float32)  # ties and zeros are the rule
    mass = rng.integers(0, 9, row.shape).astype(np.float32)
    want = mass + np.stack([[best(head, share) for head in item] for item in row])
    parts = tensor(row[:, :, None, :store]), tensor(row[:, :, None, store:])
    stage = Frequency(share=share)
    got = [
        stage.update(tensor(mass[..., :store]), parts[0], parts),
        stage.update(tensor(mass[..., store:]), parts[1], parts),
    ]
    assert torch.cat(got, -1).tolist() == want.tolist()


def test_of_equal_tokens_all_are_frequent() -> None:
    row = torch.tensor([[[0.1, 0.2, 0.2, 0.0, 0.2, 0.3]]])
    received = row[:, :, None]
    counts = {
        share: Frequency(share=share).update(0 * row, received, (received,))[0, 0].tolist()
        for share in (0.2, 0.4, 0.8, 1.0)
    }
    assert counts == {  # k = 1, 2, 4, 5 of the five that are seen
        0.2: [0, 0, 0, 0, 0, 1],
        0.4: [0, 1, 1, 0, 1, 1],
        0.8: [0, 1, 1, 0, 1, 1],
        1.0: [1, 1, 1, 0, 1, 1],
    }


@pytest.mark.parametrize("method", [SnapKV, VLCache, H2O, Signals, ExpectedAttention])
def test_a_decoded_tokens_attention_adds_up(method: type) -> None:
    mass, received = torch.rand(2, 1, 2, 5)
    assert torch.equal(method().update(mass, received[:, :, None], (received[:, :, None],)), mass + received)


def rotation(position: float, head_dim: int, theta: float = THETA) -> np.ndarray:
    """RoPE as a matrix [D, D]: channel i turns with channel i + D/2."""
    cos, sin = rope(np.array(position), head_dim, theta)
    half, matrix = head_dim // 2, np.diag(cos)
    for i in range(half):
        matrix[i, i + half], matrix[i + half, i] = -sin[i], sin[i]
    return matrix


def expected(plain: np.ndarray, keys: np.ndarray, turn: np.ndarray, scale: float, covariance: bool) -> np.ndarray:
    """The paper's weights [tokens] by queries before RoPE [queries, D], keys [tokens, D] and mean rotation [D, D]."""
    mean, spread = turn @ plain.mean(0), turn @ np.cov(plain.T, bias=True) @ turn.T
    logits = keys @ mean * scale
    if covariance:
        logits += np.einsum("td,de,te->t", keys, spread, keys) * scale**2 / 2
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@given(prompt=prompts(), sinks=st.integers(0, 4), future=st.integers(1, 9), covariance=st.booleans())
def test_expected_attention_is_the_papers(prompt: Prompt, sinks: int, future: int, covariance: bool) -> None:
    batch, heads, tokens, head_dim = prompt.key.shape
    want = np.zeros((batch, heads, tokens))
    for b in range(batch):
        real = [t for t in range(tokens) if prompt.real[b, t]]
        used = [t for t in real if prompt.positions[b, t] >= sinks]
        last = max([prompt.positions[b, t] for t in real], default=-1)
        average = np.mean([rotation(last + 1 + i, head_dim) for i in range(future)], axis=0)
        undo = {t: rotation(prompt.positions[b, t], head_dim).T for t in used}
        for h, member in np.ndindex(heads, prompt.group):
            if not used:
                continue
            plain = np.stack([undo[t] @ prompt.query[b, h * prompt.group + member, t] for t in used])
            keys = prompt.key[b, h, used].astype(np.float64)
            want[b, h, used] += expected(plain, keys, average, prompt.scale, covariance) / prompt.group
        for t in set(real) - set(used):
            want[b, :, t] = want[b].max(-1)
    close(prompt.observe(ExpectedAttention(future=future, sinks=sinks, covariance=covariance)), want)


def test_expected_attention_undoes_a_rope_that_scales() -> None:
    """YaRN multiplies cosine and sine alike by a factor; queries and keys carry it, the statistics must not twice."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, 9, 64)).astype(np.float32)
    prompt = Prompt(query, key, key, np.full((1, 9), TEXT, np.int32), np.arange(9, dtype=np.int32)[None])
    plain = prompt.observe(ExpectedAttention())
    scaled = Prompt(3 * query, key, key, prompt.kinds, prompt.positions, rope_scale=3)
    assert np.abs(scaled.observe(ExpectedAttention()) - plain).max() > 1e-3
    scaled.scale /= 3
    close(scaled.observe(ExpectedAttention()), plain)


def test_expected_attention_in_a_model_is_of_its_queries_before_rope(checkpoint: Checkpoint) -> None:
    decoder, (sinks, future) = checkpoint.decoder, (2, 5)
    layer: Any = decoder.language_model.layers[0].self_attn  # type: ignore[index,union-attr]
    rows: dict[str, np.ndarray] = {}
    handles = [
        getattr(layer, name).register_forward_hook(lambda _m, _i, out, name=name: rows.update({name: out[0].numpy()}))
        for name in ("q_proj", "k_proj")
    ]
    prompt = tiny.Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1)])
    table = {"method": "expected-attention", "sinks": sinks, "future": future}
    recipe = tiny.recipe(budget={"keep": 2.5}, importance=table)
    shape = (decoder.kv_heads[0], decoder.head_dim)
    known = [KeyStatistics(torch.full(shape, 2.0), torch.ones(shape))] * decoder.num_layers
    driver = tiny.Driver(decoder, recipe, 64, statistics=known)
    driver.prefill([prompt])
    for handle in handles:
        handle.remove()

    tokens, theta = len(prompt), checkpoint.text_config.rope_parameters["rope_theta"]
    query, key = (x[-tokens:].reshape(tokens, -1, decoder.head_dim).astype(np.float64) for x in rows.values())
    key = np.stack([key[t] @ rotation(t, decoder.head_dim, theta).T for t in range(tokens)])
    turn = np.mean([rotation(tokens + i, decoder.head_dim, theta) for i in range(future)], axis=0)
    state, group = driver.tensors, query.shape[1] // key.shape[1]
    for head in range(decoder.kv_heads[0]):
        plain = [query[sinks:, head * group + member] for member in range(group)]
        weights = [expected(each, key[sinks:, head], turn, layer.scaling, True) for each in plain]
        got = dict(
            zip(state["store_positions.0"][0, head].tolist(), state["store_mass.0"][0, head].tolist(), strict=True)
        )
        got |= zip(state["window_positions"][0].tolist(), state["window_mass"][0, head].tolist(), strict=True)
        close(np.array([got[t] for t in range(sinks, tokens)]), np.mean(weights, axis=0))
