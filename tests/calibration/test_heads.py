"""What merged KV heads cost: the prediction against folded weights, on other samples too, and planted twins."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import __main__ as command_line
from calibration import samples as sampling
from calibration.heads import Merged, choose, head_moments, pool, predict
from calibration.observe import run
from calibration.prepare import prepare
from calibration.samples import Sample
from engines.config import parse
from engines.errors import UserError
from export import checkpoint as checkpoints
from export.attention import full_attention
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.heads import HeadMoments, Heads
from tests.calibration import planted
from tests.export import tiny

AGREES = 1.5  # prediction and error on samples that it was not made of, at most this many times apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return planted.save(tmp_path_factory.mktemp("planted") / "checkpoint", count=16)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return sampling.read(folder / "samples")


def outputs(model: Any, checkpoint: Checkpoint, samples: list[Sample]) -> list[np.ndarray]:
    """What o_proj of every layer returns for all tokens of the samples, [tokens, hidden_size]."""
    seen: list[list[torch.Tensor]] = [[] for _ in model.layers]
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, out, to=to: to.append(out[0]))
        for layer, to in zip(model.layers, seen, strict=True)
    ]

    def attention(layer: int, query: Any, key: Any, value: Any, scale: float, mask: Any) -> torch.Tensor:
        order = torch.arange(key.shape[2])
        assert torch.equal(mask, torch.where(order[:, None] >= order, 0.0, -1e4)[None])
        return full_attention(query, key, value, mask, scale)

    decoder = dataclasses.replace(checkpoint.decoder, language_model=model)
    run(dataclasses.replace(checkpoint, decoder=decoder), samples, attention, lambda: None)
    for hook in hooks:
        hook.remove()
    return [torch.cat(rows).double().numpy() for rows in seen]


def made(heads: Heads, known: list[HeadMoments], layer: int, step: Merged, checkpoint: Checkpoint, samples) -> float:
    """The error of one layer in whose weights the heads of a step are folded, and no others."""
    alone = [step.similarity if other == layer else 1.01 for other in range(planted.LAYERS)]
    model = checkpoint.decoder.language_model
    folded, _ = Heads(merge=True, thresholds=alone, most=heads.most, align=heads.align).fold(model, known)
    plain, fewer = (outputs(which, checkpoint, samples)[layer] for which in (model, folded))
    off = sum(float(np.dot(x - y, x - y)) for x, y in zip(plain, fewer, strict=True))
    return off / sum(float(np.dot(x, x)) for x in plain)


@pytest.mark.parametrize("align", [False, True])
def test_the_predicted_error_is_the_one_that_is_made(
    checkpoint: Checkpoint, samples: list[Sample], align: bool
) -> None:
    heads = Heads(merge=True, align=align)
    calibration, held_out = samples[:10], samples[10:]
    known = head_moments(checkpoint, calibration)
    layers = predict(checkpoint, calibration, heads, known)
    assert len(layers) == planted.LAYERS
    for layer, steps in enumerate(layers):
        assert [len(step.groups) for step in steps] == [4, 3, 2, 1]
        assert steps[0].error == 0
        for step in steps[1:]:
            here, there = (made(heads, known, layer, step, checkpoint, some) for some in (calibration, held_out))
            assert step.error == pytest.approx(here, rel=1e-3, abs=1e-9)
            assert step.error <= AGREES * there + 1e-9
            assert there <= AGREES * step.error + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("align", [False, True])
def test_it_holds_on_other_prompts_of_a_trained_model(align: bool) -> None:
    """An eighth of the demo VLM's samples; that what is predicted is what is made, the test above says."""
    demo = Path(__file__).parents[2] / "models" / "demo-vlm"
    checkpoint, heads = checkpoints.load(demo), Heads(merge=True, align=align)
    calibration, held_out = sampling.split(sampling.read(demo / "samples"))
    calibration, held_out = calibration[::2], held_out[::2]
    known = head_moments(checkpoint, calibration)
    predicted, found = (predict(checkpoint, some, heads, known) for some in (calibration, held_out))
    for steps, others in zip(predicted, found, strict=True):
        assert len(steps) > 4
        for step, other in zip(steps[1:], others[1:], strict=True):
            assert 1 / AGREES < step.error / other.error < AGREES


@pytest.mark.parametrize("align", [False, True])
def test_identical_heads_are_found_and_cost_nothing(checkpoint: Checkpoint, samples: list[Sample], align: bool) -> None:
    layer, *twins = planted.TWINS
    layers = predict(checkpoint, samples, Heads(align=align), head_moments(checkpoint, samples))
    assert twins in layers[layer][1].groups
    assert layers[layer][1].similarity == pytest.approx(1, abs=1e-4)
    assert layers[layer][1].error < 1e-9
    others = [steps[1].error for number, steps in enumerate(layers) if number != layer] + [layers[layer][2].error]
    assert min(others) > 1e-4
    picked = [choose(steps, 1e-6) for steps in layers]
    assert [len(step.groups) for step, _ in picked] == [3 if number == layer else 4 for number in range(planted.LAYERS)]


