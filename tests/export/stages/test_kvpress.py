"""The same tokens as NVIDIA's kvpress keeps, where it has the method.

`scripts/kvpress_reference.py` writes the fixture. kvpress forces some tokens into its kept set by giving them more than
the largest score; here that is not the score's business: `protect` and the window do it. So the forced ones are forced
here by hand, and the scores compared are those of the others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.stages.importance import H2O, ExpectedAttention, KeyDiff, KNorm, SnapKV, StreamingLLM
from export.stages.importance.importance import Importance
from export.stages.tokens import TEXT
from tests.export.stages import prompts
from tests.export.stages.prompts import Prompt
from tests.export.stages.strategies import tensor, tokens_of

FIXTURE = np.load(Path(__file__).with_name("kvpress.npz"))
WINDOW, KERNEL, SINKS, FUTURE = (int(FIXTURE[name]) for name in ("window", "kernel", "sinks", "future"))
NOTHING = slice(0, 0)
SINK = slice(0, SINKS)

pytestmark = pytest.mark.parametrize("kv_heads", [1, 2, 4])


def prompt(kv_heads: int) -> Prompt:
    query, key, value = (FIXTURE[f"{name}.{kv_heads}"] for name in ("query", "key", "value"))
    places = np.arange(key.shape[2], dtype=np.int32)[None]
    assert FIXTURE["theta"] == prompts.THETA
    return Prompt(query, key, value, np.full_like(places, TEXT), places, scale=key.shape[-1] ** -0.5)


def score(stage: Importance, kv_heads: int, tokens: slice = slice(None)) -> np.ndarray:
    """Of some tokens of the prompt, [1, kv_heads, tokens]."""
    given = prompt(kv_heads)
    mass = tensor(given.observe(stage)) if stage.observers(given.key.shape[2]) else None
    return stage(tokens_of(tensor(given.key), tensor(given.value), mass)[tokens], 0).numpy()


def check(name: str, kv_heads: int, ours: np.ndarray, forced: slice = NOTHING) -> None:
    """Our scores of all tokens must keep the tokens that kvpress keeps."""
    kept = FIXTURE[f"{name}.kept.{kv_heads}"]
    ours = ours.copy()
    ours[..., forced] = np.inf
    best = np.argsort(-ours, axis=-1, kind="stable")[..., : kept[0, 0].sum()]
    for head, mask in enumerate(kept[0]):
        assert 1 < mask.sum() < mask.size
        assert set(best[0, head]) == set(np.flatnonzero(mask))


def theirs(name: str, kv_heads: int) -> np.ndarray:
    return FIXTURE[f"{name}.score.{kv_heads}"]


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "stage", "forced"),
    [
        ("keydiff", KeyDiff(), NOTHING),
        ("knorm", KNorm(), NOTHING),
        ("expected", ExpectedAttention(future=FUTURE, sinks=SINKS), SINK),
        ("expected_mean", ExpectedAttention(future=FUTURE, sinks=SINKS, covariance=False, value_norm=False), SINK),
    ],
)
def test_the_same_scores(kv_heads: int, name: str, stage: Importance, forced: slice) -> None:
    ours = score(stage, kv_heads)
    close(ours[..., forced.stop :], theirs(name, kv_heads)[..., forced.stop :])
    check(name, kv_heads, ours, forced)


def test_snapkv(kv_heads: int) -> None:
    """kvpress scores the tokens before its window and pools among them: here, the store's with a window left out of it.

    It averages over the window's queries where we sum, and knows no value norm.
    """
    before = slice(0, prompt(kv_heads).key.shape[2] - WINDOW)
    ours = score(SnapKV(window=WINDOW, pool=KERNEL, value_norm=False), kv_heads, before) / WINDOW
    close(ours, theirs("snapkv", kv_heads)[..., before])
    check("snapkv", kv_heads, np.pad(ours, [(0, 0), (0, 0), (0, WINDOW)]), slice(before.stop, None))


def test_tova_is_a_window_of_one(kv_heads: int) -> None:
    """TOVA averages over the query heads of all KV heads, we over each KV head's own; it forces the last token."""
    ours = score(SnapKV(window=1, pool=1, value_norm=False), kv_heads).mean(1, keepdims=True).repeat(kv_heads, 1)
    close(ours[..., :-1], theirs("tova", kv_heads)[..., :-1])
    check("tova", kv_heads, ours, slice(-1, None))


def test_observed_attention_is_a_window_of_everything(kv_heads: int) -> None:
    """The attention a token receives on average from those who can see it; ours is that times the number of queries."""
    tokens = prompt(kv_heads).key.shape[2]
    ours = score(SnapKV(window=tokens, pool=1, value_norm=False), kv_heads)
    close(ours / tokens, theirs("observed", kv_heads))
    check("observed", kv_heads, ours)


def test_h2o_is_observed_attention_not_averaged(kv_heads: int) -> None:
    """The paper's sum, which kvpress divides by the number of queries that can see the token."""
    seen_by = np.arange(prompt(kv_heads).key.shape[2], 0, -1)
    ours = score(H2O(), kv_heads)
    close(ours / seen_by, theirs("observed", kv_heads))
    check("observed", kv_heads, ours / seen_by)


def test_streaming_llm(kv_heads: int) -> None:
    """kvpress scores 1 what is kept and 0 what is not; sinks are forced."""
    check("streaming", kv_heads, score(StreamingLLM(), kv_heads), SINK)


def test_the_fixture_can_tell_methods_apart(kv_heads: int) -> None:
    names = ["snapkv", "tova", "observed", "keydiff", "knorm", "streaming", "expected", "expected_mean"]
    kept = {FIXTURE[f"{name}.kept.{kv_heads}"].tobytes() for name in names}
    assert len(kept) == len(names)
