"""How each importance measure turns cached tokens into scores, against a plain numpy statement."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.stages.importance import (
    H2O,
    Decayed,
    ExpectedAttention,
    Frequency,
    KeyDiff,
    KNorm,
    Random,
    Signals,
    SnapKV,
    StreamingLLM,
    Uniform,
    ValueNorm,
    VLCache,
)
from export.stages.importance.importance import Importance
from export.stages.tokens import TEXT, VISUAL, Tokens
from tests.export.stages.strategies import cached, head_dims, seeds, tensor, tokens_of


def close(got: torch.Tensor, want: np.ndarray, where: np.ndarray | None = None) -> None:
    where = np.ones(want.shape, bool) if where is None else where
    np.testing.assert_allclose(got.numpy()[where], want[where], rtol=1e-4, atol=1e-5)


def pooled(score: np.ndarray, width: int) -> np.ndarray:
    """Beyond the ends there are zeros, and they count."""
    tokens = score.shape[-1]
    parts = [score[..., max(0, t - width // 2) : t + width // 2 + 1].sum(-1) for t in range(tokens)]
    return np.stack(parts, -1) / width


def norms(rows: torch.Tensor) -> np.ndarray:
    return np.sqrt((rows.double().numpy() ** 2).sum(-1))


@pytest.mark.parametrize("method", [SnapKV, VLCache])
@given(
    seed=seeds,
    heads=st.integers(1, 3),
    tokens=st.integers(1, 31),
    head_dim=head_dims,
    pool=st.sampled_from([1, 3, 5, 7]),
    value_norm=st.booleans(),
)
def test_windowed_score_is_mass_times_value_norm_pooled(
    method: type[SnapKV | VLCache], seed: int, heads: int, tokens: int, head_dim: int, pool: int, value_norm: bool
) -> None:
    rng = np.random.default_rng(seed)
    mass = rng.random((2, heads, tokens)).astype(np.float32)
    value = tensor(rng.standard_normal((2, heads, tokens, head_dim)).astype(np.float32))
    want = pooled(mass * norms(value) if value_norm else mass, pool)
    close(method(pool=pool, value_norm=value_norm)(tokens_of(value, value, tensor(mass)), 0), want)


@pytest.mark.parametrize("method", [H2O, Decayed, Frequency])
@given(tokens=cached())
def test_some_scores_are_the_mass(method: type[Importance], tokens: Tokens) -> None:
    assert torch.equal(method()(tokens, 0), tokens.mass)


@given(tokens=cached())
def test_expected_attention_times_value_norm(tokens: Tokens) -> None:
    close(ExpectedAttention()(tokens, 0), tokens.mass.numpy() * norms(tokens.value))
    assert torch.equal(ExpectedAttention(value_norm=False)(tokens, 0), tokens.mass)


@given(tokens=cached())
def test_norms_and_positions(tokens: Tokens) -> None:
    close(KNorm()(tokens, 0), -norms(tokens.key))
    close(ValueNorm()(tokens, 0), norms(tokens.value))
    assert torch.equal(StreamingLLM()(tokens, 0), tokens.positions.float())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@given(tokens=cached())
def test_keydiff_is_the_cosine_to_the_mean_direction(tokens: Tokens) -> None:
    key, real = tokens.key.double().numpy(), tokens.real.numpy()
    want = np.zeros(real.shape)
    for b, h, t in np.ndindex(real.shape):
        anchor = np.mean([k / np.sqrt(k @ k) for k in key[b, h][real[b, h]]], axis=0)
        want[b, h, t] = -cosine(key[b, h, t], anchor)
    close(KeyDiff()(tokens, 0), want, real)


@given(
    tokens=cached(), neighbours=st.integers(1, 8), pool=st.sampled_from([1, 5]), depth=st.sampled_from([0, 0.5, 0.8])
)
def test_signals_are_weighed(tokens: Tokens, neighbours: int, pool: int, depth: float) -> None:
    key, mass, kinds, real = (x.numpy() for x in (tokens.key.double(), tokens.mass, tokens.kinds, tokens.real))
    attention, cross = pooled(mass * norms(tokens.value), pool), mass * (kinds == VISUAL)
    redundancy, recency = np.zeros(mass.shape), tokens.positions.numpy().astype(np.float64)
    for b, h in np.ndindex(mass.shape[:2]):
        for share in (attention[b, h], cross[b, h]):
            for kind in (TEXT, VISUAL):
                if (kinds[b, h] == kind).any():
                    share[kinds[b, h] == kind] /= max(share[kinds[b, h] == kind].max(), 1e-12)
        recency[b, h] /= max(1, recency[b, h].max())
        for t in range(mass.shape[2]):
            near = [i for i in range(t - neighbours, t + neighbours + 1) if i != t and 0 <= i < mass.shape[2]]
            near = [i for i in near if real[b, h, i]]
            redundancy[b, h, t] = np.mean([cosine(key[b, h, t], key[b, h, i]) for i in near]) if near else 0
    w_a, w_d = {0: (0.4, 0.3), 0.5: (0.4, 0.2), 0.8: (0.5, 0.2)}[depth]
    want = w_a * attention + 0.3 * cross - w_d * redundancy + 0.1 * recency
    close(Signals(neighbours=neighbours, pool=pool)(tokens, depth), want, real)


def test_signals_lift_visual_tokens_to_the_texts_level() -> None:
    """Text receives a hundred times the attention; within its modality the best patch is worth as much."""
    key = torch.eye(6, 64).expand(1, 1, 6, 64)
    tokens = tokens_of(key, key, torch.tensor([[[1.0, 0.5, 0.01, 0.005, 0.0, 1.0]]]))
    tokens.kinds = torch.tensor([[[TEXT, TEXT, VISUAL, VISUAL, VISUAL, TEXT]]], dtype=torch.int32)
    score = Signals(pool=1, recency=0.0)(tokens, 0.5)[0, 0]
    assert score.argsort(descending=True).tolist()[0] == 2
    torch.testing.assert_close(score, torch.tensor([0.4, 0.2, 0.7, 0.35, 0.0, 0.4]))


@given(seed=seeds, heads=st.integers(1, 4), more=st.integers(1, 3), start=st.integers(0, 40_000))
def test_random_is_of_position_head_and_seed_alone(seed: int, heads: int, more: int, start: int) -> None:
    def at(positions: torch.Tensor, heads: int, seed: int = seed) -> np.ndarray:
        tokens = tokens_of(torch.randn(2, heads, len(positions), 4), torch.randn(2, heads, len(positions), 4))
        tokens.positions = positions.to(torch.int32).expand(tokens.mass.shape)
        return Random(seed=seed)(tokens, 0.5).numpy()

    positions = start + torch.arange(200)
    score = at(positions, heads)
    assert (score[0] == score[1]).all()
    assert (at(positions.flip(0), heads)[..., ::-1] == score).all()  # wherever the tokens are
    assert (at(positions[::3], heads + more)[:, :heads] == score[..., ::3]).all()
    assert all(len(set(head)) == 200 for head in score[0].tolist())
    assert (at(positions, heads, seed + 1) != score).any()


def test_random_is_fair() -> None:
    """Kept or not is a fair lot for every position, and independent of the neighbour's."""
    tokens = tokens_of(torch.zeros(1, 4, 96, 4), torch.zeros(1, 4, 96, 4))
    kept = np.concatenate([_best(Random(seed=seed)(tokens, 0.5)[0], 24) for seed in range(250)])  # [1000, 96]
    assert abs(kept.mean(axis=0) - 0.25).max() < 4.5 * (0.25 * 0.75 / len(kept)) ** 0.5
    pairs = (kept[:, 1:] & kept[:, :-1]).mean()
    assert abs(pairs - 24 * 23 / (96 * 95)) < 0.005


@given(count=st.integers(2, 600), share=st.floats(0.02, 0.98))
def test_uniform_keeps_the_first_token_and_spreads_the_others(count: int, share: float) -> None:
    """By the three-gap theorem; no gap is longer than the golden section's worst, 2.62 times the mean, and a token."""
    tokens = tokens_of(torch.zeros(1, 2, count, 4), torch.zeros(1, 2, count, 4))
    kept = max(1, round(share * count))
    places = [*np.flatnonzero(_best(Uniform()(tokens, 0.5)[0], kept)[0]).tolist(), count]
    gaps = np.diff(places)
    assert places[0] == 0
    assert len(set(gaps[:-1].tolist())) <= 3
    assert gaps.max() <= 2.62 * count / kept + 1


def _best(score: torch.Tensor, count: int) -> np.ndarray:
    return torch.zeros(score.shape, dtype=torch.bool).scatter(1, score.topk(count).indices, True).numpy()
