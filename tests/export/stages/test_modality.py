"""Budgets per modality: the quotas against a plain statement, and what a top-k by the priorities keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.checkpoint import Checkpoint
from export.compress import Compress
from export.stages.modality import Density, Joint
from export.stages.tokens import TEXT, VISUAL, Tokens
from tests.export import tiny
from tests.export.stages.exporting import check_exported
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


def quota_of(density: Density, tokens: Tokens, b: int, h: int, capacity: int) -> float:
    """Slots for visual tokens of one head, before rounding."""
    keys = tokens.plain_key[b, h].double().numpy()
    real, kinds = tokens.real[b, h].numpy(), tokens.kinds[b, h].numpy()
    visual, text = keys[real & (kinds == VISUAL)], keys[real & (kinds == TEXT)]
    v, t = len(visual), len(text)
    information = {"visual": density_of(visual) * v, "text": density_of(text) * t}
    quota = capacity * information["visual"] / max(1e-6, sum(information.values()))
    if capacity - quota > density.text_cap * capacity:
        quota = capacity - density.text_cap * capacity
    if quota > density.visual_cap * capacity:
        quota = density.visual_cap * capacity
    if v > density.many * (v + t) and quota > density.many_keep * v:
        quota = density.many_keep * v
    return min(v, max(quota, capacity - t))


def priority(tokens: Tokens, capacity: int, **knobs: Any) -> torch.Tensor:
    return Density(**knobs)(tokens.mass, tokens, capacity)


@given(tokens=cached(), capacity=capacities, visual_cap=st.sampled_from([0.6, 0.8, 1.0]), many=st.floats(0, 1))
def test_density_fills_the_quotas_with_each_modalitys_best(
    tokens: Tokens, capacity: int, visual_cap: float, many: float
) -> None:
    density = Density(visual_cap=visual_cap, many=many)
    tables = {**DENSITY, "modality": {**DENSITY["modality"], "visual_cap": visual_cap, "many": many}}
    index = Compress(tiny.recipe(**tables), capacity, 0.0, None).select(tokens)[1]
    for b, h in np.ndindex(*index.shape[:2]):
        real, kinds = tokens.real[b, h].numpy(), tokens.kinds[b, h].numpy()
        score = (tokens.mass * tokens.value.norm(dim=-1))[b, h].numpy()
        if real.sum() <= capacity:
            continue  # all are kept
        kept = [i for i in index[b, h].tolist() if i < len(real) and real[i]]
        assert len(kept) == capacity
        quota = quota_of(density, tokens, b, h, capacity)
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
    [
        (mixed(50, 50), 20, {"visual_cap": 1.0, "text_cap": 1.0}, 10),
        (mixed(50, 50, VISUAL), 20, {"visual_cap": 1.0, "text_cap": 1.0}, 0),  # equal keys say nothing
        (mixed(50, 50, TEXT), 20, {"visual_cap": 1.0, "text_cap": 1.0}, 20),
        (mixed(50, 50, VISUAL), 20, {}, 12),  # text has at most 0.4 of the slots
        (mixed(50, 50, TEXT), 20, {}, 16),  # visual tokens at most 0.8
        (mixed(50, 4, VISUAL), 20, {"many": 1.0}, 16),  # there are no more than 4 text tokens: the rest passes on
        (mixed(20, 8), 20, {"many": 1.0}, 14),  # 20 : 8 and no cap is reached
        (mixed(20, 8), 16, {}, 10),  # 71 % are visual: half of them at most
        (mixed(20, 8), 24, {}, 16),  # as before, but 8 text tokens leave room for more
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
    assert index.tolist() == [[[0, 22, 23, 24, 25, 26, 27]]]


@given(tokens=cached(), capacity=capacities)
def test_joint_is_the_score(tokens: Tokens, capacity: int) -> None:
    assert Joint()(tokens.mass, tokens, capacity) is tokens.mass


def test_only_density_asks_for_kinds() -> None:
    assert not tiny.recipe().needs_kinds
    assert tiny.recipe(**DENSITY).needs_kinds


@pytest.mark.parametrize("wrong", [{"visual_cap": 1.2}, {"many_keep": -0.1}, {"visual_cap": 0.5, "text_cap": 0.4}])
def test_density_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Density(**wrong)


@pytest.mark.slow
def test_the_exported_graphs_agree(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_exported(checkpoint, tmp_path, modality={"method": "density"})
