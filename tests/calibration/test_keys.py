"""Key statistics against the keys in Hugging Face's own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from calibration import keys, samples
from export import checkpoint as checkpoints
from tests.export import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


def cached_keys(model: Any, inputs: dict) -> list[torch.Tensor]:
    """Post-RoPE keys of every layer, [kv_heads, tokens, head_dim]."""
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    return [layer.keys[0] for layer in cache.layers]


def test_statistics_are_those_of_hugging_faces_cache(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    calls: list[None] = []
    statistics = keys.key_statistics(checkpoint, known, lambda: calls.append(None))
    assert len(calls) == len(known) == 2
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    cached = [cached_keys(model, samples.model_inputs(checkpoint.processor, sample)) for sample in known]
    for layer, got in enumerate(statistics):
        rows = torch.cat([item[layer] for item in cached], dim=1)
        assert rows.shape == (2, 2 * cached[0][0].shape[1], 16)
        torch.testing.assert_close(got.center, rows.mean(dim=1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            got.absmax, (rows - rows.mean(dim=1, keepdim=True)).abs().amax(dim=1), rtol=1e-4, atol=1e-5
        )


def test_statistics_see_the_images(folder: Path) -> None:
    checkpoint, known = checkpoints.load(folder), samples.read(folder / "samples")
    first, second = (keys.key_statistics(checkpoint, [sample])[1] for sample in known)
    assert not torch.allclose(first.absmax, second.absmax, rtol=1e-3)
