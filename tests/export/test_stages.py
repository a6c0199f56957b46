"""Each stage against a plain numpy statement of what it is said to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import UserError
from export.compress import Compress, KeyStatistics, Tokens
from export.stages.cosine_budget import CosineBudget
from export.stages.diversity import Diversity
from export.stages.int8 import Int8
from export.stages.protect import Protect
from export.stages.window_importance import WindowImportance
from tests.export import tiny

settings.register_profile("stages", max_examples=40, deadline=None)
settings.load_profile("stages")

seeds = st.integers(0, 2**32 - 1)
head_dims = st.sampled_from([64, 80, 96, 128])


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


# Diversity


def divprune(features: np.ndarray, count: int) -> list[int]:
    """Greedy max-min cosine distance, one token at a time, in double precision; features [tokens, hidden_size]."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    tokens = range(len(unit))
    distance = {(i, j): 1 - float(unit[i] @ unit[j]) for i in tokens for j in tokens}
    first = max(tokens, key=lambda i: (min((distance[i, j] for j in tokens if j != i), default=0.0), -i))
    kept = [first]
    while len(kept) < count:
        rest = [i for i in tokens if i not in kept]
        kept.append(max(rest, key=lambda i: (min(distance[i, j] for j in kept), -i)))
    return sorted(kept)


@given(seed=seeds, batch=st.integers(1, 2), tokens=st.integers(2, 23), keep=st.floats(0.05, 1.0))
def test_diversity_is_divprune(seed: int, batch: int, tokens: int, keep: float) -> None:
    features = np.random.default_rng(seed).standard_normal((batch, tokens, 12)).astype(np.float32)
    stage = Diversity(keep)
    kept = stage(tensor(features))
    assert kept.tolist() == [divprune(item.astype(np.float64), stage.count(tokens)) for item in features]


@given(seed=seeds, tokens=st.integers(2, 20), keep=st.floats(0.01, 1.0), kinds=st.integers(1, 4))
def test_diversity_among_duplicates(seed: int, tokens: int, keep: float, kinds: int) -> None:
    """Axis-aligned rows: distances are exactly 0 or 1, so that every choice is a tie for the lowest index."""
    chosen = np.random.default_rng(seed).integers(0, kinds, tokens)
    kept = Diversity(keep)(tensor(np.eye(4, dtype=np.float32)[chosen])[None])[0].tolist()
    assert len(kept) == max(1, round(keep * tokens)) == len(set(kept))
    assert kept == sorted(kept)
    assert len(set(chosen[kept])) == min(len(kept), len(set(chosen)))  # no kind twice while another is left out
    assert kept == divprune(np.eye(4)[chosen], len(kept))


def test_diversity_of_equal_tokens_takes_the_first() -> None:
    assert Diversity(0.3)(torch.ones(2, 10, 5)).tolist() == [[0, 1, 2]] * 2


def test_diversity_takes_the_lonely_token_first() -> None:
    features = torch.tensor([[[1.0, 0], [1, 0.1], [-1, 0], [1, -0.1]]])
    assert Diversity(0.25)(features).tolist() == [[2]]


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.01])
def test_diversity_refuses_a_share_out_of_range(keep: float) -> None:
    with pytest.raises(ValueError, match="keep must be in"):
        Diversity(keep)


# Importance


