"""Whole models with merged heads: what is measured, what runs, what is exported and built."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import runtime
from calibration import samples
from calibration.heads import head_moments
from calibration.keys import key_statistics
from calibration.observe import observe
from calibration.prepare import prepare
from engines import bundle as bundles
from engines import trt
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.graphs import Compact, Decode, Prefill, State
from export.stages.heads import HeadMoments
from export.to_onnx import WeightFile, export
from export.verify import TOLERANCE, largest_error
from tests.export import tiny
from tests.export.conftest import build
from tests.export.test_graphs import EVICTING, LENGTH, ROOMY, check_by_oracle
from tests.export.tiny import Driver, Prompt, greedy, hugging_face


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny model with four KV heads, of which some are alike.

    In layer 0 heads 1 and 3 are equal; in layer 1 head 2 is head 0 turned: keys by RoPE's own pairs, values by a
    random rotation, and the queries and outputs turned with them; layer 2 is as it comes.
    """
    model: Any = tiny.llava(kv_heads=4)
    first, second = (model.model.language_model.layers[layer].self_attn for layer in (0, 1))
    for name in ("k_proj", "v_proj"):
        rows = getattr(first, name).weight.view(4, 16, 64)
        rows[3] = rows[1]
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(8, generator=generator) * 6
    cos, sin = angle.cos().diag(), angle.sin().diag()
    turn_key = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
    turn_value = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0]
    for projection, turn in ((second.k_proj, turn_key), (second.v_proj, turn_value)):
        rows = projection.weight.view(4, 16, 64)
        rows[2] = turn @ rows[0]
    return checkpoints.load(tiny.save(tmp_path_factory.mktemp("alike") / "checkpoint", model))


@pytest.fixture(scope="module")
def moments(checkpoint: Checkpoint) -> list[HeadMoments]:
    return head_moments(checkpoint, samples.read(checkpoint.path / "samples"))


def merged(checkpoint: Checkpoint, **knobs: Any) -> Checkpoint:
    recipe = tiny.recipe(heads={"merge": True, **knobs})
    prepared = prepare(checkpoint, {"test": recipe}, samples.read(checkpoint.path / "samples"))["test"]
    return dataclasses.replace(checkpoint, decoder=prepared.decoder)


def test_moments_are_those_of_the_keys_and_values(checkpoint: Checkpoint, moments: list[HeadMoments]) -> None:
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    calls: list[None] = []
    known = samples.read(checkpoint.path / "samples")
    observe(checkpoint, known, lambda layer, *rows: seen.setdefault(layer, []).append(rows), lambda: calls.append(None))
    assert len(calls) == len(known)
    for layer, got in enumerate(moments):
        keys, values = (torch.cat(parts, dim=1).double().numpy() for parts in zip(*seen[layer], strict=True))
        cosines = np.zeros((2, 4, 4))
        for i in range(4):
            for j in range(4):
                for rows, result in ((keys, cosines[0]), (values, cosines[1])):
                    a, b = rows[i], rows[j]
                    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
                    result[i, j] = np.mean([x @ y / n for x, y, n in zip(a, b, norms, strict=True)])
        np.testing.assert_allclose(got.similarity(False).numpy(), cosines.min(axis=0), atol=1e-5)


def test_turns_bring_heads_as_close_as_any_rotation(moments: list[HeadMoments]) -> None:
    known, generator = moments[2], torch.Generator().manual_seed(0)
    key, value = known.turns(1, 3)
    for turn in (key, value):
        torch.testing.assert_close(turn @ turn.T, torch.eye(16), atol=1e-5, rtol=0)

    def cosine_key(turn: Tensor) -> float:
        """Of the turned head 1 and head 3, where `turn` is diagonal in RoPE's pairs."""
        return float((known.keys[3, 1] * torch.complex(turn.diagonal()[:8], turn.diagonal(-8))).sum().real)

    def cosine_value(turn: Tensor) -> float:
        return float((known.values[3, 1] * turn).sum())

    best = (cosine_key(key), cosine_value(value))
    assert min(best) == pytest.approx(float(known.similarity(True)[3, 1]), abs=1e-5)
    for _ in range(50):
        angle = torch.rand(8, generator=generator) * 6.3
        cos, sin = angle.cos().diag(), angle.sin().diag()
        assert cosine_key(torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])) < best[0]
        assert cosine_value(torch.linalg.qr(torch.randn(16, 16, generator=generator))[0]) < best[1]