heads_of = st.integers(2, 6)


@given(count=heads_of, half=st.integers(1, 5), tokens=st.integers(1, 4), align=st.booleans(), seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_head_sees_the_mean_of_its_group_turned_back(
    count: int, half: int, tokens: int, align: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((count, tokens, 2 * half)).astype(np.float32) for _ in range(2))
    pairs = key[..., :half] + 1j * key[..., half:]
    moments = HeadMoments(
        torch.from_numpy(np.einsum("itd,jtd->ijd", pairs.conj(), pairs).astype(np.complex64)),
        torch.from_numpy(np.einsum("itd,jte->ijde", value, value)),
    )
    group = sorted(rng.permutation(count)[: rng.integers(2, count + 1)].tolist())
    got = pool(moments, group, align, torch.from_numpy(key), torch.from_numpy(value))
    turns = [[np.eye(2 * half)] * 2] + [[t.numpy() for t in moments.turns(head, group[0])] for head in group[1:]]
    for part, rows in enumerate((key, value)):
        for token in range(tokens):
            mean = np.zeros(2 * half)
            for head, turn in zip(group, turns, strict=True):
                mean += (turn[part] @ rows[head, token] if align else rows[head, token]) / len(group)
            for place, turn in enumerate(turns):
                want = turn[part].T @ mean if align else mean
                np.testing.assert_allclose(got[part][place, token].numpy(), want, atol=1e-4)


@given(count=heads_of, most=st.integers(2, 4), limit=st.floats(0, 1), seed=st.integers(0, 999), coarse=st.booleans())
@settings(deadline=None)
def test_the_threshold_makes_the_groups_that_were_chosen(
    count: int, most: int, limit: float, seed: int, coarse: bool
) -> None:
    rng = np.random.default_rng(seed)
    cosines = rng.uniform(-1, 1, (count, count))
    similarity = torch.from_numpy(np.round((cosines + cosines.T) / 2, 1 if coarse else 7)).float()  # ties if coarse
    heads = Heads(merge=True, most=most)
    errors = rng.uniform(0, 1, count)
    merges = list(heads.merges(similarity))
    steps = [Merged(1.0, [[head] for head in range(count)], 0.0)]
    steps += [Merged(alike, groups, float(error)) for (alike, groups), error in zip(merges, errors, strict=False)]
    best, threshold = choose(steps, limit)
    assert best.error <= limit
    assert heads.clusters(similarity, threshold) == best.groups
    for step, after in zip(steps, [*(step.similarity for step in steps[1:]), -2.0], strict=True):
        if len(step.groups) < len(best.groups) and step.error <= limit:
            assert step.similarity - after < 2e-4  # no threshold tells these apart


def test_the_command_prints_a_table_that_a_recipe_takes(folder: Path, checkpoint: Checkpoint, samples, capsys) -> None:
    options = ["heads", str(folder), "--limit-error", "0.0001"]
    assert command_line.main(options) == 0
    text = capsys.readouterr().out
    assert "15 of 16 KV heads are left: 960 of 1,024 bytes a token in fp16" in text
    recipe = parse(Recipe, {"name": "pasted", **tomllib.loads(text[text.index("[heads]") :])}, "pasted")
    found = prepare(checkpoint, {"pasted": recipe}, samples[:4])["pasted"]  # other samples, the same heads
    assert found.decoder.kv_heads == [3 if layer == planted.TWINS[0] else 4 for layer in range(planted.LAYERS)]
    assert "15 of 16 KV heads are left" in found.note
    assert command_line.main([*options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["thresholds"] == recipe.heads.thresholds
    assert printed["layers"][planted.TWINS[0]][1]["groups"] == [[0, 2], [1], [3]]


def test_nothing_to_merge_is_said(tmp_path: Path, capsys) -> None:
    folder = tiny.save(tmp_path / "checkpoint")
    assert command_line.main(["heads", str(folder), "--limit-error", "1e-6"]) == 0
    text = capsys.readouterr().out
    assert "leave [heads] out" in text
    assert "merge = true" not in text


def test_a_model_whose_heads_cannot_be_merged_is_refused(checkpoint: Checkpoint, samples: list[Sample]) -> None:
    known = head_moments(checkpoint, samples[:1])
    attention: Any = checkpoint.decoder.language_model.layers[0].self_attn  # type: ignore[union-attr,index]
    attention.q_norm = torch.nn.Identity()
    try:
        with pytest.raises(UserError, match="q_norm beside its projections"):
            predict(checkpoint, samples[:1], Heads(), known)
    finally:
        del attention.q_norm


def test_a_group_of_one_head_is_no_group(folder: Path, capsys) -> None:
    assert command_line.main(["heads", str(folder), "--most", "1"]) == 2
    assert "most must be at least 2" in capsys.readouterr().err
