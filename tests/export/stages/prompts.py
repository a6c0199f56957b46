"""Random prompts as an importance stage observes them in one layer, and what plain numpy says each query looks at."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from export.attention import LOWEST
from export.stages.importance.importance import Importance, Observation
from export.stages.tokens import PADDING, TEXT, VISUAL
from tests.export.stages.strategies import head_dims, seeds, tensor

THETA = 100.0


def rope(positions: np.ndarray, head_dim: int, theta: float = THETA) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of RoPE, [..., head_dim], the same for both halves of a head."""
    angles = positions[..., None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(np.concatenate([angles, angles], -1)), np.sin(np.concatenate([angles, angles], -1))


@dataclass
class Prompt:
    """Left-padded prompts: query [B, H, S, D], key and value [B, Hkv, S, D], kinds and positions [B, S]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    kinds: np.ndarray
    positions: np.ndarray
    center: np.ndarray | None = None  # [Hkv, 1, D]
    scale: float = 0.3
    rope_scale: float = 1.0

    @property
    def real(self) -> np.ndarray:
        return self.kinds != PADDING

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (self.rope_scale * rows for rows in rope(positions.double().numpy(), self.query.shape[-1]))
        return tensor(cos.astype(np.float32)), tensor(sin.astype(np.float32))

    def observation(self, queries: int) -> Observation:
        """What `Prefill` hands to a stage that wants the last `queries`."""
        tokens = self.key.shape[2]
        order, real = np.arange(tokens), self.real
        visible = (order[:, None] >= order) & real[:, None] & real[:, :, None]
        bias = np.where((order[:, None] >= order) & real[:, None], 0.0, LOWEST).astype(np.float32)
        last = slice(tokens - queries, tokens)
        key = self.key if self.center is None else self.key - self.center
        return Observation(
            tensor(self.query[:, :, last].copy()), tensor(key), tensor(bias[:, last].copy()),
            tensor(visible[:, last].copy()), tensor(self.kinds), self.scale,
            center=None if self.center is None else tensor(self.center),
            positions=tensor(np.where(real, self.positions, -1).astype(np.int32)), rotary=self.rotary,
        )  # fmt: skip

    def observe(self, stage: Importance) -> np.ndarray:
        """Mass [B, Hkv, S] that the stage gives the prompt."""
        mass = stage.observe(self.observation(stage.observers(self.key.shape[2])))
        assert mass.dtype == torch.float32
        return mass.numpy()

    def looks(self, item: int, head: int, query: int) -> np.ndarray:
        """Attention [S] of a KV head's group, in the mean, by the query at place `query`; 0 if that is padding."""
        found = np.zeros(self.key.shape[2])
        seen = [i for i in range(query + 1) if self.real[item, i]]
        if not self.real[item, query]:
            return found
        for member in range(head * self.group, (head + 1) * self.group):
            vector = self.query[item, member, query].astype(np.float64)
            logits = np.array([self.key[item, head, i].astype(np.float64) @ vector for i in seen]) * self.scale
            weights = np.exp(logits - logits.max())
            found[seen] += weights / weights.sum() / self.group
        return found

    def only(self, item: int) -> Prompt:
        """One prompt of the batch."""
        rows = {name: getattr(self, name)[item : item + 1] for name in ("query", "key", "value", "kinds", "positions")}
        return replace(self, **rows)


@st.composite
def prompts(draw: st.DrawFn, most: int = 21) -> Prompt:
    """Odd lengths, all head sizes, KV heads and groups, left padding up to the whole row, holes in the positions."""
    rng = np.random.default_rng(draw(seeds))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens, head_dim = draw(st.integers(1, most)), draw(head_dims)
    query = rng.standard_normal((batch, kv_heads * group, tokens, head_dim)).astype(np.float32)
    key, value = rng.standard_normal((2, batch, kv_heads, tokens, head_dim)).astype(np.float32)
    kinds = rng.choice(
        [TEXT, VISUAL], (batch, tokens), p=draw(st.sampled_from([(0.5, 0.5), (1, 0), (0, 1), (0.9, 0.1)]))
    )
    kinds[np.arange(tokens) < rng.integers(0, tokens + 1, (batch, 1))] = PADDING
    steps = np.where(kinds == PADDING, 0, rng.integers(1, 3, (batch, tokens)))
    positions = np.cumsum(steps, 1) - 1
    center = rng.standard_normal((kv_heads, 1, head_dim)).astype(np.float32) if draw(st.booleans()) else None
    return Prompt(query, key, value, kinds.astype(np.int32), positions.astype(np.int32), center)
