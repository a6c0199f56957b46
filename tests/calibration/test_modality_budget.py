"""Modality budgets by density: loops over what is cached, the rates' rules one by one, and a planted repetition."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from calibration import __main__ as command_line
from calibration import modality_budget, survey
from calibration import samples as sampling
from calibration.attention_map import AttentionMap
from calibration.observe import observe
from engines.config import parse
from engines.errors import UserError
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.modality import Density
from tests.calibration.loops import TEXT, VISUAL, cosine
from tests.export import tiny
from tests.export.stages.test_modality import quota_of

REPEATS = 0.05  # visual embeddings differ by this share of what they have in common


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which all parts of an image look nearly the same."""
    torch.set_num_threads(1)
    model = tiny.llava()
    projector = model.model.multi_modal_projector.linear_2
    projector.weight.mul_(REPEATS)
    projector.bias.normal_(generator=torch.Generator().manual_seed(0))
    return tiny.save(tmp_path_factory.mktemp("repeats") / "checkpoint", model, count=4)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[sampling.Sample]:
    return sampling.read(folder / "samples")


@pytest.fixture(scope="module")
def measured(checkpoint: Checkpoint, samples: list[sampling.Sample]) -> AttentionMap:
    return survey.measure(checkpoint, samples)


def test_densities_are_what_loops_find(
    folder: Path, checkpoint: Checkpoint, samples: list[sampling.Sample], measured: AttentionMap
) -> None:
    """By Hugging Face's cache of the prompt with its answer behind it: the map reads both."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = checkpoint.processor.tokenizer
    cosines: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        inputs = sampling.model_inputs(checkpoint, sample)
        answer = tokenizer(sample.answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = torch.cat([inputs["input_ids"], answer], dim=1)
        with torch.no_grad():
            cache = model(input_ids=ids, pixel_values=inputs["pixel_values"], use_cache=True).past_key_values
        kinds = [VISUAL if token == checkpoint.image_token_id else TEXT for token in ids[0].tolist()]
        for layer, kind in np.ndindex(len(cache.layers), 2):
            places = [place for place, own in enumerate(kinds) if own == kind]
            for rows in (cache.layers[layer].keys[0], cache.layers[layer].values[0]):
                for head in rows.double().numpy():
                    pairs = [cosine(head[i], head[j]) for i in places for j in places if i != j]
                    cosines.setdefault((layer, kind), []).append(float(np.mean(pairs)))
    want = [[1 - np.mean(cosines[layer, kind]) for kind in (TEXT, VISUAL)] for layer in range(3)]
    np.testing.assert_allclose(modality_budget.densities(measured), want, rtol=2e-3, atol=2e-4)


def test_an_image_that_repeats_itself_is_found_and_gives_way(measured: AttentionMap) -> None:
    budget = modality_budget.measured(measured, visual_cap=1.0, text_cap=1.0, many=1.0)
    assert 3 * budget.visual_density[0] < budget.text_density[0]  # RoPE turns equal keys apart, equal values it leaves
    swapped = dataclasses.replace(budget, visual_density=budget.text_density, text_density=budget.visual_density)
    for known, visual, text in ((budget, TEXT, VISUAL), (swapped, VISUAL, TEXT)):
        shares = modality_budget.kept(known, 40, 40, 0.5)[0]
        assert shares[visual] > 0.7 > 0.3 > shares[text]


densities = st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)), min_size=1, max_size=4)
rates = st.sampled_from([0.0, 0.3, 0.4, 0.8, 1.0])


@given(
    known=densities,
    visual=st.floats(1, 500),
    text=st.floats(1, 500),
    keep=st.floats(0.02, 1),
    visual_cap=rates,
    text_cap=rates,
)
def test_shares_follow_the_rules(
    known: list[tuple[float, float]], visual: float, text: float, keep: float, visual_cap: float, text_cap: float
) -> None:
    lists: dict[str, Any] = {"visual_density": [v for v, _ in known], "text_density": [t for _, t in known]}
    budget = Density(visual_cap=visual_cap, text_cap=text_cap, **lists)
    shares = modality_budget.kept(budget, visual, text, keep)
    room = keep * (visual + text)
    for layer, pair in enumerate(known):
        want = quota_of(budget, visual, text, *pair, room)
        assert shares[layer, VISUAL] == pytest.approx(want / visual, rel=1e-3, abs=2e-3)
        assert shares[layer, TEXT] == pytest.approx((room - want) / text, rel=1e-3, abs=2e-3)


def test_tokens_are_counted_by_kind(checkpoint: Checkpoint, samples: list[sampling.Sample]) -> None:
    seen: list[int] = []
    observe(checkpoint, samples, lambda layer, key, value: seen.append(key.shape[1]) if layer == 0 else None)
    counts = modality_budget.tokens(checkpoint, samples)
    assert counts.sum(axis=1).tolist() == seen
    assert counts[:, VISUAL].tolist() == [tiny.IMAGE_TOKENS * len(sample.images) for sample in samples]


def test_the_command_prints_a_table_that_a_recipe_takes(folder: Path, measured: AttentionMap, tmp_path: Path, capsys):
    path = tmp_path / "a.map"
    measured.save(path)
    options = [str(folder), "--map", str(path), "--text-cap", "0.2"]
    assert command_line.main(["modality", *options]) == 0
    text = capsys.readouterr().out
    data = tomllib.loads(text[text.index("[modality]") :])
    recipe = parse(Recipe, {"name": "pasted", **data}, "pasted")
    want = modality_budget.measured(measured, text_cap=0.2)
    assert dataclasses.asdict(recipe.modality) == dataclasses.asdict(want)
    assert command_line.main(["modality", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    left = modality_budget.kept(want, printed["visual"], printed["text"], printed["keep"])
    np.testing.assert_allclose([printed["text_kept"], printed["visual_kept"]], left.T)


def test_mistakes_name_what_to_do(folder: Path, measured: AttentionMap, tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.map"
    assert command_line.main(["modality", str(folder), "--map", str(path)]) == 2
    assert f"python -m calibration map CHECKPOINT --out {path}" in capsys.readouterr().err
    foreign = dataclasses.replace(measured, facts=dataclasses.replace(measured.facts, weights="another"))
    foreign.save(path)
    assert command_line.main(["modality", str(folder), "--map", str(path)]) == 2
    assert "with other weights: measure it again" in capsys.readouterr().err


def test_a_map_of_text_alone_is_no_guide(measured: AttentionMap) -> None:
    redundancy = measured.key_redundancy.copy()
    redundancy[..., VISUAL] = np.nan
    with pytest.raises(UserError, match="no visual tokens"):
        modality_budget.densities(dataclasses.replace(measured, key_redundancy=redundancy))
