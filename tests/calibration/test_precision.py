"""The precision that each layer bears: losses as the graphs have them, the planted spike found, a recipe at the end."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration import __main__ as command_line
from calibration import precision, samples
from calibration.evaluate import Eager, prompt_of
from calibration.prepare import prepare
from calibration.sensitivity import read
from engines.config import parse
from engines.errors import UserError
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.quantize.by_layer import ByLayer
from tests.calibration import planted

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
GATE = ("int4", "int8", "float16")


def recipe(**quantize: Any) -> Recipe:
    window = {"least": 8, "most": 8, "recent": 0.0, "compact": False, "dtype": "float32"}
    plain = {"importance": {"method": "keydiff"}, "budget": {"method": "uniform"}, "window": window}
    return parse(Recipe, {"name": "a", "quantize": quantize, **plain}, "a")


def losses_of(
    checkpoint: Checkpoint, base: Recipe, methods: tuple[str, ...], known: list[samples.Sample]
) -> np.ndarray:
    """[layers, methods]"""
    calibrated = prepare(checkpoint, {"a": base}, known)["a"].statistics
    stages = [precision.method_of(base, table) for table in precision.tables(base, methods)]
    layers = range(checkpoint.decoder.num_layers)
    choices = [
        {layer: precision.through(s, calibrated[layer] if calibrated else None)} for layer in layers for s in stages
    ]
    return precision.measure(checkpoint, base, known, choices).reshape(len(layers), len(stages))


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[samples.Sample]]:
    folder = planted.save(tmp_path_factory.mktemp("planted") / "checkpoint", count=6)
    return checkpoints.load(folder), samples.read(folder / "samples")


@pytest.fixture(scope="module")
def losses(spiked: tuple[Checkpoint, list[samples.Sample]]) -> dict[bool, np.ndarray]:
    """By whether keys are centred."""
    return {center: losses_of(spiked[0], recipe(center=center), GATE, spiked[1]) for center in (True, False)}


def test_the_int4_gate_sends_the_spiked_layer_to_int8_unless_keys_are_centred(losses: dict[bool, np.ndarray]) -> None:
    limit = 1.25 * planted.LAYERS * losses[True][:, 0].max()  # every layer bears int4 with centring
    assert precision.choose(losses[True], limit) == [0] * planted.LAYERS
    chosen = precision.choose(losses[False], limit)
    assert [GATE[i] for i in chosen] == ["int8" if layer == planted.SPIKE[0] else "int4" for layer in range(4)]


def test_fewer_bits_lose_more_and_half_precision_nothing(losses: dict[bool, np.ndarray]) -> None:
    for table in losses.values():
        assert (table[:, 0] > 10 * table[:, 1]).all()
        assert (table[:, 1] > table[:, 2]).all()
        assert (abs(table[:, 2]) < 1e-5).all()


def test_a_layer_that_looks_at_nothing_bears_most(losses: dict[bool, np.ndarray]) -> None:
    assert losses[True][:, 0].argmin() == planted.NOISY


def test_a_quantized_cache_says_what_the_graphs_say() -> None:
    """All layers at once, each by another method: `measure`'s way against prefill and decode."""
    layers = [
        "int4",
        "k8v4",
        {"method": "int8", "center": False},
        "kivi",
        "float16",
        {"method": "int8", "scale": "mse"},
    ]
    checkpoint = checkpoints.load(DEMO)
    few = samples.read(DEMO / "samples")[:2]
    mixed = recipe(method="by-layer", layers=layers)
    known = prepare(checkpoint, {"a": mixed}, few)["a"].statistics
    assert known
    prompt = prompt_of(checkpoint, samples.model_inputs(checkpoint, few[0]))
    said = read(checkpoint, mixed, prompt, later=False)
    assert isinstance(mixed.quantize, ByLayer)
    ways = {i: precision.through(own, known[i]) for i, own in enumerate(mixed.quantize.layers)}
    loss = precision.measure(checkpoint, mixed, few[:1], [ways, {}])

    eager = Eager(checkpoint.decoder, mixed, len(prompt), statistics=known)
    eager.prefill([prompt])
    steps = [eager.decode(row[None], [len(prompt) + i]) for i, row in enumerate(said.rest[0])]
    told = torch.cat(steps).log_softmax(-1)
    want = (said.log_probs.exp() * (said.log_probs - told)).sum() / len(told)
    assert loss[0] == pytest.approx(float(want), rel=1e-2, abs=1e-7)
    assert loss[0] > 1e-6
    assert loss[1] == 0


