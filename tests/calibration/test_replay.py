"""Texts that are read once: the same as prefill and token after token, whatever the recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibration.evaluate import Eager
from calibration.replay import Replay, observers, prompt_of_ids, read
from engines.errors import UserError
from engines.tokens import marked
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.recipe import Recipe, Window
from export.stages.quantize import Float32
from tests.export import test_text_only, tiny

LENGTH, TEXT, FOLLOWING = 64, 61, 40  # a bucket, a text in it, and what is read behind


def recipe(name: str) -> Recipe:
    """A preset whose window is full several times, or never; in float32, where no code lies on a rounding's edge."""
    found = dataclasses.replace(recipes.load(name), quantize=Float32())
    if found.budget.kv_bytes:  # of so short a text they leave nothing beside the window
        found = dataclasses.replace(found, budget=dataclasses.replace(found.budget, kv_bytes=None, keep=0.3))
    window = Window(share=0.0, least=8, recent=0.25, chunk=4, dtype="float32")
    return found if name == "off" else dataclasses.replace(found, window=window)


RECIPES = {name: recipe(name) for name in ("off", "light", "balanced", "extreme", "dense-document")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoints.load(test_text_only.save(tmp_path_factory.mktemp("llama") / "checkpoint", "llama"))


@pytest.fixture(scope="module")
def ids(checkpoint: Checkpoint) -> list[int]:
    chance = torch.Generator().manual_seed(1)
    return torch.randint(3, len(checkpoint.embedding), [TEXT + FOLLOWING], generator=chance).tolist()


def one_by_one(checkpoint: Checkpoint, recipe: Recipe, ids: list[int]) -> Tensor:
    """Log probabilities at the places behind the text by prefill and decode."""
    eager = Eager(checkpoint.decoder, recipe, LENGTH, statistics=tiny.statistics(checkpoint.decoder))
    rows, whole = [eager.prefill([prompt_of_ids(checkpoint, ids[:TEXT])])], prompt_of_ids(checkpoint, ids)
    kinds = marked(whole.kinds.numpy(), whole.segments.numpy())
    for at in range(TEXT, len(ids) - 1):
        if eager.full:
            eager.compact()
        rows.append(eager.decode(whole.embeddings[at][None], [at], int(kinds[at])))
    return torch.cat(rows).log_softmax(dim=-1)


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_prefill_and_decode(checkpoint: Checkpoint, ids: list[int], name: str) -> None:
    recipe = RECIPES[name]
    replay = Replay(checkpoint.decoder, recipe, LENGTH, tiny.statistics(checkpoint.decoder))
    once = read(checkpoint, ids[:TEXT], observers(recipe, LENGTH))
    found, wanted = replay.score(checkpoint, once, ids[TEXT:]), one_by_one(checkpoint, recipe, ids)
    assert found.shape == (FOLLOWING, len(checkpoint.embedding))
    assert replay.compactions == (0 if name == "off" else 6)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_codes_are_of_centred_keys(checkpoint: Checkpoint, ids: list[int]) -> None:
    recipe = dataclasses.replace(RECIPES["balanced"], quantize=recipes.load("balanced").quantize)
    replay = Replay(checkpoint.decoder, recipe, LENGTH, tiny.statistics(checkpoint.decoder))
    found = replay.score(checkpoint, read(checkpoint, ids[:TEXT], 8), ids[TEXT:])
    assert (found - one_by_one(checkpoint, recipe, ids)).abs().median() < 1e-3


def test_levels_that_drop_say_something_else(checkpoint: Checkpoint, ids: list[int]) -> None:
    said = {}
    for name in ("off", "extreme"):
        replay = Replay(checkpoint.decoder, RECIPES[name], LENGTH, tiny.statistics(checkpoint.decoder))
        said[name] = replay.score(checkpoint, read(checkpoint, ids[:TEXT], LENGTH), ids[TEXT:])
    torch.testing.assert_close(said["off"][0], said["extreme"][0])  # by prefill, which drops nothing
    assert (said["off"] - said["extreme"])[1:].abs().amax(dim=-1).min() > 1e-3


def test_a_text_behind_a_text_is_one_text(checkpoint: Checkpoint, ids: list[int]) -> None:
    whole = read(checkpoint, ids[:TEXT], 8)
    begun = read(checkpoint, ids[:50], 8)
    both = read(checkpoint, ids[50:TEXT], 8, begun)
    assert both.ids == whole.ids
    assert len(begun.ids) == 50  # another tail may follow it
    for one, other in ((both.queries, whole.queries), (both.keys, whole.keys), (both.values, whole.values)):
        torch.testing.assert_close(torch.stack(one), torch.stack(other), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(both.hidden, whole.hidden, atol=1e-5, rtol=1e-4)


def test_what_does_not_fit_is_refused(checkpoint: Checkpoint, ids: list[int], tmp_path: Path) -> None:
    small = dataclasses.replace(RECIPES["off"], window=Window(share=0, least=8, most=8, recent=0, compact=False))
    with pytest.raises(UserError, match="holds 8 tokens behind a prompt: score fewer"):
        Replay(checkpoint.decoder, small, LENGTH).score(checkpoint, read(checkpoint, ids[:TEXT], 8), ids[TEXT:])
    slides = checkpoints.load(test_text_only.save(tmp_path / "m", "mistral", sliding_window=16))
    with pytest.raises(UserError, match="plain causal attention only"):
        read(slides, ids[:8], 8)
