"""Tokens that align text and image: which they are, and at what rate they are dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.checkpoint import Checkpoint
from export.compress import Compress
from export.stages.protect import Protect
from export.stages.tokens import ALIGNED, FIRST, TEXT, VISUAL, Tokens
from tests.export import tiny
from tests.export.stages.prompts import Prompt, prompts
from tests.export.stages.strategies import cached, seeds, tokens_of


def with_marks(tokens: Tokens, seed: int, first: float, aligned: float) -> Tokens:
    """Some of the text tokens begin a sentence, and some of all tokens align text and image."""
    rng = np.random.default_rng(seed)
    begins, aligns = (torch.from_numpy(rng.random(tokens.mass.shape) < share) for share in (first, aligned))
    marks = FIRST * (begins & (tokens.kinds == TEXT)).int() + ALIGNED * (aligns & tokens.real).int()
    return dataclasses.replace(tokens, marks=marks)


def select(tokens: Tokens, capacity: int, **protect: Any) -> torch.Tensor:
    """Indices kept by mass alone, [batch, kv_heads, capacity]."""
    tables = {"importance": {"pool": 1}, "protect": {"sinks": 0, "recent": 0, **protect}}
    return Compress(tiny.recipe(**tables), capacity, 0.0, None).select(tokens)[1]


@given(
    tokens=cached(), capacity=st.integers(1, 32), seed=seeds, shares=st.sampled_from([(0, 0.2), (0.2, 0.2), (0.1, 1)]),
    discount=st.sampled_from([0.0, 0.4, 0.5, 0.99]), recent=st.integers(0, 2),
)  # fmt: skip
def test_alignment_tokens_are_dropped_at_a_share_of_the_rate(
    tokens: Tokens, capacity: int, seed: int, shares: tuple[float, float], discount: float, recent: int
) -> None:
    """Of what is not protected, and in each modality as many in all as without the discount."""
    tokens = with_marks(tokens, seed, *shares)
    protect = {"sinks": 1, "recent": recent, "sentence_first": True}
    without, index = (select(tokens, capacity, **protect, discount=d) for d in (1.0, discount))
    for b, h in np.ndindex(*index.shape[:2]):
        real, kinds = tokens.real[b, h].numpy(), tokens.kinds[b, h].numpy()
        kept, before = set(index[b, h].tolist()), set(without[b, h].tolist())
        if real.sum() <= capacity:
            assert set(np.flatnonzero(real)) <= kept
            continue
        assert len(kept) == capacity
        assert all(real[i] for i in kept)
        positions, marks = tokens.positions[b, h].numpy(), tokens.marks[b, h].numpy()
        lifted = (positions < 1) | (positions > positions.max() - recent) | (marks % ALIGNED == FIRST)
        assert all(not real[i] or not lifted[i] or (i in kept) == (i in before) for i in range(len(real)))
        score = (tokens.mass * tokens.value.norm(dim=-1))[b, h].numpy()
        for kind in (TEXT, VISUAL):
            free = real & ~lifted & (kinds == kind)
            aligned, others = (set(np.flatnonzero(free & chosen)) for chosen in (marks >= ALIGNED, marks < ALIGNED))
            lost = len((aligned | others) - before)
            weight = len(others) + discount * len(aligned)
            rate = lost / weight if weight else 1.0
            gone = {"aligned": discount * rate * len(aligned), "others": rate * len(others)}
            if rate >= 1:  # all others are gone, and that is not enough
                gone = {"aligned": lost - len(others), "others": len(others)}
            assert abs(len(aligned - kept) - gone["aligned"]) <= 1.001
            assert abs(len(others - kept) - gone["others"]) <= 1.001
            for group in (aligned, others):  # within a group the score decides, and ties go to the lowest index
                best = sorted(group, key=lambda i: (-score[i], i))
                assert set(best[: len(group & kept)]) == group & kept


def test_half_the_rate() -> None:
    """Of 40 tokens 20 align, 24 fit, 16 are dropped: 10.67 of the others, and half as many, 5.33, of the aligned."""
    tokens = tokens_of(torch.zeros(1, 1, 40, 4), torch.ones(1, 1, 40, 4), torch.arange(40.0)[None, None])
    marks = torch.tensor([ALIGNED, 0], dtype=torch.int32).repeat_interleave(20)[None, None]
    tokens = dataclasses.replace(tokens, marks=marks)
    assert select(tokens, 24).tolist() == [[[*range(16, 40)]]]
    assert select(tokens, 24, discount=0.5).tolist() == [[[*range(5, 20), *range(31, 40)]]]
    assert select(tokens, 24, discount=0.0).tolist() == [[[*range(20), *range(36, 40)]]]
    assert select(tokens, 10, discount=0.0).tolist() == [[[*range(10, 20)]]]


def test_a_modalitys_rate_stays_its_own() -> None:
    """All text aligns: without the rule, the discount would let it take the image's slots."""
    tokens = tokens_of(torch.randn(1, 1, 40, 4), torch.ones(1, 1, 40, 4), torch.rand(1, 1, 40))
    visual = torch.arange(40) < 20
    kinds, marks = torch.where(visual, VISUAL, TEXT).int(), torch.where(visual, 0, ALIGNED).int()
    tokens = dataclasses.replace(tokens, kinds=kinds[None, None], marks=marks[None, None])
    assert select(tokens, 13, discount=0.5).tolist() == select(tokens, 13).tolist()


