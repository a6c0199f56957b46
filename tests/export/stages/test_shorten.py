"""Shortening a prompt between two decoder layers: against Hugging Face's own layers run by hand, and as a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calibration.evaluate import Prompt as Plain
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.graphs import Prefill, State
from export.stages.shorten import FastV
from export.stages.shorten.shorten import Rows
from export.stages.tokens import PADDING, TEXT, VISUAL
from export.to_onnx import example
from tests.export import tiny
from tests.export.stages.exporting import check_exported
from tests.export.stages.strategies import seeds, tensor
from tests.export.tiny import Driver, Prompt, greedy

LENGTH, STEPS = 64, 24
ROOMY = {"keep": 2.5}  # prompt and answer fit into every store


@pytest.fixture(scope="module")
def prompt(checkpoint: Checkpoint) -> Prompt:
    return Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)])


def by_hand(
    model: Any,
    embeddings: Tensor,
    positions: Tensor,
    layer: int,
    choose: Callable[[Tensor, Tensor], tuple[list[int], Tensor, Tensor]],
) -> Tensor:
    """Logits of every token by Hugging Face's layers, called one after another.

    Args:
        embeddings: [tokens, hidden_size]; positions: [tokens].
        choose: hidden states [tokens, hidden_size] before `layer` and attention [heads, tokens, tokens] in the one
            before it -> the rows that go on, their hidden states, and what is added to every query's logits of them.
    """
    decoder = model.model.language_model
    looks: list[Tensor] = []
    hidden, places, bias = embeddings[None], positions, torch.zeros(len(positions))
    with torch.no_grad():
        for number, block in enumerate(decoder.layers):
            if number == layer:
                rows, states, bias = choose(hidden[0], looks[-1] if looks else torch.empty(0))
                hidden, places = states[None], places[rows]
            mask = torch.full((len(places), len(places)), -torch.inf).triu(1) + bias
            hook = block.self_attn.register_forward_hook(lambda _module, _args, out: looks.append(out[1][0]))
            hidden = block(
                hidden, attention_mask=mask[None, None], position_embeddings=decoder.rotary_emb(hidden, places[None])
            )
            hook.remove()
        return model.lm_head(decoder.norm(hidden))[0]


def fastv_by_hand(kinds: list[int], looked_at: Tensor, queries: int, recent: int, length: int) -> list[int]:
    """The rows that FastV's text says are kept of an unpadded prompt, by loops.

    Args:
        looked_at: attention in the layer before, [heads, tokens, tokens].
        recent: last rows, always kept.
        length: S'.
    """
    tokens = len(kinds)
    always = [i for i in range(tokens) if kinds[i] != VISUAL or i >= tokens - recent]
    others = [i for i in range(tokens) if i not in always]
    score = {}
    for i in others:
        score[i] = 0.0
        for query in range(max(0, tokens - queries), tokens):
            seeing = tokens - max(i, tokens - queries)  # of the last queries, so many come after this token
            asked = min(queries, tokens)
            score[i] += float(looked_at[:, query, i].double().mean()) * asked / seeing
    best = sorted(others, key=lambda i: (-score[i], i))
    return sorted(always + best[: length - len(always)])


@pytest.mark.parametrize(("layer", "keep", "queries"), [(1, 0.6, 1), (2, 0.45, 1), (2, 0.6, 3), (1, 0.75, 8)])
def test_fastv_is_hugging_faces_layers_on_fewer_rows(
    checkpoint: Checkpoint, reference: Any, prompt: Prompt, layer: int, keep: float, queries: int
) -> None:
    """Prefill and the decode steps after it; layers before `layer` go on with every token of the prompt."""
    shorten = {"method": "fastv", "layer": layer, "keep": keep, "queries": queries}
    driver = Driver(checkpoint.decoder, tiny.recipe(budget=ROOMY, shorten=shorten), LENGTH)
    tokens, logits = greedy(driver, checkpoint, [prompt], STEPS)
    length = round(keep * LENGTH)
    assert driver.state.shortened is not None
    assert driver.state.shortened.tokens == length < len(prompt)
    assert driver.compactions > 2
    kept: list[int] = []

    def choose(hidden: Tensor, looked_at: Tensor) -> tuple[list[int], Tensor, Tensor]:
        looked_at = looked_at[:, : len(prompt), : len(prompt)]
        kept[:] = fastv_by_hand(prompt.kinds.tolist(), looked_at, queries, driver.state.recent, length)
        rows = kept + list(range(len(prompt), len(hidden)))
        return rows, hidden[rows], torch.zeros(len(rows))

    embeddings = torch.cat([prompt.embeddings, checkpoint.embedding[tokens[0, :-1]]])
    want = by_hand(reference, embeddings, torch.arange(len(embeddings)), layer, choose)
    torch.testing.assert_close(logits[0], want[-STEPS:], atol=1e-4, rtol=0)
    every, answer = set(range(len(prompt))), set(range(len(prompt), len(prompt) + STEPS - 1))
    for number in range(checkpoint.decoder.num_layers):
        cached = every if number < layer else set(kept)
        assert driver.visible(number) == [cached | answer] * checkpoint.decoder.kv_heads[number]


def test_the_oracle_itself_is_the_model_where_nothing_is_dropped(reference: Any, prompt: Prompt) -> None:
    want = tiny.hugging_face(reference, prompt, 1)[1]
    got = by_hand(reference, prompt.embeddings, prompt.positions, 9, lambda *_: ([], torch.empty(0), torch.empty(0)))
    torch.testing.assert_close(got[-1:], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["fastv"])
def test_dropping_nothing_is_off_to_the_bit(checkpoint: Checkpoint, prompt: Prompt, method: str) -> None:
    nothing = {"fastv": {"method": "fastv", "keep": 1.0}}[method]
    runs = [Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH) for tables in ({}, {"shorten": nothing})]
    off, same = (greedy(driver, checkpoint, [prompt], STEPS)[1] for driver in runs)
    assert torch.equal(off, same)
    # And where the bucket is shortened, a prompt that is short enough loses nothing.
    short = Prompt(checkpoint, "how many digits ?")
    half = Driver(checkpoint.decoder, tiny.recipe(shorten={**nothing, **HALF[method]}, budget=ROOMY), LENGTH)
    whole = Driver(checkpoint.decoder, tiny.recipe(budget=ROOMY), LENGTH)
    assert half.state.lengths != whole.state.lengths
    want, got = (greedy(driver, checkpoint, [short], STEPS)[1] for driver in (whole, half))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


HALF: dict[str, dict[str, Any]] = {"fastv": {"layer": 1, "keep": 0.6}}


@pytest.mark.parametrize("method", HALF)
def test_a_batch_of_two_is_two_single_runs(checkpoint: Checkpoint, prompt: Prompt, method: str) -> None:
    tables: dict[str, Any] = {"shorten": {"method": method, **HALF[method]}, "budget": ROOMY}
    prompts = [prompt, Prompt(checkpoint, "how many digits ?", [tiny.picture(3)])]
    both = Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH, batch=2)
    _, logits = greedy(both, checkpoint, prompts, STEPS)
    for item, single in enumerate(prompts):
        alone = Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH)
        torch.testing.assert_close(logits[item], greedy(alone, checkpoint, [single], STEPS)[1][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", HALF)
def test_the_exported_prefill_passes(checkpoint: Checkpoint, tmp_path: Path, method: str) -> None:
    check_exported(checkpoint, tmp_path, shorten={"method": method, **HALF[method]}, modality={"method": "density"})


@pytest.mark.parametrize("method", HALF)
def test_stores_have_no_more_slots_than_their_layer_has_tokens(checkpoint: Checkpoint, method: str) -> None:
    shorten = {"method": method, **HALF[method]}
    full = State(checkpoint.decoder, tiny.recipe(shorten=shorten), LENGTH)
    layer, short = full.recipe.shorten.layer, full.shortened
    assert short is not None
    assert full.capacities == [LENGTH] * layer + [short.tokens] * (3 - layer)
    few = State(checkpoint.decoder, tiny.recipe(shorten=shorten, budget={"keep": 0.2}), LENGTH)
    assert few.capacities == State(checkpoint.decoder, tiny.recipe(budget={"keep": 0.2}), LENGTH).capacities
    bytes_ = {"kv_bytes": 2.5, "keep": 1.0}
    by_bytes = State(checkpoint.decoder, tiny.recipe(shorten=shorten, budget=bytes_), LENGTH)
    assert by_bytes.capacities == full.capacities
    prefill = Prefill(by_bytes, None)
    assert sum(spec.nbytes for spec in by_bytes.specs().values()) == sum(
        t.nbytes for t in prefill(*map(example, prefill.inputs.values()))[1:]
    )


@pytest.mark.parametrize(
    ("shorten", "message"),
    [
        ({"method": "fastv", "layer": 0}, "layer must be at least 1"),
        ({"method": "fastv", "keep": 0.0}, "keep must be in"),
        ({"method": "fastv", "keep": 1.5}, "keep must be in"),
        ({"method": "fastv", "queries": 0}, "queries must be at least 1"),
        ({"method": "fastv", "layer": 3}, "layer = 3 has no layer behind it: the model has 3"),
        ({"method": "fastv", "layer": 1, "keep": 0.01}, "leaves no room beside 2 tokens in a bucket of 64"),
    ],
)
def test_knobs_out_of_range_are_refused(checkpoint: Checkpoint, shorten: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _ = State(checkpoint.decoder, tiny.recipe(shorten=shorten), LENGTH).capacities


@pytest.mark.parametrize("method", HALF)
def test_too_much_text_is_refused(checkpoint: Checkpoint, prompt: Prompt, method: str) -> None:
    driver = Driver(checkpoint.decoder, tiny.recipe(shorten={"method": method, **HALF[method]}), LENGTH)
    short = driver.state.shortened
    assert short is not None

    def wordy(text: int) -> Plain:
        """As long as the bucket: text, then image, then one word."""
        kinds = torch.full((LENGTH,), VISUAL)
        kinds[: text - 1], kinds[-1] = TEXT, TEXT
        places = torch.arange(LENGTH)
        return Plain(torch.randn(LENGTH, checkpoint.decoder.hidden_size), kinds, places, torch.zeros(LENGTH))

    driver.prefill([wordy(short.text)])
    fixed = {i for i in range(LENGTH) if i < short.text - 1 or i >= LENGTH - driver.state.recent}
    for layer in range(checkpoint.decoder.num_layers):
        assert all(fixed <= visible for visible in driver.visible(layer))
    with pytest.raises(ValueError, match=f"{short.text + 1} text tokens do not fit"):
        driver.prefill([wordy(short.text + 1)])


@st.composite
def rows(draw: st.DrawFn, most: int = 33) -> Rows:
    """Odd lengths, padding up to the whole row, few different attentions, all-text and all-visual prompts."""
    rng = np.random.default_rng(draw(seeds))
    batch, length = draw(st.integers(1, 2)), draw(st.integers(2, most))
    kinds = rng.choice([TEXT, VISUAL], (batch, length), p=draw(st.sampled_from([(0.2, 0.8), (0, 1), (0.5, 0.5)])))
    kinds[:, -1] = TEXT
    kinds[np.arange(length) < rng.integers(0, length, (batch, 1))] = PADDING
    attention = rng.integers(0, draw(st.sampled_from([1, 3, 1000])), kinds.shape) / 1000
    fixed = (kinds == TEXT) | (np.arange(length) >= length - draw(st.integers(1, 2)))
    return Rows(
        tensor(rng.standard_normal((batch, length, 6)).astype(np.float32)),
        torch.arange(length).expand(batch, -1),
        tensor(kinds.astype(np.int32)),
        tensor(np.where(kinds == PADDING, -np.inf, 0).astype(np.float32)),
        tensor(np.where(kinds == PADDING, 0, attention).astype(np.float32)),
        tensor(fixed),
    )


@given(rows(), st.floats(0.05, 1))
def test_fastv_keeps_the_most_looked_at(prompt: Rows, keep: float) -> None:
    batch, length = prompt.kinds.shape
    stage = FastV(keep=keep)
    count = stage.lengths(length)[-1]
    if int(prompt.fixed.sum(1).max()) > stage.text(length):
        return  # the runtime refuses it
    got = stage(prompt)
    for item in range(batch):
        groups: list[list[int]] = [[], [], []]  # what stays in any case, visual tokens, padding
        for i in range(length):
            padding = prompt.kinds[item, i] == PADDING
            groups[2 if padding else 0 if prompt.fixed[item, i] else 1].append(i)
        groups[1].sort(key=lambda i: (-prompt.attention[item, i], i))
        want = sorted([i for group in groups for i in group][:count])
        assert got.index[item].tolist() == want
        for field in dataclasses.fields(Rows):
            assert torch.equal(getattr(got, field.name)[item], getattr(prompt, field.name)[item, want])