@given(
    seed=seeds,
    heads=st.integers(1, 3),
    tokens=st.integers(1, 31),
    head_dim=head_dims,
    pool=st.sampled_from([1, 3, 5, 7]),
)
def test_importance_is_mass_times_value_norm_pooled(
    seed: int, heads: int, tokens: int, head_dim: int, pool: int
) -> None:
    rng = np.random.default_rng(seed)
    mass = rng.random((2, heads, tokens)).astype(np.float32)
    value = rng.standard_normal((2, heads, tokens, head_dim)).astype(np.float32)
    score = mass * np.sqrt((value.astype(np.float64) ** 2).sum(-1))
    want = np.zeros_like(score)
    for t in range(tokens):  # beyond the ends there are zeros, and they count
        want[..., t] = score[..., max(0, t - pool // 2) : t + pool // 2 + 1].sum(-1) / pool
    got = WindowImportance(pool=pool)(tensor(mass), tensor(value))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("field", "value"), [("window", 0), ("pool", 4), ("pool", 0)])
def test_importance_refuses(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        WindowImportance(**{field: value})


# Protect


def select(recipe_tables: dict, capacity: int, tokens: Tokens, depth: float = 0.0) -> torch.Tensor:
    """Indices that Compress keeps, [batch, kv_heads, capacity]."""
    return Compress(tiny.recipe(**recipe_tables), capacity, depth, None).select(tokens)[1]


@st.composite
def cached(draw: st.DrawFn) -> Tokens:
    """Tokens with left padding, holes, unsorted masses, some -inf biases and log-n ones."""
    rng = np.random.default_rng(draw(seeds))
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(3, 29))
    real = rng.random((batch, heads, tokens)) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    real[:, :, -1] = True
    steps = rng.integers(1, 4, (batch, heads, tokens))
    positions = np.where(real, np.cumsum(steps, -1) - steps[..., :1], -1).astype(np.int32)
    bias = np.where(real, np.log(rng.integers(1, 4, real.shape)), -np.inf).astype(np.float32)
    # Few different masses: ties are the rule.
    mass = np.where(real, rng.integers(0, draw(st.sampled_from([1, 3, 1000])), real.shape), 0).astype(np.float32)
    key = rng.standard_normal((*real.shape, 8)).astype(np.float32)
    value = np.where(real[..., None], rng.choice([-1.0, 1.0], key.shape), 0).astype(np.float32)  # equal norms
    return Tokens(*map(tensor, (key, value, positions, bias, mass)))


@given(tokens=cached(), capacity=st.integers(1, 32), sinks=st.integers(0, 3), recent=st.integers(0, 4))
def test_select_keeps_protected_then_best_and_no_padding(
    tokens: Tokens, capacity: int, sinks: int, recent: int
) -> None:
    tables = {"protect": {"sinks": sinks, "recent": recent}, "importance": {"pool": 1}}
    kept, index = Compress(tiny.recipe(**tables), capacity, 0.0, None).select(tokens)
    padded = tokens.padded(capacity)
    for b in range(index.shape[0]):
        for h in range(index.shape[1]):
            chosen = index[b, h].tolist()
            assert chosen == sorted(set(chosen))
            assert len(chosen) == capacity
            positions, real = padded.positions[b, h].tolist(), (padded.bias[b, h] > -math.inf).tolist()
            newest = max(positions)

            def rank(i: int, positions=positions, real=real, newest=newest, b=b, h=h) -> tuple[float, ...]:
                protected = real[i] and (positions[i] < sinks or positions[i] > newest - recent)
                return (-real[i], -protected, 0.0 if protected or not real[i] else -float(padded.mass[b, h, i]), i)

            assert chosen == sorted(sorted(range(len(real)), key=rank)[:capacity])
            for name in tokens.__dataclass_fields__:
                assert torch.equal(getattr(kept, name)[b, h], getattr(padded, name)[b, h, chosen]), name


def test_recent_holds_in_shallow_layers_only() -> None:
    tokens = Tokens(
        key=torch.zeros(1, 1, 10, 4),
        value=torch.ones(1, 1, 10, 4),
        positions=torch.arange(10, dtype=torch.int32)[None, None],
        bias=torch.zeros(1, 1, 10),
        mass=torch.arange(10.0).flip(0)[None, None],
    )
    tables = {"protect": {"sinks": 1, "recent": 2, "recent_depth": 0.5}, "importance": {"pool": 1}}
    assert select(tables, 4, tokens, depth=0.49).tolist() == [[[0, 1, 8, 9]]]
    assert select(tables, 4, tokens, depth=0.5).tolist() == [[[0, 1, 2, 3]]]


@given(seed=seeds, tokens=st.integers(1, 20))
def test_protect_is_finite(seed: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    bias = tensor(np.where(rng.random((1, 2, tokens)) < 0.5, -np.inf, 0).astype(np.float32))
    positions = torch.where(bias < 0, -1, torch.arange(tokens)).int()
    assert Protect()(tensor(rng.random((1, 2, tokens)).astype(np.float32)), positions, bias, 0.0).isfinite().all()


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"recent": -1}, {"recent_depth": 1.5}])
def test_protect_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Protect(**wrong)


# Budget