@given(prompt=prompts(), threshold=st.sampled_from([0.1, 0.3, 0.6]))
def test_alignment_tokens_by_their_share_of_attention(prompt: Prompt, threshold: float) -> None:
    batch, kv_heads, tokens = prompt.key.shape[:3]
    got = Protect(discount=0.5, alignment=threshold).aligned(prompt.observation(tokens))
    for b, h in np.ndindex(batch, kv_heads):
        looks = np.stack([prompt.looks(b, h, query) for query in range(tokens)])
        kinds = prompt.kinds[b]
        for i in range(tokens):
            if kinds[i] == VISUAL:
                share = looks[kinds == TEXT, i].sum() / looks[:, i].sum()
            else:
                share = looks[i, kinds == VISUAL].sum()  # padding pays none
            if abs(share - threshold) > 1e-5:
                assert bool(got[b, h, i]) == (share > threshold)


@given(prompt=prompts())
def test_the_order_of_a_groups_query_heads_does_not_matter(prompt: Prompt) -> None:
    order = np.arange(prompt.query.shape[1]).reshape(-1, prompt.group)[:, ::-1].ravel()
    turned = dataclasses.replace(prompt, query=prompt.query[:, order].copy())
    tokens, protect = prompt.key.shape[2], Protect(discount=0.5)
    assert torch.equal(protect.aligned(turned.observation(tokens)), protect.aligned(prompt.observation(tokens)))


@given(prompt=prompts())
def test_a_batch_aligns_as_its_prompts_do(prompt: Prompt) -> None:
    tokens, protect = prompt.key.shape[2], Protect(discount=0.5)
    together = protect.aligned(prompt.observation(tokens))
    for item in range(len(together)):
        assert torch.equal(protect.aligned(prompt.only(item).observation(tokens))[0], together[item])


def test_marks_stay_with_their_tokens(checkpoint: Checkpoint) -> None:
    prompt = tiny.Prompt(checkpoint, "what color is the shape in image 1 ?", [tiny.picture(1)])
    tables = {"protect": {"sinks": 0, "recent": 0, "discount": 0.5}, "budget": {"keep": 0.4}}
    driver = tiny.Driver(checkpoint.decoder, tiny.recipe(**tables, window={"recent": 0.0}), 64)
    driver.prefill([prompt])

    def places() -> list[set[int]]:
        """Positions of the aligned tokens in every layer and head."""
        found = []
        for layer in range(checkpoint.decoder.num_layers):
            kinds, positions = (driver.tensors[f"store_{name}.{layer}"][0] for name in ("kinds", "positions"))
            found += [set(at[packed >= ALIGNED].tolist()) for packed, at in zip(kinds, positions, strict=True)]
        return found

    before = places()
    for step in range(17):
        if driver.full:
            driver.compact()
        driver.decode(checkpoint.embedding[7 + step][None], [len(prompt) + step])
    assert driver.compactions == 2
    assert any(places())
    assert all(now <= then for now, then in zip(places(), before, strict=True))
