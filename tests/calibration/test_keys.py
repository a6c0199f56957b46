"""Key statistics against the keys in Hugging Face's own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from calibration import keys, samples
from calibration.prepare import prepare
from export import checkpoint as checkpoints
from tests.export import tiny

EXACT = "donot_use_mm_for_euclid_dist"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


def cached_keys(model: Any, inputs: dict, start: int = 0) -> list[torch.Tensor]:
    """Post-RoPE keys of every layer of a prompt that begins at a position, [kv_heads, tokens, head_dim]."""
    positions = start + torch.arange(inputs["input_ids"].shape[1])[None]
    with torch.no_grad():
        cache = model(**inputs, position_ids=positions, use_cache=True).past_key_values
    return [layer.keys[0] for layer in cache.layers]


@pytest.mark.parametrize("reach", [0, 10, 200])
def test_statistics_are_those_of_hugging_faces_cache(folder: Path, reach: int) -> None:
    """Of two samples, the second one ends at the last of the positions that they are spread over."""
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    calls: list[None] = []
    statistics = keys.key_statistics(checkpoint, known, lambda: calls.append(None), reach=reach)
    assert len(calls) == len(known) == 2
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    prompts = [samples.model_inputs(checkpoint, sample) for sample in known]
    starts = [0, max(0, reach - prompts[1]["input_ids"].shape[1])]
    cached = [cached_keys(model, prompt, start) for prompt, start in zip(prompts, starts, strict=True)]
    for layer, got in enumerate(statistics):
        rows = torch.cat([item[layer] for item in cached], dim=1)
        assert rows.shape == (2, 2 * cached[0][0].shape[1], 16)
        torch.testing.assert_close(got.center, rows.mean(dim=1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            got.absmax, (rows - rows.mean(dim=1, keepdim=True)).abs().amax(dim=1), rtol=1e-4, atol=1e-5
        )


def test_rows_are_those_of_the_cache_keys_and_values_of_the_same_tokens(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    caches = []
    for sample in known:
        with torch.no_grad():
            cache = model(**samples.model_inputs(checkpoint, sample), use_cache=True).past_key_values
        caches.append([torch.cat([layer.keys[0], layer.values[0]], dim=-1) for layer in cache.layers])
    found, again = (keys.key_statistics(checkpoint, known, rows=20) for _ in range(2))
    for layer, (got, same) in enumerate(zip(found, again, strict=True)):
        assert got.key_rows is not None
        assert got.value_rows is not None
        assert same.key_rows is not None
        assert torch.equal(got.key_rows, same.key_rows)
        tokens = torch.cat([cache[layer] for cache in caches], dim=1)
        assert got.key_rows.shape == (2, 20, 16)
        distance = torch.cdist(torch.cat([got.key_rows, got.value_rows], dim=-1), tokens, compute_mode=EXACT)
        assert (distance.amax(dim=0).amin(dim=-1) < 1e-3).all()  # for both heads there is one token
    assert keys.key_statistics(checkpoint, known)[0].key_rows is None


@pytest.mark.parametrize("sizes", [[100], [1, 2, 97], [5, 5, 5]])
def test_any_row_is_as_likely_to_be_drawn(sizes: list[int]) -> None:
    """Row i holds the number i: over many draws, the mean of those that stay is that of all."""
    total, means = sum(sizes), []
    for seed in range(300):
        drawn = keys.Drawn(8)
        drawn.generator.manual_seed(seed)
        for part in torch.arange(total, dtype=torch.float32).split(sizes):
            drawn.see(part[None, :, None])
        assert drawn.rows.shape == (1, min(8, total), 1)
        assert len(drawn.rows.unique()) == min(8, total)
        means.append(float(drawn.rows.mean()))
    expected = (total - 1) / 2
    error = total / 12**0.5 / (8 * len(means)) ** 0.5
    assert abs(sum(means) / len(means) - expected) < 4 * error


def test_rows_are_drawn_where_a_recipe_needs_them(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    for scale, needed in (("absmax", False), ("mse", True)):
        recipe = tiny.recipe(quantize={"method": "int8", "scale": scale})
        statistics = prepare(checkpoint, {"a": recipe}, known)["a"].statistics
        assert statistics
        assert (statistics[0].value_rows is not None) == needed


def test_statistics_see_the_images(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    first, second = (keys.key_statistics(checkpoint, [sample])[1] for sample in known)
    assert not torch.allclose(first.absmax, second.absmax, rtol=1e-3)
