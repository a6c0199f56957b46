"""Merging visual tokens between two decoder layers: against loops, and against Hugging Face's own layers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from export.attention import full_attention
from export.checkpoint import Checkpoint
from export.stages.shorten import ToMe
from export.stages.shorten.shorten import Rows
from export.stages.tokens import PADDING, VISUAL
from tests.export import tiny
from tests.export.stages.shortening import by_hand, rows
from tests.export.tiny import Driver, Prompt, greedy

LENGTH, STEPS = 64, 24


@pytest.fixture(scope="module")
def prompt(checkpoint: Checkpoint) -> Prompt:
    return Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)])


@dataclasses.dataclass
class Loose:
    """One row while ToMe goes on, in plain Python."""

    place: int
    hidden: Any
    attention: float
    visual: bool
    frame: int
    number: int = 1


def tome_by_hand(rows: list[Loose], stage: ToMe, length: int) -> list[Loose]:
    """What ToMe's text says becomes of an unpadded prompt in a bucket of `length` rows, pair by pair."""
    for number, rate in enumerate(stage.rates):
        length -= round(rate * length)
        visual = [row for row in rows if row.visual]
        frames = [[row for row in visual if row.frame % 2 == odd] for odd in (1, 0)]
        by_frame = stage.video and number == 0 and all(frames)
        sources, targets = sorted(frames, key=len, reverse=True) if by_frame else (visual[::2], visual[1::2])
        pairs = []
        for order, source in enumerate(sources):
            found = []
            for target in targets:
                cosine = source.hidden @ target.hidden / np.linalg.norm(source.hidden) / np.linalg.norm(target.hidden)
                far = by_frame and abs(source.frame - target.frame) != 1
                found.append((far, -round(float(cosine), 6), target.place, target))
            if found:
                far, distance, _, target = min(found, key=lambda pair: pair[:3])
                pairs.append((far, distance, -order, source, target))
        merged = sorted(pairs, key=lambda pair: pair[:3])[: max(0, len(rows) - length)]
        for target in targets:
            together = [target, *(pair[3] for pair in merged if pair[4] is target)]
            weights = [r.attention + 1e-6 * r.number if stage.weigh == "attention" else r.number for r in together]
            target.hidden = sum(w * r.hidden for w, r in zip(weights, together, strict=True)) / sum(weights)
            target.attention = sum(r.attention for r in together)
            target.number = sum(r.number for r in together)
        gone = {pair[3].place for pair in merged}
        rows = [row for row in rows if row.place not in gone]
    return rows


TOME: list[dict[str, Any]] = [
    {"layer": 0, "rates": [0.3], "weigh": "count"},
    {"layer": 1, "rates": [0.2, 0.25]},
    {"layer": 2, "rates": [0.2, 0.25], "queries": 3},
    {"layer": 2, "rates": [0.2, 0.25], "weigh": "count", "video": True},
]


@pytest.mark.parametrize("knobs", TOME)
def test_tome_is_hugging_faces_layers_on_merged_rows(
    checkpoint: Checkpoint, reference: Any, prompt: Prompt, knobs: dict[str, Any]
) -> None:
    """A merged token's log(n) goes on into the KV state: the decode steps see it too."""
    driver = Driver(checkpoint.decoder, tiny.recipe(budget={"keep": 2.5}, shorten={"method": "tome", **knobs}), LENGTH)
    stage = driver.state.recipe.shorten
    assert isinstance(stage, ToMe)
    kinds, segments, layer = prompt.kinds.tolist(), prompt.segments.tolist(), knobs["layer"]
    fixed = [kinds[i] != VISUAL or i >= len(prompt) - driver.state.recent for i in range(len(prompt))]
    bias: list[float] = []

    def choose(hidden: Tensor, looked_at: Tensor) -> tuple[list[int], Tensor, Tensor]:
        looks = [0.0] * len(prompt)
        for i in range(len(prompt) if layer else 0):
            first = len(prompt) - stage.queries
            asked = looked_at[:, max(first, i) : len(prompt), i].double().mean(dim=0)
            looks[i] = float(asked.mean()) * stage.queries
        loose = [Loose(i, hidden[i].double().numpy(), looks[i], not fixed[i], segments[i]) for i in range(len(prompt))]
        left = tome_by_hand(loose, stage, LENGTH)
        rest = list(range(len(prompt), len(hidden)))
        bias[:] = [float(np.log(row.number)) for row in left] + [0.0] * len(rest)
        states = torch.stack([torch.from_numpy(row.hidden).float() for row in left])
        return [row.place for row in left] + rest, torch.cat([states, hidden[rest]]), torch.tensor(bias)

    tokens, logits = greedy(driver, checkpoint, [prompt], STEPS)
    embeddings = torch.cat([prompt.embeddings, checkpoint.embedding[tokens[0, :-1]]])
    want = by_hand(reference, embeddings, torch.arange(len(embeddings)), layer, choose)
    torch.testing.assert_close(logits[0, :1], want[-STEPS:][:1], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[0], want[-STEPS:], atol=2e-3, rtol=0)  # the store's log(n) are float16
    assert max(bias) >= np.log(1 + len(stage.rates))
    stored = driver.tensors[f"store_bias.{layer}"].float()
    assert sum(np.exp(bias)) == pytest.approx(len(prompt) + STEPS - 1)
    in_window = torch.isfinite(driver.tensors["window_bias"]).sum()
    torch.testing.assert_close(
        stored.exp().sum(-1) + in_window, torch.full_like(stored[..., 0], sum(np.exp(bias))), rtol=1e-3, atol=0
    )


