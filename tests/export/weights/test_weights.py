"""Weights of a model that are quantized, and of a bundle that is built with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaForConditionalGeneration

from calibration import weights as guarding
from calibration.prepare import prepare
from calibration.samples import read
from engines import bundle as bundles
from engines.bundle import Bundle
from engines.guard import Limits
from engines.ort import OrtSession
from export import build as command
from export import checkpoint as checkpoints
from export.to_onnx import WeightFile
from export.weights import Weights
from export.weights.grid import LEAST_SIZE
from tests.export import tiny
from tests.export.conftest import build

INT4 = Weights("int4")


def tied() -> LlavaForConditionalGeneration:
    """The tiny model with one table for what is read and what is said."""
    model = tiny.llava()
    config: Any = model.config
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = True
    model.lm_head.weight = model.get_input_embeddings().weight
    return model


@pytest.fixture(scope="module")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tied") / "checkpoint", tied())


def test_layers_take_the_bits_and_tables_take_8(tiny_path: Path) -> None:
    whole, checkpoint = checkpoints.load(tiny_path), checkpoints.load(tiny_path).quantized(INT4)
    assert checkpoint.weights == INT4
    before, after = dict(whole.model.named_parameters()), dict(checkpoint.model.named_parameters())
    for name, weight in after.items():
        decoder, table = "language_model.layers" in name, "lm_head" in name or "embed_tokens" in name
        if weight.ndim == 2 and weight.numel() >= LEAST_SIZE and (decoder or table):
            assert (INT4.layers if decoder else INT4.table).find(weight) is not None, name
            error = (weight - before[name]).norm() / before[name].norm()
            assert 0 < error < (0.15 if decoder else 0.02), name
        else:
            assert torch.equal(weight, before[name]), name
    assert INT4.table.find(checkpoint.embedding) is not None


@pytest.mark.parametrize("dtype", ["int4", "float16"])
def test_a_scaled_table_is_stored_as_it_is_read(tiny_path: Path, tmp_path: Path, dtype: str) -> None:
    checkpoint = checkpoints.load(tiny_path)
    module = checkpoint.model.get_input_embeddings()
    module.register_buffer("embed_scale", torch.tensor(64**0.5 * 1.01))
    scaled = module.weight * module.embed_scale
    checkpoint = checkpoint.quantized(Weights(dtype))
    with WeightFile(tmp_path) as file:
        embedding = checkpoint.weights.store(checkpoint.embedding, file.add)
    assert embedding.dtype == {"int4": "uint8", "float16": "float16"}[dtype]
    torch.testing.assert_close(checkpoint.embedding, scaled, rtol=0, atol=0.01 * scaled.abs().max().item())
    assert not torch.equal(checkpoint.embedding, scaled)


def test_float32_leaves_all_as_it_is(tiny_path: Path) -> None:
    whole, checkpoint = checkpoints.load(tiny_path), checkpoints.load(tiny_path).quantized(Weights())
    for (name, weight), before in zip(checkpoint.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(weight, before), name


def test_merged_heads_lie_on_the_grid_too(tiny_path: Path) -> None:
    checkpoint = checkpoints.load(tiny_path).quantized(INT4)
    recipe = tiny.recipe(heads={"merge": True, "threshold": -1.0})
    merged = prepare(checkpoint, {"test": recipe}, read(tiny_path / "samples"))["test"].decoder
    assert sum(merged.kv_heads) < sum(checkpoint.decoder.kv_heads)
    for name, weight in merged.language_model.named_parameters():
        if weight.ndim == 2 and weight.numel() >= LEAST_SIZE and "layers" in name:
            assert INT4.layers.find(weight) is not None, name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tied_path: Path) -> Bundle:
    out = tmp_path_factory.mktemp("int4") / "bundle"
    build(tied_path, "--out", out, "--recipe", "off", "--images", "1", "--weights", "int4", "--no-report", guard="warn")
    return bundles.read(out)


@pytest.mark.slow
def test_a_bundle_has_each_weight_once(built: Bundle, tied_path: Path) -> None:
    checkpoint = checkpoints.load(tied_path).quantized(INT4)
    np.testing.assert_array_equal(built.embedding()[np.arange(20)], checkpoint.embedding.numpy()[:20])
    layers: Any = checkpoint.decoder.language_model.layers
    quantized = {
        weight.data_ptr(): weight.numel() * (grid.bits / 8 + 4 / grid.group_of(weight.shape[1]))
        for grid, owner in ((INT4.table, checkpoint.decoder.head), (INT4.layers, layers))
        for weight in owner.parameters()
        if weight.ndim == 2 and weight.numel() >= LEAST_SIZE
    }
    every = {p.data_ptr(): p for p in checkpoint.model.parameters()}
    others = [p for place, p in every.items() if place not in quantized]
    least, padding = sum(quantized.values()), 2 * 4096 * (2 * len(quantized) + len(others))
    assert least < built.manifest.files[bundles.WEIGHTS].bytes < least + sum(4 * p.numel() for p in others) + padding
    stored = built.manifest.weights
    assert (stored.dtype, stored.group) == ("int4", 32)
    assert stored.parameters == sum(p.numel() for p in checkpoint.model.parameters())
    assert len(stored.guard.verdicts) == 1
    assert "int4 in groups of 32" in stored.line(1)


@pytest.mark.slow
def test_a_bundle_computes_with_them(built: Bundle, tied_path: Path) -> None:
    """The graphs' logits are those of the quantized model, and not those of the model as it was."""
    graph = next(graph for name, graph in built.manifest.graphs.items() if "prefill" in name)
    logits, length = [], graph.inputs[0].shape[1]
    for weights in (Weights(), INT4):
        checkpoint = checkpoints.load(tied_path).quantized(weights)
        prompt = tiny.Prompt(checkpoint, "what color is the shape ?", [tiny.picture(0)])
        logits.append(tiny.Driver(checkpoint.decoder, tiny.recipe(), len(prompt)).prefill([prompt])[0].numpy())
    rows = {"embeddings": prompt.embeddings, "positions": prompt.positions, "kinds": prompt.kinds}
    feeds = {}
    for spec in graph.inputs:
        feeds[spec.name] = np.zeros(spec.shape, spec.dtype)
        feeds[spec.name][0, length - len(prompt) :] = rows[spec.name].numpy()
    got = OrtSession(built.file(graph.file), threads=1).run(feeds)["logits"][0]
    whole, quantized = (np.abs(got - wanted).max() / np.abs(wanted).max() for wanted in logits)
    assert quantized < 0.1
    assert quantized < whole / 2


