"""What the stages are tried on: random tensors of odd sizes, with padding, ties and holes."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from export.stages.tokens import ALIGNED, FIRST, PADDING, TEXT, VISUAL, Tokens

settings.register_profile("stages", max_examples=40, deadline=None)
settings.load_profile("stages")

seeds = st.integers(0, 2**32 - 1)
head_dims = st.sampled_from([64, 80, 96, 128])


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def tokens_of(key: torch.Tensor, value: torch.Tensor, mass: torch.Tensor | None = None) -> Tokens:
    """Text tokens at positions 0, 1, ... with these rows [batch, kv_heads, tokens, head_dim]; mass 1 if not given."""
    shape = key.shape[:3]
    positions = torch.arange(shape[2], dtype=torch.int32).expand(shape)
    kinds = torch.full(shape, TEXT, dtype=torch.int32)
    return Tokens(key, value, positions, kinds, torch.zeros(shape), torch.ones(shape) if mass is None else mass)


@st.composite
def cached(draw: st.DrawFn) -> Tokens:
    """Tokens with left padding, holes, unsorted masses, some -inf biases and log-n ones, and every mark."""
    rng = np.random.default_rng(draw(seeds))
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 29))
    real = rng.random((batch, heads, tokens)) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    real[:, :, -1] = True
    steps = rng.integers(1, 4, (batch, heads, tokens))
    positions = np.where(real, np.cumsum(steps, -1) - steps[..., :1], -1).astype(np.int32)
    bias = np.where(real, np.log(rng.integers(1, 4, real.shape)), -np.inf).astype(np.float32)
    # Few different masses: ties are the rule.
    mass = np.where(real, rng.integers(0, draw(st.sampled_from([1, 3, 1000])), real.shape), 0).astype(np.float32)
    key = rng.standard_normal((*real.shape, 8)).astype(np.float32)
    value = np.where(real[..., None], rng.choice([-1.0, 1.0], key.shape), 0).astype(np.float32)  # equal norms
    kinds = np.where(real, rng.integers(TEXT, VISUAL + 1, real.shape), PADDING).astype(np.int32)
    marks = np.where(kinds == TEXT, rng.choice([0, FIRST], real.shape), 0) + rng.choice([0, ALIGNED], real.shape) * real
    plain = Tokens(*map(tensor, (key, value, positions, kinds, bias, mass)))
    return dataclasses.replace(plain, marks=tensor(marks.astype(np.int32)))
