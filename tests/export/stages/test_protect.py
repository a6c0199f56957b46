"""What is never dropped, and what a selection keeps beside it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.tokens import marked
from export.checkpoint import Checkpoint
from export.compress import Compress
from export.stages.protect import PROTECTED, Protect
from export.stages.tokens import FIRST, TEXT, VISUAL, Tokens
from tests.export import tiny
from tests.export.stages.strategies import cached, seeds, tokens_of


def select(recipe_tables: dict, capacity: int, tokens: Tokens, depth: float = 0.0) -> torch.Tensor:
    """Indices that Compress keeps, [batch, kv_heads, capacity]."""
    return Compress(tiny.recipe(**recipe_tables), capacity, depth, None).select(tokens)[1]


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
            for name in ("key", "value", "positions", "kinds", "bias", "mass"):
                assert torch.equal(getattr(kept, name)[b, h], getattr(padded, name)[b, h, chosen]), name


def test_recent_holds_in_shallow_layers_only() -> None:
    tokens = tokens_of(torch.zeros(1, 1, 10, 4), torch.ones(1, 1, 10, 4), torch.arange(10.0).flip(0)[None, None])
    tables = {"protect": {"sinks": 1, "recent": 2, "recent_depth": 0.5}, "importance": {"pool": 1}}
    assert select(tables, 4, tokens, depth=0.49).tolist() == [[[0, 1, 8, 9]]]
    assert select(tables, 4, tokens, depth=0.5).tolist() == [[[0, 1, 2, 3]]]


@given(tokens=cached(), capacity=st.integers(1, 32))
def test_protect_is_finite(tokens: Tokens, capacity: int) -> None:
    for protect in (Protect(), Protect(sentence_first=True), Protect(discount=0.0), Protect(discount=0.5)):
        assert protect(tokens.mass, tokens, 0.0, capacity).isfinite().all()


@given(tokens=cached(), separators=st.integers(1, 4))
def test_separators_protects_what_stands_beside_the_other_modality(tokens: Tokens, separators: int) -> None:
    protect = Protect(sinks=0, recent=0, separators=separators)
    got = protect(tokens.mass, tokens, 0.0, 1) == PROTECTED
    for b, h, i in np.ndindex(*tokens.mass.shape):
        real, kinds = tokens.real[b, h].tolist(), tokens.kinds[b, h].tolist()
        around = range(max(0, i - separators), min(len(real), i + separators + 1))
        other = any(real[j] and (kinds[j] == VISUAL) != (kinds[i] == VISUAL) for j in around)
        assert bool(got[b, h, i]) == (real[i] and other)


def test_separators_beyond_all_tokens_are_all_of_them() -> None:
    tokens = tokens_of(torch.zeros(1, 1, 6, 4), torch.ones(1, 1, 6, 4))
    tokens.kinds[..., 2] = VISUAL
    score = Protect(0, 0, separators=10**12)(torch.zeros(1, 1, 6), tokens, 0.0, 3)
    assert (score == PROTECTED).all()


def test_separators_stay_what_they_are_when_tokens_between_are_dropped() -> None:
    kinds = torch.tensor([TEXT] * 5 + [VISUAL] * 8 + [TEXT] * 5, dtype=torch.int32)[None, None]
    tokens = tokens_of(torch.zeros(1, 1, 18, 4), torch.ones(1, 1, 18, 4))
    tokens = dataclasses.replace(tokens, kinds=kinds)
    compress = Compress(tiny.recipe(protect={"sinks": 0, "recent": 0, "separators": 2}), 9, 0.0, None)
    once = compress.select(tokens)[0]
    again = compress.select(once + once[:0].padded(4))[0]
    beside = {3, 4, 5, 6, 11, 12, 13, 14}
    for kept in (once, again):
        assert beside <= set(kept.positions[0, 0].tolist())


def with_firsts(tokens: Tokens, seed: int, share: float) -> Tokens:
    """Some of the text tokens begin a sentence."""
    chosen = np.random.default_rng(seed).random(tokens.mass.shape) < share
    marks = torch.from_numpy(chosen) & (tokens.kinds == TEXT)
    return dataclasses.replace(tokens, marks=FIRST * marks.int())


@given(
    tokens=cached(),
    capacity=st.integers(1, 32),
    seed=seeds,
    share=st.sampled_from([0, 0.2, 1]),
    sinks=st.integers(0, 2),
)
def test_sentences_keep_their_first_token(tokens: Tokens, capacity: int, seed: int, share: float, sinks: int) -> None:
    tokens = with_firsts(tokens, seed, share).padded(capacity)
    tables = {"protect": {"sinks": sinks, "recent": 1, "sentence_first": True}, "importance": {"pool": 1}}
    kept, index = Compress(tiny.recipe(**tables), capacity, 0.0, None).select(tokens)
    for b, h in np.ndindex(*index.shape[:2]):
        positions, real = tokens.positions[b, h].tolist(), tokens.real[b, h].tolist()

        def key(i: int, b=b, h=h, positions=positions, real=real) -> tuple[float, ...]:
            if not real[i]:
                return (3, 0, i)
            if positions[i] < sinks or positions[i] == max(positions):
                return (0, 0, i)
            return (1 if tokens.marks[b, h, i] else 2, -float(tokens.mass[b, h, i]), i)

        assert index[b, h].tolist() == sorted(sorted(range(len(real)), key=key)[:capacity])
        assert torch.equal(kept.marks[b, h], tokens.marks[b, h, index[b, h]])


def test_sentence_starts_outlive_compactions(checkpoint: Checkpoint) -> None:
    """Of the prompt and of the answer; by positions, as tokens are dropped around them."""
    prompt = tiny.Prompt(checkpoint, "how many digits ? what color is it ? red", [tiny.picture(1)])
    tables = {"protect": {"sinks": 0, "recent": 0, "sentence_first": True}, "budget": {"keep": 0.3}}
    driver = tiny.Driver(checkpoint.decoder, tiny.recipe(**tables, window={"recent": 0.0}), 64)
    packed = marked(prompt.kinds.numpy(), prompt.segments.numpy())
    starts = set(np.flatnonzero(packed == TEXT + FIRST).tolist())
    assert len(starts) == 4  # before the image, and three after it
    driver.prefill([prompt])
    for step in range(25):
        if driver.full:
            driver.compact()
        for layer in range(checkpoint.decoder.num_layers):
            assert all(starts <= visible for visible in driver.visible(layer))
        position, first = len(prompt) + step, step % 9 == 0
        driver.decode(checkpoint.embedding[7 + step][None], [position], TEXT + FIRST * first)
        starts |= {position} if first else set()
    assert driver.compactions == 3


def test_who_needs_kinds_and_segments() -> None:
    assert not tiny.recipe().needs_kinds
    assert tiny.recipe(protect={"separators": 1}).needs_kinds
    assert not tiny.recipe(protect={"separators": 1}).needs_segments
    assert tiny.recipe(protect={"sentence_first": True}).needs_kinds
    assert tiny.recipe(protect={"sentence_first": True}).needs_segments
    assert tiny.recipe(protect={"discount": 0.5}).needs_kinds
    assert not tiny.recipe(protect={"discount": 0.5}).needs_segments


@pytest.mark.parametrize(
    "wrong",
    [{"sinks": -1}, {"recent": -1}, {"recent_depth": 1.5}, {"separators": -1}, {"discount": 2}, {"alignment": -1}],
)
def test_protect_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Protect(**wrong)