@given(mean=st.floats(1, 500), layers=st.integers(1, 40), shallow=st.floats(0, 0.95), deep=st.floats(0, 0.95))
def test_budget_follows_the_cosine(mean: float, layers: int, shallow: float, deep: float) -> None:
    slots = CosineBudget(shallow_rate=shallow, deep_rate=deep).capacities(mean, layers)
    rates = [deep + (shallow - deep) * (1 + math.cos(math.pi * i / max(1, layers - 1))) / 2 for i in range(layers)]
    kept = np.array([1 - rate for rate in rates])
    want = kept / kept.mean() * mean
    np.testing.assert_allclose(slots, np.maximum(want, 1), atol=0.5 + 1e-6)
    assert min(slots) >= 1
    assert slots == sorted(slots, reverse=shallow < deep)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"shallow_rate": 1.0}, {"deep_rate": -0.1}, {"least": 0}])
def test_budget_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        CosineBudget(**wrong)


# Int8


@given(seed=seeds, heads=st.integers(1, 3), tokens=st.integers(1, 17), head_dim=head_dims, size=st.floats(1e-2, 1e3))
def test_int8_errs_by_half_a_step(seed: int, heads: int, tokens: int, head_dim: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    key = (rng.standard_normal((2, heads, tokens, head_dim)) * size).astype(np.float32)
    value = (rng.standard_normal(key.shape) * size).astype(np.float32)
    stage = Int8(margin=1.0)
    scale = stage.key_scale(tensor(np.abs(key).max(axis=(0, 2))))
    keys = stage.keys(tensor(key), scale)
    values, value_scale = stage.values(tensor(value))
    assert keys.dtype == values.dtype == torch.int8
    assert value_scale.dtype == torch.float16
    assert value_scale.shape == (2, heads, tokens, 1)
    half_key = scale.numpy()[:, None] / 2
    assert (np.abs(keys.numpy() * scale.numpy()[:, None] - key) <= half_key * (1 + 1e-4)).all()
    # A float16 scale is off by 2^-11 of itself at most, so the largest value may be clipped by 127 times that.
    step = value_scale.float().numpy()
    error = np.abs(values.numpy() * step - value)
    assert (error <= step * (0.5 + 127 / 2**11)).all()
    inside = np.abs(value) <= 127 * step
    assert (error <= np.where(inside, step / 2 * (1 + 1e-4), np.inf)).all()
    assert np.abs(values.numpy()).max(axis=-1).min() >= 126  # the whole range is used, row by row


@given(seed=seeds, size=st.sampled_from([1e-2, 1.0, 100.0]), head_dim=head_dims)
def test_compaction_adds_no_noise(seed: int, size: float, head_dim: int) -> None:
    """Quantizing a dequantized row gives the same integers and scales, however often."""
    rng = np.random.default_rng(seed)
    key = tensor((rng.standard_normal((1, 2, 9, head_dim)) * size).astype(np.float32))
    tokens = Tokens(
        key=key,
        value=tensor((rng.standard_normal(key.shape) * size).astype(np.float32)),
        positions=torch.arange(9, dtype=torch.int32).expand(1, 2, 9),
        bias=torch.zeros(1, 2, 9),
        mass=torch.ones(1, 2, 9),
    )
    statistics = KeyStatistics(torch.zeros(2, head_dim), key[0].abs().amax(dim=1))
    compress = Compress(tiny.recipe(store="int8"), 9, 0.0, statistics)
    store = compress(tokens)
    again = store
    for _ in range(5):
        restored, values = compress.restore(again)
        again = compress(Tokens(restored, values, tokens.positions, tokens.bias, tokens.mass))
    for name in ("key_store", "value_store", "value_scale"):
        assert torch.equal(store[name], again[name]), name


def test_int8_of_zeros_and_small_margin() -> None:
    values, scale = Int8().values(torch.zeros(1, 1, 2, 64))
    assert not values.any()
    assert (scale > 0).all()
    with pytest.raises(ValueError, match="margin"):
        Int8(margin=0.9)


def test_a_key_beyond_the_calibrated_range_is_clipped() -> None:
    stage = Int8(margin=1.0)
    scale = stage.key_scale(torch.ones(1, 64))
    assert (stage.keys(torch.full((1, 1, 1, 64), -5.0), scale) == -127).all()


def test_kv_bytes_too_small_for_the_window_is_a_user_error(checkpoint) -> None:
    with pytest.raises(UserError, match="kv_bytes"):
        tiny.Driver(checkpoint.decoder, tiny.recipe(budget={"kv_bytes": 0.01}), 48)