@given(st.data())
def test_a_layer_gets_the_first_method_within_its_share(data: st.DataObject) -> None:
    layers, methods = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 9), min_size=methods, max_size=methods)
    table = data.draw(st.lists(rows, min_size=layers, max_size=layers))
    limit = data.draw(st.integers(1, 40))
    for row, got in zip(table, precision.choose(np.array(table, dtype=float), limit), strict=True):
        want = [i for i, loss in enumerate(row) if loss * layers <= limit]
        assert got == (want[0] if want else methods - 1)


def test_methods_take_over_the_recipes_knobs_where_they_have_them() -> None:
    base = recipe(method="k8v4", center=False, rotate=True, group=16, margin=1.1)
    assert precision.tables(base) == [
        {"method": "int4", "center": False, "rotate": True, "group": 16},
        {"method": "k8v4", "center": False, "rotate": True, "group": 16},
        {"method": "int8", "center": False, "rotate": True},
        {"method": "float16"},
    ]
    assert precision.tables(base, ["int8", "int8"]) == precision.tables(base, ["int8"])
    assert precision.tables(recipe(method="float32")) == [{"method": method} for method in precision.METHODS]


def test_a_fragment_is_read_back() -> None:
    tables: list[dict[str, Any]] = [
        {"method": "int4"},
        {"method": "int8", "center": False, "scale": "mse", "margin": 1.5},
        {"method": "float16"},
    ]
    found = parse(Recipe, {"name": "a"} | tomllib.loads(precision.fragment(tables)), "a").quantize
    assert isinstance(found, ByLayer)
    for table, layer in zip(tables, found.layers, strict=True):
        assert {name: getattr(layer, name) for name in table} == table


def test_from_command_to_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["precision", str(DEMO), "--limit", "1", "--methods", "int4", "int8", "--limit-kl", "1e-4"]
    assert command_line.main(command) == 0
    table, fragment = capsys.readouterr().out.split("\n\n")
    rows = [line.split() for line in table.splitlines()[2:8]]
    assert [row[0] for row in rows] == [str(layer) for layer in range(6)]
    quantize = parse(Recipe, {"name": "a"} | tomllib.loads(fragment), "a").quantize
    assert isinstance(quantize, ByLayer)
    marked = [("int4", "int8")[next(i for i, text in enumerate(row[1:]) if text.endswith("*"))] for row in rows]
    assert [layer.method for layer in quantize.layers] == marked

    assert command_line.main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [("int4", "int8")[i] for i in told["chosen"]] == marked
    assert [f"{loss:.1e}" for loss in told["kl"][3]] == [text.rstrip("*") for text in rows[3][1:]]
    assert told["kl_together"] < told["limit_kl"] == 1e-4


def test_what_no_method_and_not_all_together_keep_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["precision", str(DEMO), "--limit", "1", "--methods", "int4", "--limit-kl", "1e-9"]) == 0
    told = capsys.readouterr().out
    assert "above the limit: layers are not independent, lower --limit-kl" in told
    assert "layers that lose more by every method: 0, 1, 2, 3, 4, 5\n" in told


def test_text_alone_cannot_be_quantized_before_the_question() -> None:
    with pytest.raises(UserError, match="no sample has an answer that is read from the cache"):
        precision.measure(checkpoints.load(DEMO), recipe(), [samples.Sample([], "what is it ?")], [{}], later=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precision", "nowhere"], "nowhere"),
        (["precision", str(DEMO), "--limit-kl", "0"], "must be a number above 0, got '0'"),
        (["precision", str(DEMO), "--limit-kl", "nan"], "must be a number above 0, got 'nan'"),
        (["precision", str(DEMO), "--methods", "int5"], "no method 'int5': choose from"),
        (["precision", str(DEMO), "--methods", "by-layer"], "that are of all layers, not by-layer"),
        (["precision", str(DEMO), "--samples", "nowhere"], "samples.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
