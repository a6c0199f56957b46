"""A method for each layer: stores as it makes them alone, one pair of bits by the operator, bytes in the budget."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch

from engines.config import parse
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.graphs import Decode, State
from export.recipe import Recipe
from export.stages.quantize.by_layer import ByLayer
from tests.export import tiny
from tests.export.tiny import Driver, Prompt

LENGTH = 48
MIXED: list[Any] = ["int4", {"method": "int8", "center": False}, {"method": "k8v4", "rotate": True, "group": 8}]


def by_layer(layers: list[Any], **tables: Any) -> Recipe:
    return tiny.recipe(**tables, quantize={"method": "by-layer", "layers": layers})


def test_layers_are_named_or_given_with_their_knobs() -> None:
    text = '[quantize]\nmethod = "by-layer"\nlayers = ["int4", { method = "int8", center = false }]'
    recipe = parse(Recipe, {"name": "a"} | tomllib.loads(text), "a")
    assert isinstance(recipe.quantize, ByLayer)
    assert [(layer.method, layer.center) for layer in recipe.quantize.layers] == [("int4", True), ("int8", False)]
    assert str(parse(Recipe, recipe.settings(), "a")) == str(recipe)  # as the manifest holds it


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["int5"], r"quantize.layers\[0\]: no method 'int5': choose from int8, "),
        ([{"method": "int8", "group": 3}], r"quantize.layers\[0\]: unknown key 'group'"),
        (["by-layer"], r"quantize.layers\[0\]: no method 'by-layer'"),
        ("int8", "quantize.layers: expected a list"),
    ],
)
def test_mistakes_name_the_layer(layers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_layer(layers)


def test_it_is_made_for_a_number_of_layers(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match=r"quantize\.layers has 2 methods, the model 3 layers: give one each"):
        State(checkpoint.decoder, by_layer(["int8", "int4"]), LENGTH).specs()


def test_what_any_layer_needs_the_recipe_needs() -> None:
    needs = {"int8": (True, False), "float16": (False, False), "mixed": (True, True)}
    for method, (calibrated, mass) in needs.items():
        quantize = by_layer(["float16", method]).quantize
        assert (quantize.calibrated, quantize.needs_mass) == (calibrated, mass)
        assert not quantize.needs_rows
    assert by_layer(["float16", {"method": "int8", "scale": "mse"}]).quantize.needs_rows


def test_every_layer_stores_what_its_method_alone_would(checkpoint: Checkpoint) -> None:
    prompt, known = Prompt(checkpoint, "is there a circle ?", [tiny.picture(0)]), tiny.statistics(checkpoint.decoder)
    driver = Driver(checkpoint.decoder, by_layer(MIXED), LENGTH, statistics=known)
    driver.prefill([prompt])
    for layer, method in enumerate(MIXED):
        table = {"method": method} if isinstance(method, str) else method
        alone = Driver(checkpoint.decoder, tiny.recipe(quantize=table), LENGTH, statistics=known)
        alone.prefill([prompt])
        own = {name for name in driver.tensors if name.endswith(f".{layer}")}
        assert own == {name for name in alone.tensors if name.endswith(f".{layer}")}
        for name in own:  # what a layer is given may differ in its last bit, as keys of those before are centred or not
            same = torch.isclose(driver.tensors[name].float(), alone.tensors[name].float(), atol=1e-5)
            assert driver.tensors[name].dtype == alone.tensors[name].dtype
            assert same.float().mean() > 0.99
        heads = checkpoint.decoder.heads(layer)
        for name in ("key_window", "value_window"):
            torch.testing.assert_close(driver.tensors[name][:, heads], alone.tensors[name][:, heads])


def test_decode_and_compaction_read_each_store_by_its_own_method(checkpoint: Checkpoint) -> None:
    """All but lossless methods in one cache go on as the uncompressed one does, over several compactions."""
    prompt, known = Prompt(checkpoint, "is there a circle ?", [tiny.picture(0)]), tiny.statistics(checkpoint.decoder)
    roomy = {"keep": 1.5}
    layers = ["float32", {"method": "per-token", "scales": "float32", "group": 2}, "float32"]
    plain, mixed = (
        tiny.greedy(Driver(checkpoint.decoder, recipe, LENGTH, statistics=known), checkpoint, [prompt], 24, forced)[1]
        for forced in [torch.arange(7, 31)[None]]
        for recipe in (tiny.recipe(budget=roomy), by_layer(layers, budget=roomy))
    )
    assert not torch.equal(plain, mixed)
    torch.testing.assert_close(mixed, plain, atol=0.02 * float(plain.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("layers", "pairs"),
    [
        (["int8", "int4", "int4"], [None, (4, 4), (4, 4)]),
        (["k8v4", "int8", "per-token"], [None, (8, 8), (8, 8)]),
        (["int4", "float16", "kivi"], [(4, 4), None, None]),
        (["int8", "int4", "k8v4"], [(8, 8), None, None]),
        (["float16", "mixed", "float32"], [None, None, None]),
    ],
)
def test_the_pair_of_bits_that_most_layers_have_goes_by_the_operator(
    checkpoint: Checkpoint, layers: list[str], pairs: list[tuple[int, int] | None]
) -> None:
    recipe = by_layer(layers)
    assert [layer.operator_bits for layer in State(checkpoint.decoder, recipe, LENGTH).quantize] == pairs
    state, known = State(checkpoint.decoder, recipe, LENGTH), tiny.statistics(checkpoint.decoder)
    decode = Decode(state, known).eval()
    inputs = tuple(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in decode.inputs.values())
    with torch.no_grad():
        program = torch.export.export(decode, inputs, strict=False)
    nodes = [node for node in program.graph.nodes if "quant_kv_attention" in str(node.target) and node.args]
    assert [tuple(node.args[-2:]) for node in nodes] == [pair for pair in pairs if pair]


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_bytes_stay_within_the_budget_where_slots_cost_differently(checkpoint: Checkpoint, share: float) -> None:
    budget = {"kv_bytes": share, "shallow_rate": 0.0, "deep_rate": 0.5}
    window = {"window": {"least": 4, "most": 4, "dtype": "float16"}}
    allowed = share * 200 * checkpoint.decoder.fp16_token_bytes
    mixed = State(checkpoint.decoder, by_layer(["float32", "int8", "int4"], budget=budget, **window), 200)
    assert mixed.nbytes == pytest.approx(allowed, rel=0.02)
