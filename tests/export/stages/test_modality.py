"""Budgets per modality: the quotas against a plain statement, and what a top-k by the priorities keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.compress import Compress
from export.graphs import Prefill, State
from export.stages.modality import Density, Joint
from export.stages.tokens import TEXT, VISUAL, Tokens
from tests.export import tiny
from tests.export.stages.strategies import cached

capacities = st.integers(1, 32)
DENSITY: dict[str, Any] = {
    "modality": {"method": "density"},
    "protect": {"sinks": 0, "recent": 0},
    "importance": {"pool": 1},
}


def density_of(keys: np.ndarray) -> float:
    """1 - mean cosine of two different rows of `keys` [n, head_dim]."""
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    cosines = [unit[i] @ unit[j] for i in range(len(keys)) for j in range(len(keys)) if i != j]
    return max(1e-6, 1 - float(np.mean(cosines))) if cosines else 1.0


def kept_of(density: Density, tokens: Tokens, b: int, h: int, capacity: int) -> float:
    """How many visual tokens one head keeps, before rounding."""
    keys = tokens.plain_key[b, h].double().numpy()
    real, kinds = tokens.real[b, h].numpy(), tokens.kinds[b, h].numpy()
    visual, text = keys[real & (kinds == VISUAL)], keys[real & (kinds == TEXT)]
    dense_v, dense_t = (
        given[0] if given else density_of(rows) for given, rows in zip(given_of(density), (visual, text), strict=True)
    )
    return quota_of(density, len(visual), len(text), dense_v, dense_t, capacity)


def given_of(density: Density) -> tuple[list[float], list[float]]:
    return density.visual_density, density.text_density


def quota_of(density: Density, v: float, t: float, dense_v: float, dense_t: float, capacity: float) -> float:
    """Visual tokens that are kept of v and t: rates, one rule after the other."""
    drop = max(0.0, v + t - capacity)
    if v == 0 or t == 0 or drop == 0:
        return v - drop if v else 0
    # R_v = R d_t / (d_v + d_t) k and R_t = R d_v / (d_v + d_t) k, with the k that drops `drop` in all
    rate = {"v": dense_t, "t": dense_v}
    k = drop / (rate["v"] * v + rate["t"] * t)
    rate = {name: k * value for name, value in rate.items()}
    caps = [density.visual_cap]
    if v > density.many * (v + t):
        caps.insert(0, density.many_rate)
    if caps[0] > density.visual_cap:
        caps.pop(0)
    for cap in caps:
        if rate["v"] > cap:
            rate = {"v": cap, "t": (drop - cap * v) / t}  # what is over passes to text
        if rate["t"] <= density.text_cap:
            return v - rate["v"] * v
        rate = {"v": (drop - density.text_cap * t) / v, "t": density.text_cap}  # and the reverse
        if rate["v"] <= cap:
            return v - rate["v"] * v
    if rate["v"] <= density.visual_cap:
        return v - rate["v"] * v
    # Both are at their caps: the same share of what each would keep has to go.
    keep_v, keep_t = (1 - density.visual_cap) * v, (1 - density.text_cap) * t
    return keep_v * capacity / (keep_v + keep_t)


def priority(tokens: Tokens, capacity: int, **knobs: Any) -> torch.Tensor:
    return Density(**knobs)(tokens.mass, tokens, capacity)


rates = st.sampled_from([0.0, 0.3, 0.4, 0.8, 1.0])


@given(
    tokens=cached(),
    capacity=capacities,
    visual_cap=rates,
    text_cap=rates,
    many=st.floats(0, 1),
    many_rate=rates,
    measured=st.none() | st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)),
)
def test_density_fills_the_quotas_with_each_modalitys_best(
    tokens: Tokens,
    capacity: int,
    visual_cap: float,
    text_cap: float,
    many: float,
    many_rate: float,
    measured: tuple[float, float] | None,
) -> None:
    knobs: dict[str, Any] = {"visual_cap": visual_cap, "text_cap": text_cap, "many": many, "many_rate": many_rate}
    if measured:
        knobs |= {"visual_density": [measured[0]], "text_density": [measured[1]]}
    density = Density(**knobs)
    tables = {**DENSITY, "modality": {**DENSITY["modality"], **knobs}}
    index = Compress(tiny.recipe(**tables), capacity, 0.0, None).select(tokens)[1]
    for b, h in np.ndindex(*index.shape[:2]):
        real, kinds = tokens.real[b, h].numpy(), tokens.kinds[b, h].numpy()
        score = (tokens.mass * tokens.value.norm(dim=-1))[b, h].numpy()
        if real.sum() <= capacity:
            continue  # all are kept
        kept = [i for i in index[b, h].tolist() if i < len(real) and real[i]]
        assert len(kept) == capacity
        quota = kept_of(density, tokens, b, h, capacity)
        visuals = [i for i in kept if kinds[i] == VISUAL]
        assert abs(len(visuals) - quota) <= 0.5 + 1e-3
        for kind in (VISUAL, TEXT):
            of_kind = [i for i in range(len(real)) if real[i] and kinds[i] == kind]
            best = sorted(of_kind, key=lambda i: (-score[i], i))  # ties to the lowest index
            mine = [i for i in kept if kinds[i] == kind]
            assert sorted(best[: len(mine)]) == mine


@given(tokens=cached(), capacity=capacities)
def test_density_is_finite_and_each_sample_by_itself(tokens: Tokens, capacity: int) -> None:
    got = priority(tokens, capacity)
    assert got.isfinite().all()
    for b in range(len(got)):
        rows = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens) if f.name != "center"}
        alone = Tokens(**{name: tensor[b : b + 1] for name, tensor in rows.items()})
        torch.testing.assert_close(priority(alone, capacity)[0], got[b], rtol=1e-4, atol=1e-4)


@given(tokens=cached(), capacity=capacities)
def test_density_counts_keys_as_the_model_made_them(tokens: Tokens, capacity: int) -> None:
    center = torch.full((tokens.key.shape[1], 1, tokens.key.shape[-1]), 0.75)
    centred = dataclasses.replace(tokens, key=tokens.key - center, center=center)
    torch.testing.assert_close(priority(centred, capacity), priority(tokens, capacity), rtol=1e-3, atol=1e-3)


def mixed(visual: int, text: int, same: int | None = None) -> Tokens:
    """Visual tokens, then text ones; the keys of kind `same` all equal. The first of a kind is the best."""
    count = visual + text
    key = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 1, count, 16)).astype(np.float32))
    kinds = torch.tensor([VISUAL] * visual + [TEXT] * text, dtype=torch.int32)
    if same is not None:
        key[0, 0, kinds == same] = key[0, 0, 0].clone()
    mass = torch.arange(count, 0, -1.0)[None, None]
    positions = torch.arange(count, dtype=torch.int32)[None, None]
    return Tokens(key, torch.ones_like(key), positions, kinds[None, None], torch.zeros(1, 1, count), mass)


def kept_visual(tokens: Tokens, capacity: int, **knobs: Any) -> int:
    chosen = priority(tokens, capacity, **knobs)[0, 0].topk(capacity).indices
    return int((tokens.kinds[0, 0, chosen] == VISUAL).sum())


@pytest.mark.parametrize(
    ("tokens", "capacity", "knobs", "visual"),
    [  # of 50 and 50, capacity 50: half of all is dropped
        (mixed(50, 50), 50, {"visual_cap": 1.0, "text_cap": 1.0}, 25),
        (mixed(50, 50, VISUAL), 50, {"visual_cap": 1.0, "text_cap": 1.0}, 0),  # equal keys say nothing
        (mixed(50, 50, TEXT), 50, {"visual_cap": 1.0, "text_cap": 1.0}, 50),
        (mixed(50, 50, VISUAL), 50, {}, 10),  # no more than 80 % of the image goes: text gives the rest
        (mixed(50, 50, TEXT), 50, {}, 20),  # no more than 40 % of the text
        (mixed(50, 50), 20, {}, 5),  # 80 % and 40 % leave 10 + 30, and there is room for half of that
        (mixed(80, 20, VISUAL), 50, {}, 38),  # 80 % are visual: half of them, then text up to its cap of 8, then on
        (mixed(80, 20, VISUAL), 55, {}, 40),  # 40 and 5
        (mixed(80, 20, VISUAL), 50, {"many": 0.8}, 30),  # 80 % is not above 80 %
        (mixed(20, 8), 28, {}, 20),
        (mixed(20, 0), 12, {}, 12),
        (mixed(0, 20), 12, {}, 0),
    ],
)
def test_quotas(tokens: Tokens, capacity: int, knobs: dict, visual: int) -> None:
    assert kept_visual(tokens, capacity, **knobs) == visual


def test_protected_tokens_come_first() -> None:
    tokens = mixed(20, 8, TEXT)
    tables = {**DENSITY, "protect": {"sinks": 0, "recent": 6}}
    index = Compress(tiny.recipe(**tables), 7, 0.0, None).select(tokens)[1]
    assert index.tolist() == [[[20, 22, 23, 24, 25, 26, 27]]]  # of the rest text lost least


@given(tokens=cached(), capacity=capacities)
def test_joint_is_the_score(tokens: Tokens, capacity: int) -> None:
    assert Joint()(tokens.mass, tokens, capacity) is tokens.mass


def test_only_density_asks_for_kinds() -> None:
    assert not tiny.recipe().needs_kinds
    assert tiny.recipe(**DENSITY).needs_kinds


def test_each_layer_has_its_own_measured_densities() -> None:
    tables = {
        **DENSITY,
        "modality": {"method": "density", "visual_density": [0.1, 0.5, 0.9], "text_density": [1.0] * 3},
    }
    recipe = tiny.recipe(**tables)
    assert [given_of(layer) for layer in recipe.modality.by_layer(3)] == [([v], [1.0]) for v in (0.1, 0.5, 0.9)]  # type: ignore[arg-type]
    with pytest.raises(UserError, match="visual_density has 3 values, the model 4 layers"):
        recipe.modality.by_layer(4)
    plain = tiny.recipe(**DENSITY).modality
    assert list(plain.by_layer(4)) == [plain] * 4


def test_the_graphs_take_each_layers_own(checkpoint: Checkpoint) -> None:
    modality = {"method": "density", "visual_density": [0.1, 0.5, 0.9], "text_density": [0.3, 0.6, 0.7]}
    graph = Prefill(State(checkpoint.decoder, tiny.recipe(modality=modality), 48), None)
    found = [given_of(graph.layer(layer).modality) for layer in range(3)]  # type: ignore[arg-type]
    assert found == [([0.1], [0.3]), ([0.5], [0.6]), ([0.9], [0.7])]


@pytest.mark.parametrize(
    "wrong",
    [
        {"visual_cap": 1.2},
        {"text_cap": -0.1},
        {"many": 2},
        {"many_rate": -1},
        {"visual_density": [0.5]},
        {"visual_density": [0.5], "text_density": [0.0]},
        {"visual_density": [2.1], "text_density": [0.5]},
    ],
)
def test_density_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|need a number|density is"):
        Density(**wrong)