def mixed(prompt: Rows, ties: bool) -> Rows:
    """The same with few different hidden states of length one, or all the same."""
    if not ties:
        return prompt
    return dataclasses.replace(prompt, hidden=torch.eye(6)[prompt.index % 3])


@given(
    rows(),
    st.lists(st.floats(0, 0.45), min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["attention", "count"]),
)
def test_tome_merges_the_nearest_pairs(
    prompt: Rows, rates: list[float], ties: bool, video: bool, weigh: Literal["attention", "count"]
) -> None:
    batch, length = prompt.kinds.shape
    prompt = mixed(prompt, ties)
    # After a merge, equal states may differ in their last bit: only the first round's ties are certain.
    stage = ToMe(rates=rates[:1] if ties else rates, weigh=weigh, video=video)
    if int(prompt.fixed.sum(1).max()) > stage.text(length):
        return  # the runtime refuses it
    got = stage(prompt)
    assert got.index.shape == (batch, stage.lengths(length)[-1])
    for item in range(batch):
        real = [i for i in range(length) if prompt.kinds[item, i] != PADDING]
        loose = [
            Loose(
                i, prompt.hidden[item, i].double().numpy(), float(prompt.attention[item, i]),
                not bool(prompt.fixed[item, i]), int(prompt.segments[item, i]),
            )
            for i in real
        ]  # fmt: skip
        want = tome_by_hand(loose, stage, length)
        at = [i for i, kind in enumerate(got.kinds[item]) if kind != PADDING]
        assert got.index[item, at].tolist() == [row.place for row in want]
        states = np.stack([row.hidden for row in want])
        np.testing.assert_allclose(got.hidden[item, at], states, atol=1e-5)
        np.testing.assert_allclose(got.bias[item, at].exp(), [row.number for row in want], rtol=1e-5)
        np.testing.assert_allclose(got.attention[item, at], [row.attention for row in want], atol=1e-5)
        assert float(got.bias[item].exp().sum()) == pytest.approx(len(real))
        untouched = [i for i in at if got.bias[item, i] == 0]
        assert torch.equal(got.hidden[item, untouched], prompt.hidden[item, got.index[item, untouched]])


@given(rows(), st.floats(0.1, 0.45))
def test_merging_equal_tokens_changes_no_attention(prompt: Rows, rate: float) -> None:
    """n equal keys and values count as much as one with log(n); positions play no part here."""
    batch, length = prompt.kinds.shape
    stage = ToMe(rates=[rate, rate], weigh="count")
    if int(prompt.fixed.sum(1).max()) > stage.text(length):
        return
    prompt = dataclasses.replace(prompt, hidden=torch.where(prompt.fixed[..., None], prompt.hidden, 0.7))
    query = torch.randn(batch, 2, 3, 6, generator=torch.Generator().manual_seed(0))
    outputs = []
    for rows_ in (prompt, stage(prompt)):
        states, bias = rows_.hidden[:, None], rows_.bias.clamp(min=-1e4)[:, None].expand(-1, 3, -1)
        outputs.append(full_attention(query, states, states, bias, 0.5))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