def test_weights_that_cost_too_much_are_refused(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_path), "--recipe", "off", "--weights", "int4", "--out", str(tmp_path / "out")]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert "int4 weights are refused: attention KL" in error  # a random model bears less than a trained one
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "advised"),
    [
        (["int4"], ": give more bits (--weights int8), or build it as it is (--guard warn)"),
        (["int4", "--group", "64"], ": give more bits (--weights int8), a scale for fewer of them (--group 32), or "),
        (["int8"], ": give more bits (--weights float16), a scale for fewer of them (--group 32), or build it "),
        (["int8", "--group", "32"], ": give more bits (--weights float16), or build it as it is "),
        (["float16"], ": give more bits (--weights float32), or build it as it is "),
    ],
)
def test_refused_weights_are_told_what_costs_less(
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    advised: str,
) -> None:
    """And not what they have already."""
    monkeypatch.setattr(guarding, "Limits", partial(Limits, logit_kl=0.0))
    assert command.main([str(tiny_path), "--recipe", "off", "--out", str(tmp_path / "out"), "--weights", *asked]) == 2
    error = capsys.readouterr().err
    assert f"error: {asked[0]} weights are refused: " in error
    assert advised in error


def test_a_group_without_quantized_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--group", "32", "--out", str(tmp_path / "out")]) == 2
    assert "--group 32 is of --weights int4 or int8" in capsys.readouterr().err
