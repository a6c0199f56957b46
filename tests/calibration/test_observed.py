"""What a compressed model looks at, told by the original tokens: against loops over what it can see, and its output."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calibration.evaluate import Prompt
from calibration.observed import Observed, Reading
from calibration.perceive import Perceive
from calibration.prepare import prepare
from calibration.samples import read as samples_of
from engines.errors import UserError
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.attention import attention_by
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.tokens import VISUAL
from tests.export import tiny

LENGTH, REACH = 48, 80
ANSWER = [17, 30, 21, 9, 17, 40, 33, 12, 25, 17, 8, 19, 44, 2]
EVICTING = {"importance": {"method": "keydiff"}, "budget": {"keep": 0.4}, "protect": {"sinks": 2, "recent": 2}}
FIXED = EVICTING | {"budget": {"keep": 0.1}, "window": {"least": 40, "most": 40, "compact": False}}
MERGES = [
    {"method": "three-way", "merge_above": 0.1, "evict_above": -0.2},
    {"method": "three-way", "merge_above": 0.0, "evict_above": -0.2, "weigh": "count", "keys": "mean"},
    {"method": "d2o"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    torch.set_num_threads(1)
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def prompt(checkpoint: Checkpoint) -> tiny.Prompt:
    return tiny.Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1)])


def observed(checkpoint: Checkpoint, recipe: Recipe, later: bool = False) -> Observed:
    known = None
    if recipe.needs_samples:
        known = prepare(checkpoint, {"a": recipe}, samples_of(checkpoint.path / "samples"))["a"].statistics
    return Observed(checkpoint.decoder, recipe, LENGTH, range(checkpoint.decoder.num_layers), REACH, known, later)


def read(checkpoint: Checkpoint, recipe: Recipe, prompt: Prompt) -> Reading:
    return observed(checkpoint, recipe).read(prompt, ANSWER, checkpoint.embedding, checkpoint.sentence_ends)


def by_loops(
    checkpoint: Checkpoint, prompt: tiny.Prompt, seen: list[list[list[set[int]]]]
) -> tuple[np.ndarray, np.ndarray]:
    """One pass over prompt and answer; a token of the answer looks at its layer's and KV head's positions and itself.

    Args:
        seen: by step, layer and KV head.

    Returns:
        Log probabilities [answer, vocabulary] and attention [layers, answer - 1, heads, REACH].
    """
    decoder = checkpoint.decoder
    count = len(prompt) + len(ANSWER) - 1 - len(seen)  # rows that prefill reads
    rows = torch.cat([prompt.embeddings, checkpoint.embedding[ANSWER[:-1]]])
    found = np.zeros((decoder.num_layers, len(seen), 8, REACH))

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(query)
        group = query.shape[1] // key.shape[1]
        for head, row in np.ndindex(query.shape[1], query.shape[2]):
            kv = head // group
            visible = sorted(seen[row - count][layer][kv] | {row}) if row >= count else list(range(row + 1))
            logits = [scale * float(query[0, head, row] @ key[0, kv, at]) for at in visible]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for at, weight in zip(visible, weights, strict=True):
                share = weight / sum(weights)
                out[0, head, row] += share * value[0, kv, at]
                if row >= count:
                    found[layer, row - count, head, at] = share
        return out

    positions = torch.arange(len(rows))[None]
    with torch.no_grad(), attention_by(attention):
        hidden = decoder.language_model(inputs_embeds=rows[None], position_ids=positions, use_cache=False)[0]
        logits = decoder.head(hidden)[0, len(prompt) - 1 :]
    log_probs = [[x - math.log(sum(math.exp(y) for y in row)) for x in row] for row in logits.tolist()]
    return np.array(log_probs), found[:, 1 - len(ANSWER) :]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "tables",
    [{"budget": {"keep": 2.0}}, EVICTING, FIXED],
    ids=["keeping", "evicting", "never compacting"],
)
def test_attention_and_log_probs_are_what_loops_find(
    checkpoint: Checkpoint, prompt: tiny.Prompt, tables: dict[str, Any], later: bool
) -> None:
    recipe = tiny.recipe(**tables)
    seen: list[list[list[set[int]]]] = []
    watched = observed(checkpoint, recipe, later)
    decode = watched.decode

    def counted(embedding: Tensor, positions: Any, kinds: int | Tensor = 1, position_ids: Any = None) -> Tensor:
        stores = [watched.tensors[f"store_positions.{layer}"][0].tolist() for layer in range(3)]
        window = watched.tensors["window_positions"][0, : watched.count].tolist()
        seen.append([[{*row, *window} - {-1} for row in store] for store in stores])
        return decode(embedding, positions, kinds, position_ids)

    watched.decode = counted  # type: ignore[method-assign]
    found = watched.read(prompt, ANSWER, checkpoint.embedding, checkpoint.sentence_ends)
    question = len(prompt) - 1 - int((prompt.kinds == VISUAL).nonzero()[-1])
    assert len(seen) == len(ANSWER) - 1 + later * question
    assert ("window" in tables) == (watched.compactions == 0)
    if tables.keys() & {"importance"}:
        first = len(prompt) + len(ANSWER) - 1 - len(seen)
        dropped = [first + step - len(kv) for step, layers in enumerate(seen) for layer in layers for kv in layer]
        assert min(dropped) > 0
    log_probs, attention = by_loops(checkpoint, prompt, seen)
    np.testing.assert_allclose(found.log_probs, log_probs, atol=2e-4)
    for layer, rows in found.attention.items():
        np.testing.assert_allclose(rows, attention[layer], atol=1e-5)


@pytest.mark.parametrize("merge", MERGES, ids=lambda merge: "-".join(map(str, merge.values())))
def test_attention_on_the_original_values_is_the_output(
    checkpoint: Checkpoint, prompt: tiny.Prompt, merge: dict[str, Any]
) -> None:
    """A merged slot's attention goes to the tokens whose values it is the mean of, however often it was compacted."""
    recipe = tiny.recipe(merge=merge, budget={"keep": 0.3}, importance={"method": "snapkv"}, protect={"sinks": 1})
    watched = observed(checkpoint, recipe)
    values = torch.zeros(3, 2, REACH, 16)  # of every layer and KV head, by original position
    outputs: dict[int, Tensor] = {}
    for layer, of_layer in watched.watched.items():

        def attend(*inputs: Any, of_layer: Any = of_layer, layer: int = layer) -> Any:
            results = type(of_layer).attend(of_layer, *inputs)
            outputs[layer] = results[0][0, :, 0]
            values[layer, :, position] = inputs[3][0, :, -1]  # the token's own row is the window's last
            return results

        of_layer.attend, of_layer.on = attend, True  # type: ignore[assignment, method-assign]

    def remember(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        values[layer, :, : len(prompt)] = value[0]
        logits = (query @ key.repeat_interleave(4, dim=1).mT) * scale
        causal = torch.full(logits.shape[-2:], -torch.inf).triu(1)
        return (logits + causal).softmax(dim=-1) @ value.repeat_interleave(4, dim=1)

    with torch.no_grad(), attention_by(remember):
        at = torch.arange(len(prompt))[None]
        checkpoint.decoder.language_model(inputs_embeds=prompt.embeddings[None], position_ids=at, use_cache=False)
    watched.prefill([prompt])
    merged = 0
    for step, token in enumerate(ANSWER[:-1]):
        if watched.full:
            watched.compact()
        position = len(prompt) + step
        watched.decode(checkpoint.embedding[token][None], [position])
        for layer, output in outputs.items():
            seen = watched.looked_at(layer, position)
            np.testing.assert_allclose(seen.sum(dim=1), 1, atol=1e-5)
            mixed = torch.stack([row @ values[layer, head // 4] for head, row in enumerate(seen)])
            torch.testing.assert_close(mixed, output, atol=1e-4, rtol=1e-4)
            merged += int((watched.tensors[f"store_bias.{layer}"] > 0.5).sum())
    assert watched.compactions == 2
    assert merged > 0


@pytest.mark.parametrize(
    "quantize",
    [{"method": "int8"}, {"method": "int4", "rotate": True}, {"method": "mixed"}, {"method": "kivi"}],
    ids=str,
)
def test_quantized_attention_is_that_of_the_restored_rows(
    checkpoint: Checkpoint, prompt: tiny.Prompt, quantize: dict[str, Any]
) -> None:
    """In whatever order the store holds them."""
    watched = observed(checkpoint, tiny.recipe(**{**EVICTING, "importance": {"method": "h2o"}}, quantize=quantize))
    given: dict[int, tuple[Any, ...]] = {}
    for layer, of_layer in watched.watched.items():

        def attend(*inputs: Any, of_layer: Any = of_layer, layer: int = layer) -> Any:
            given[layer] = inputs
            return type(of_layer).attend(of_layer, *inputs)

        of_layer.attend = attend  # type: ignore[assignment, method-assign]
    found = watched.read(prompt, ANSWER, checkpoint.embedding, checkpoint.sentence_ends)
    last = len(prompt) + len(ANSWER) - 2
    window = watched.tensors["window_positions"][0].tolist()
    window = [-1 if position == last else position for position in window] + [last]
    for layer, (query, store, key_window, _, window_bias, scale) in given.items():
        key, _ = watched.watched[layer].quantize.restore(store, 16)
        stored = watched.tensors[f"store_positions.{layer}"][0].tolist()
        for head in range(8):
            kv, weights = head // 4, np.zeros(REACH)
            rows = zip([*stored[kv], *window], [*key[0, kv], *key_window[0, kv]], strict=True)
            for (position, row), bias in zip(rows, [*store["store_bias"][0, kv], *window_bias[0, 0]], strict=True):
                if bias > -1e3:
                    weights[position] = math.exp(scale * float(query[0, head, 0] @ row) + float(bias))
            np.testing.assert_allclose(found.attention[layer][-1, head], weights / weights.sum(), atol=1e-4)


def test_pruned_prompts_keep_their_places(checkpoint: Checkpoint, prompt: tiny.Prompt) -> None:
    rows = torch.ones(len(prompt), dtype=torch.bool)
    rows[[3, 5, 8]] = False
    found = read(checkpoint, recipes.load("off"), prompt.only(rows))
    for layer in found.attention.values():
        assert (layer[..., [3, 5, 8]] == 0).all()
        assert (layer[..., : len(prompt)][..., rows] > 0).all()


def test_a_question_that_comes_later_chooses_no_visual_tokens(checkpoint: Checkpoint) -> None:
    recipe = tiny.recipe(perception={"method": "coverage", "keep": 0.25})
    questions = ("what color is the shape ?", "how many digits ?", "is there a circle ?", "row 3 column 2 ?")
    prompts = [tiny.Prompt(checkpoint, question, [tiny.picture(1)]) for question in questions]

    def kept(later: bool) -> set[tuple[int, ...]]:
        pruned = [Perceive(checkpoint, recipe, later)(prompt) for prompt in prompts]
        assert [len(few) for few in pruned] == [len(prompt) - 12 for prompt in prompts]
        return {tuple(few.positions[few.kinds == VISUAL].tolist()) for few in pruned}

    assert len(kept(later=False)) > 1
    assert len(kept(later=True)) == 1


def test_an_answer_that_does_not_fit_the_window_is_refused(checkpoint: Checkpoint, prompt: tiny.Prompt) -> None:
    recipe = tiny.recipe(window={"least": 4, "most": 4, "recent": 0.0, "compact": False})
    with pytest.raises(UserError, match="recipe test ends with 4 tokens after the prompt that is compressed"):
        read(checkpoint, recipe, prompt)