@pytest.mark.parametrize(("align", "counts"), [(False, [3, 4, 4]), (True, [3, 3, 4])])
def test_equal_heads_merge_and_nothing_changes(checkpoint: Checkpoint, align: bool, counts: list[int]) -> None:
    fewer = merged(checkpoint, threshold=0.999, align=align)
    assert fewer.decoder.kv_heads == counts
    assert fewer.decoder.model_kv_heads == [4, 4, 4]
    prompt = Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1)])
    plain, (tokens, logits) = (
        greedy(Driver(each.decoder, tiny.recipe(budget=ROOMY), LENGTH), each, [prompt], 40)
        for each in (checkpoint, fewer)
    )
    assert tokens.tolist() == plain[0].tolist()
    torch.testing.assert_close(logits, plain[1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("tables", [{"budget": ROOMY}, EVICTING], ids=["roomy", "evicting"])
def test_layers_of_different_heads_go_through_every_graph(checkpoint: Checkpoint, tables: dict) -> None:
    fewer = merged(checkpoint, threshold=-0.02, most=3)
    assert len(set(fewer.decoder.kv_heads)) > 1
    prompt = Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)])
    driver = Driver(fewer.decoder, tiny.recipe(**tables), LENGTH)
    assert driver.state.specs()["key_window"].shape[1] == sum(fewer.decoder.kv_heads) < 12
    check_by_oracle(fewer, driver, prompt, 30)
    assert driver.compactions >= 3
    both = Driver(fewer.decoder, tiny.recipe(**tables), LENGTH, batch=2)
    prompts = [prompt, Prompt(checkpoint, "how many digits ?")]
    tokens, logits = greedy(both, fewer, prompts, 30)
    for item, single in enumerate(prompts):
        want = greedy(Driver(fewer.decoder, tiny.recipe(**tables), LENGTH), fewer, [single], 30)
        assert tokens[item].tolist() == want[0][0].tolist()
        torch.testing.assert_close(logits[item], want[1][0], atol=1e-4, rtol=0)


def test_hugging_face_runs_the_merged_decoder_to_the_same_tokens(checkpoint: Checkpoint) -> None:
    fewer = merged(checkpoint, threshold=-0.02, most=3)
    model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(checkpoint.path).eval()
    model.generation_config.eos_token_id = None
    for layer, its in enumerate(fewer.decoder.language_model.layers):  # type: ignore[arg-type]
        attention = model.model.language_model.layers[layer].self_attn
        attention.num_key_value_groups = its.self_attn.num_key_value_groups
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, getattr(its.self_attn, name))
    model.set_attn_implementation("eager")
    prompt = Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1)])
    want, logits = hugging_face(model, prompt, 40)
    tokens, got = greedy(Driver(fewer.decoder, tiny.recipe(budget=ROOMY), LENGTH), fewer, [prompt], 40)
    assert tokens[0].tolist() == want.tolist()
    torch.testing.assert_close(got[0], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tables", [{"budget": ROOMY}, EVICTING], ids=["roomy", "evicting"])
def test_the_order_of_the_query_heads_in_a_group_does_not_matter(checkpoint: Checkpoint, tables: dict) -> None:
    fewer = merged(checkpoint, threshold=-0.02, most=3)
    prompt = Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1)])
    want = greedy(Driver(fewer.decoder, tiny.recipe(**tables), LENGTH), fewer, [prompt], 30)
    generator = torch.Generator().manual_seed(0)
    again = merged(checkpoint, threshold=-0.02, most=3)
    for layer, heads in zip(again.decoder.language_model.layers, again.decoder.kv_heads, strict=True):  # type: ignore[arg-type]
        q, o = layer.self_attn.q_proj, layer.self_attn.o_proj
        rows, columns = q.weight.view(heads, -1, 16, 64), o.weight.view(64, heads, -1, 16)
        order = torch.randperm(rows.shape[1], generator=generator)
        q.weight = nn.Parameter(rows[:, order].reshape(-1, 64), requires_grad=False)
        o.weight = nn.Parameter(columns[:, :, order].reshape(64, -1), requires_grad=False)
    got = greedy(Driver(again.decoder, tiny.recipe(**tables), LENGTH), again, [prompt], 30)
    assert got[0].tolist() == want[0].tolist()
    torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=0)


