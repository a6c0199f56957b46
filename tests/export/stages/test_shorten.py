"""Shortening a prompt between two decoder layers: against Hugging Face's own layers run by hand, and as a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import runtime
from calibration.evaluate import Prompt as Plain
from engines.errors import UserError
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.graphs import Prefill, State
from export.stages.shorten import FastV
from export.stages.shorten.shorten import Rows
from export.stages.tokens import PADDING, TEXT, VISUAL
from export.to_onnx import example
from tests.export import tiny
from tests.export.conftest import build, once
from tests.export.stages.shortening import by_hand, rows
from tests.export.tiny import Driver, Prompt, greedy

LENGTH, STEPS = 64, 24
ROOMY = {"keep": 2.5}  # prompt and answer fit into every store


@pytest.fixture(scope="module")
def prompt(checkpoint: Checkpoint) -> Prompt:
    return Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)])


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


HALF: dict[str, dict[str, Any]] = {"fastv": {"layer": 1, "keep": 0.6}, "tome": {"layer": 1, "rates": [0.2, 0.25]}}


@pytest.mark.parametrize("method", HALF)
def test_dropping_nothing_is_off_to_the_bit(checkpoint: Checkpoint, prompt: Prompt, method: str) -> None:
    nothing: dict[str, Any] = {"keep": 1.0} if method == "fastv" else {"rates": [0.0]}
    both = tiny.recipe(), tiny.recipe(shorten={"method": method, **nothing})
    runs = [Driver(checkpoint.decoder, recipe, LENGTH) for recipe in both]
    off, same = (greedy(driver, checkpoint, [prompt], STEPS)[1] for driver in runs)
    assert torch.equal(off, same)
    # And where the bucket is shortened, a prompt that is short enough loses nothing.
    short = Prompt(checkpoint, "how many digits ?")
    half = Driver(checkpoint.decoder, tiny.recipe(shorten={"method": method, **HALF[method]}, budget=ROOMY), LENGTH)
    whole = Driver(checkpoint.decoder, tiny.recipe(budget=ROOMY), LENGTH)
    assert half.state.lengths != whole.state.lengths
    want, got = (greedy(driver, checkpoint, [short], STEPS)[1] for driver in (whole, half))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


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
        ({"method": "fastv", "by": "dart"}, "'dart' is none of 'attention', 'diversity', 'coverage'"),
        ({"method": "tome", "rates": []}, "rates must be one or two"),
        ({"method": "tome", "rates": [0.5]}, "each from 0 to below 0.5"),
        ({"method": "tome", "rates": [0.1, 0.1, 0.1]}, "rates must be one or two"),
        ({"method": "tome", "layer": -1}, "layer must be at least 0"),
        ({"method": "tome", "layer": 0}, 'before layer 1 there is no attention yet: weigh = "count"'),
        ({"method": "tome", "rates": [0.49, 0.49]}, "leaves no room beside 2 tokens in a bucket of 64"),
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


def farthest_first(states: np.ndarray) -> list[int]:
    """Places of visual tokens, the first one first, then always the one farthest from those before it."""
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    distance = np.minimum(np.round(1 - unit @ unit.T, 5), 1)  # a right angle is as far as any
    order = [0]
    while len(order) < len(states):
        rest = [i for i in range(len(states)) if i not in order]
        order.append(max(rest, key=lambda i: (min(distance[i, j] for j in order), -i)))
    return order


@given(rows(), st.floats(0.2, 0.9), st.sampled_from(["diversity", "random", "uniform"]))
def test_a_selector_ranks_the_visual_tokens(
    prompt: Rows, keep: float, by: Literal["diversity", "random", "uniform"]
) -> None:
    batch, length = prompt.kinds.shape
    stage = FastV(keep=keep, by=by)
    count = stage.lengths(length)[-1]
    if int(prompt.fixed.sum(1).max()) > count:
        return  # the runtime refuses it
    got = stage(prompt)
    for item in range(batch):
        visual = [i for i in range(length) if prompt.kinds[item, i] == VISUAL and not prompt.fixed[item, i]]
        fixed = [i for i in range(length) if prompt.fixed[item, i] and prompt.kinds[item, i] != PADDING]
        if by == "diversity":
            ranked = [visual[i] for i in farthest_first(prompt.hidden[item, visual].double().numpy())] if visual else []
        elif by == "random":
            ranked = [i for i in np.random.default_rng(0).permutation(length).tolist() if i in visual]
        else:
            bits = (length - 1).bit_length()
            ranked = [i for i in sorted(range(length), key=lambda i: f"{i:0{bits}b}"[::-1]) if i in visual]
        kept = [i for i in got.index[item].tolist() if prompt.kinds[item, i] != PADDING]
        assert kept == sorted(fixed + ranked[: max(0, count - len(fixed))])


def test_coverage_takes_the_last_text_for_the_question() -> None:
    """Of two clusters of equal size, the token kept is of the one that the prompt ends with."""
    generator = torch.Generator().manual_seed(0)
    clusters = torch.eye(4)[[0] * 4 + [1] * 4] + 0.01 * torch.randn(8, 4, generator=generator)
    kinds = torch.tensor([[TEXT] + [VISUAL] * 8 + [TEXT] * 2], dtype=torch.int32)
    for asked, cluster in ((0, range(1, 5)), (1, range(5, 9))):
        hidden = torch.cat([torch.eye(4)[2:3], clusters, torch.eye(4)[[asked, asked]]])[None]
        zeros = torch.zeros(1, 11)
        stage = FastV(keep=4 / 11, by="coverage")
        kept = stage(Rows(hidden, torch.arange(11)[None], kinds, zeros, zeros, kinds, kinds == TEXT)).index[0].tolist()
        assert next(i for i in kept if i in range(1, 9)) in cluster


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Path:
    """Two levels with buckets of 32 and 64 tokens."""

    def make(out: Path) -> None:
        names = {"fastv": "layer = 1\nkeep = 0.5", "tome": "layer = 1\nrates = [0.2, 0.25]\nvideo = true"}
        files = []
        for name, knobs in names.items():
            files.append(out.with_name(f"{name}.toml"))
            files[-1].write_text(
                f'[shorten]\nmethod = "{name}"\n{knobs}\n[quantize]\nmethod = "float32"\n'
                '[window]\nleast = 8\nmost = 8\ndtype = "float32"\n'
            )
        levels = [argument for file in files for argument in ("--recipe", file)]
        build(tiny_path, "--out", out, *levels, "--buckets", 32, 64, "--jobs", 1)

    return once(tmp_path_factory, "shorten-bundle", make)


@pytest.mark.slow
@pytest.mark.parametrize("level", HALF)
def test_a_built_bundle_answers_as_the_evaluator(bundle_path: Path, checkpoint: Checkpoint, level: str) -> None:
    vlm = runtime.open(bundle_path, level=level, threads=1)
    recipe = recipes.load(str(bundle_path.with_name(f"{level}.toml")))
    pictures = [tiny.picture(0), tiny.picture(1)]
    question = "what color is the shape ?"
    result = vlm.generate(question, pictures, STEPS, ignore_eos=True)
    driver = Driver(checkpoint.decoder, recipe, LENGTH)
    tokens, _ = greedy(driver, checkpoint, [Prompt(checkpoint, question, pictures)], STEPS)
    assert result.tokens == tokens[0].tolist()
    assert result.stats.bucket == LENGTH
    assert result.stats.kv_bytes == sum(spec.nbytes for spec in driver.state.specs().values())


@pytest.mark.slow
@pytest.mark.parametrize("level", HALF)
def test_too_much_text_moves_to_a_longer_bucket_and_goes_on_behind_the_longest(bundle_path: Path, level: str) -> None:
    vlm = runtime.open(bundle_path, level=level, threads=1)

    def asked(words: int) -> tuple[int, bool]:
        """The bucket of a prompt of one image and so many words, and whether some of them are read behind it."""
        stats = vlm.generate("red " * words, [tiny.picture(0)], 1, ignore_eos=True).stats
        return stats.bucket, "extend" in stats.seconds

    assert asked(1) == (32, False)
    assert asked(8) == (64, False)  # 32 tokens, 16 of them text
    assert asked(30) == (64, True)