def test_key_statistics_are_those_of_the_merged_heads(checkpoint: Checkpoint) -> None:
    recipe = tiny.recipe(quantize={"method": "int8"}, heads={"merge": True, "threshold": 0.999})
    known = samples.read(checkpoint.path / "samples")
    prepared = prepare(checkpoint, {"test": recipe, "off": tiny.recipe(quantize={"method": "int8"})}, known)
    statistics, plain = prepared["test"].statistics, prepared["off"].statistics
    assert statistics is not None
    assert plain is not None
    assert [len(layer.center) for layer in statistics] == [3, 4, 4]
    seen: dict[int, list[Tensor]] = {}
    observe(checkpoint, known, lambda layer, key, _: seen.setdefault(layer, []).append(key))
    rows = torch.cat(seen[0], dim=1)
    rows = torch.stack([rows[0], (rows[1] + rows[3]) / 2, rows[2]])
    center = rows.mean(dim=1)
    torch.testing.assert_close(statistics[0].center, center, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(statistics[0].absmax, (rows - center[:, None]).abs().amax(1), atol=1e-5, rtol=1e-4)
    direct = key_statistics(checkpoint, known)
    for layer, want in enumerate(direct):
        assert torch.equal(plain[layer].center, want.center)


def test_what_was_found_is_said(checkpoint: Checkpoint) -> None:
    known = samples.read(checkpoint.path / "samples")
    recipes = {
        "off": tiny.recipe(),
        "some": tiny.recipe(heads={"merge": True, "threshold": 0.99}),
        "none": tiny.recipe(heads={"merge": True, "threshold": 1.01}),
    }
    tasks: list[str] = []
    prepared = prepare(checkpoint, recipes, known, lambda what: (tasks.append(what), lambda: None)[1])  # type: ignore[func-returns-value]
    assert tasks == ["comparing KV heads"]  # once, whatever is made of it
    assert prepared["off"].decoder.language_model is checkpoint.decoder.language_model
    assert prepared["off"].note == ""
    assert prepared["some"].note == (
        "11 of 12 KV heads are left: the two most alike have a cosine of 1.00, the threshold is 0.99"
    )
    assert prepared["none"].note.startswith("no KV heads are merged: the two most alike have a cosine of 1.00")
    assert prepared["none"].decoder.language_model is checkpoint.decoder.language_model


def test_bytes_saved_by_merging_are_slots_where_bytes_are_given(checkpoint: Checkpoint) -> None:
    fewer = merged(checkpoint, threshold=-0.02, most=3)
    for share in (0.3, 0.6):
        recipe = tiny.recipe(
            budget={"kv_bytes": share},
            window={"least": 4, "most": 4, "dtype": "float16"},
            quantize={"method": "float16"},
        )
        states = [Driver(each.decoder, recipe, 128).state for each in (checkpoint, fewer)]
        for state in states:
            used = sum(spec.nbytes for spec in state.specs().values())
            assert used / (2 * 12 * 16 * 2 * 128) == pytest.approx(share, abs=0.02)
        assert sum(states[1].capacities) > sum(states[0].capacities)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["int8", "float16"])
def test_the_exported_graphs_agree_and_become_plans(checkpoint: Checkpoint, tmp_path: Path, store: str) -> None:
    settings = {"merge": True, "threshold": 0.999, "align": True}
    recipe = tiny.recipe(**EVICTING, quantize={"method": store}, heads=settings)
    known = samples.read(checkpoint.path / "samples")
    prepared = prepare(checkpoint, {"test": recipe}, known)["test"]
    assert prepared.decoder.kv_heads == [3, 3, 4]
    state = State(prepared.decoder, recipe, LENGTH)
    files: dict[str, Path] = {}
    with WeightFile(tmp_path) as weights:
        for kind in (Prefill, Decode, Compact):
            graph = kind(state, prepared.statistics).eval()
            exported = export(graph, kind.kind, weights)
            assert largest_error(graph, exported, tmp_path) < TOLERANCE
            files[kind.kind] = tmp_path / exported.file
    if importlib.util.find_spec("tensorrt_rtx"):
        (tmp_path / "plans").mkdir()
        assert len(trt.build_plans("trt-rtx", files, tmp_path / "plans", workers=1)) == len(files)


@pytest.mark.slow
def test_levels_of_one_bundle_may_differ_in_heads(checkpoint: Checkpoint, tmp_path: Path) -> None:
    tables = {"plain": "", "fewer": "[heads]\nmerge = true\nthreshold = 0.999\nalign = true\n"}
    for name, table in tables.items():
        (tmp_path / f"{name}.toml").write_text(f"{table}[window]\nleast = 8\nmost = 8\n")
    recipes = [argument for name in tables for argument in ("--recipe", tmp_path / f"{name}.toml")]
    said = build(checkpoint.path, "--out", tmp_path / "bundle", "--images", 1, *recipes)
    assert "level fewer: 10 of 12 KV heads are left" in said
    bundle = bundles.read(tmp_path / "bundle")
    assert {name: level.kv_heads for name, level in bundle.manifest.levels.items()} == {
        "plain": [4, 4, 4], "fewer": [3, 3, 4],
    }  # fmt: skip
    assert bundle.manifest.model.kv_heads == [4, 4, 4]
    answers = {
        name: runtime.open(bundle.path, level=name, threads=1).generate(
            "what color is the shape ?", images=[tiny.picture(0)], max_new_tokens=20, ignore_eos=True
        )
        for name in tables
    }
    assert answers["fewer"].tokens == answers["plain"].tokens  # the merged heads were equal
    stats = {name: answer.stats for name, answer in answers.items()}
    assert stats["fewer"].kv_bytes < stats["plain"].kv_bytes
    assert stats["fewer"].kv_bytes_uncompressed == stats["plain"].kv_bytes_uncompressed
    weights = sum(weight.nbytes for weight in checkpoint.model.parameters())
    layers: Any = checkpoint.decoder.language_model.layers
    own = sum(weight.nbytes for layer in layers[:2] for weight in layer.self_attn.parameters())
    assert (bundle.path / bundles.WEIGHTS).stat().st_size < weights + 2 * own + 200 * 4096
