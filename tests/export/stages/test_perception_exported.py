"""Every selector in the vision graph: exported, shared between levels, and answering in a built bundle."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import runtime
from engines.bundle import Adaptive
from engines.errors import UserError
from engines.gate import Fallback
from engines.ort import OrtSession
from export.checkpoint import Checkpoint
from export.graphs import Vision
from export.pipeline import Prepared, plan_levels
from export.stages.perception import Attention, Coverage, Diversity
from export.stages.perception.adaptive import coverage
from export.to_onnx import WeightFile, export
from export.verify import TOLERANCE, _largest_difference, largest_error, random_inputs
from runtime import backends
from tests.export import tiny
from tests.export.conftest import build, once

METHODS = ["diversity", "coverage", "attention", "dart", "random", "uniform"]
QUESTIONS = ["what color is the shape ?", "how many digits ?", "is there a circle ?"]


@pytest.mark.parametrize("method", METHODS)
def test_the_exported_vision_graph_passes(checkpoint: Checkpoint, tmp_path: Path, method: str) -> None:
    recipe = tiny.recipe(perception={"method": method, "keep": 0.4})
    module = Vision(checkpoint.encoder, recipe, checkpoint.layouts[0]).eval()
    with WeightFile(tmp_path) as weights:
        graph = export(module, "vision", weights)
    guided = method in ("coverage", "attention")
    assert [spec.name for spec in graph.inputs] == ["pixel_values", *(["question", "asked"] if guided else [])]
    assert largest_error(module, graph, tmp_path) < TOLERANCE
    feeds = random_inputs(module)
    if guided:
        assert feeds["question"].shape == (1, 32, checkpoint.decoder.hidden_size)
        feeds["asked"][:] = 0
    with torch.no_grad():
        want = module(*map(torch.from_numpy, feeds.values()))
    got = OrtSession(tmp_path / graph.file).run(feeds)
    np.testing.assert_array_equal(got["kept"], want[1])
    np.testing.assert_allclose(got["visual_tokens"], want[0], atol=1e-4)


@pytest.mark.parametrize(("method", "keep"), [*((method, 0.6) for method in METHODS), ("coverage", 1.0)])
def test_the_exported_adaptive_graph_passes(checkpoint: Checkpoint, tmp_path: Path, method: str, keep: float) -> None:
    recipe = tiny.recipe(perception={"method": method, "keep": keep, "buckets": [0.25]})
    module = Vision(checkpoint.encoder, recipe, checkpoint.layouts[0]).eval()
    with WeightFile(tmp_path) as weights:
        graph = export(module, "vision", weights)
    kept = round(keep * tiny.IMAGE_TOKENS)
    shapes = {spec.name: spec.shape for spec in graph.outputs}
    tokens = {"visual_tokens": [1, kept, checkpoint.decoder.hidden_size], "kept": [1, kept]}
    assert shapes == {**tokens, "order": [1, kept], "coverage": [1, kept], "entropy": [1]}
    assert ("question" in module.inputs) == (method in ("coverage", "attention"))
    assert largest_error(module, graph, tmp_path) < TOLERANCE
    feeds = random_inputs(module)
    with torch.no_grad():
        want = dict(zip(module.outputs, module(*map(torch.from_numpy, feeds.values())), strict=True))
        features = checkpoint.encoder(torch.from_numpy(feeds["pixel_values"]))
    got = OrtSession(tmp_path / graph.file).run(feeds)
    for name in ("kept", "order"):
        np.testing.assert_array_equal(got[name], want[name])
    for name in ("visual_tokens", "coverage", "entropy"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-4)
    assert sorted(got["order"][0].tolist()) == list(range(kept))
    np.testing.assert_array_equal(got["kept"], np.sort(got["kept"]))
    np.testing.assert_allclose(got["visual_tokens"], features[:, got["kept"][0]], atol=1e-4)


LAYERS: dict[str, Any] = {"method": "attention", "keep": 0.4, "layers": [0, 1], "centre": 0.0, "detail": 0.0}


def looking(checkpoint: Checkpoint, **knobs: Any) -> Vision:
    recipe = tiny.recipe(perception={**LAYERS, **knobs})
    return Vision(checkpoint.encoder, recipe, checkpoint.layouts[0], checkpoint.decoder).eval()


@pytest.mark.parametrize("words", [1, 5, 32])
@pytest.mark.parametrize("layers", [[0], [1, 2], [2]])
def test_the_decoders_attention_is_that_of_hugging_face(checkpoint: Checkpoint, layers: list[int], words: int) -> None:
    """From the last of the question's tokens to the visual ones; padding, and what stands in it, changes nothing."""
    language_model = tiny.llava().model.language_model
    language_model.config._attn_implementation = "eager"
    vision = looking(checkpoint, layers=layers)
    rng = torch.Generator().manual_seed(words)
    features = torch.randn(1, tiny.IMAGE_TOKENS, 64, generator=rng)
    question = torch.randn(1, 32, 64, generator=rng)
    asked = (torch.arange(32) >= 32 - words).float()[None]
    with torch.no_grad():
        got = vision.attention(features, question, asked)
        rows = torch.cat([features, question[:, 32 - words :]], dim=1)
        heads = language_model(inputs_embeds=rows, output_attentions=True).attentions
    want = torch.stack([heads[layer][0, :, -1, : tiny.IMAGE_TOKENS] for layer in layers]).mean(dim=(0, 1))
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)
    kept = vision.perception(features, question, asked, got)[0].tolist()
    assert kept == sorted(np.argsort(-want.numpy(), kind="stable")[: len(kept)].tolist())


def test_a_lower_temperature_leaves_less_to_saliency(checkpoint: Checkpoint) -> None:
    features, question, asked = torch.randn(1, 25, 8), torch.randn(1, 3, 8), torch.ones(1, 3)
    attention = torch.linspace(1.0, 1.2, 25)[None]

    def kept(temperature: float) -> list[int]:
        return Attention(0.2, temperature=temperature, centre=2.0)(features, question, asked, attention)[0].tolist()

    assert kept(0.001) == [20, 21, 22, 23, 24]
    assert 12 in kept(1.0)  # the centre
    nothing = Attention(0.2, centre=2.0, detail=0.0)(features, question, 0 * asked, attention)
    assert nothing.tolist() == [[7, 11, 12, 13, 17]]  # a cross in the middle


def test_the_exported_graph_reads_the_decoders_first_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sizes = {}
    for layers in ([0], [0, 1], [2]):
        module, name = looking(checkpoint, layers=layers), f"vision_{layers[-1]}"
        with WeightFile(tmp_path) as weights:
            graph = export(module, name, weights)
        assert largest_error(module, graph, tmp_path) < TOLERANCE
        feeds = random_inputs(module)
        for asked in (feeds["asked"], 0 * feeds["asked"]):
            with torch.no_grad():
                want = module(*map(torch.from_numpy, (feeds | {"asked": asked}).values()))
            got = OrtSession(tmp_path / graph.file).run(feeds | {"asked": asked})
            np.testing.assert_array_equal(got["kept"], want[1])
        model = onnx.load(tmp_path / graph.file, load_external_data=False)
        sizes[layers[-1]] = sum(node.op_type == "MatMul" for node in model.graph.node)
    assert sizes[0] < sizes[1] < sizes[2]  # the layers behind the last one that is read are no part of the graph


@pytest.mark.parametrize(("other", "message"), [(1, ""), (3, "kept agrees with PyTorch in 98.5%")])
def test_a_near_tie_is_no_error_of_the_export(other: int, message: str) -> None:
    """Of 200 tokens a few differ: all behind them are shifted by as many places."""
    rows = np.random.default_rng(0).standard_normal((1, 300, 4)).astype(np.float32)

    def outputs(start: int) -> dict[str, np.ndarray]:
        return {
            "visual_tokens": rows[:, start : start + 200],
            "kept": np.arange(start, start + 200, dtype=np.int32)[None],
        }

    expected = {name: torch.from_numpy(array) for name, array in outputs(0).items()}
    with pytest.raises(UserError, match=message) if message else nullcontext():
        assert _largest_difference(expected, outputs(other), "vision.onnx") == 0
    wrong = {**outputs(other), "visual_tokens": outputs(0)["visual_tokens"]}
    with pytest.raises(UserError):
        _largest_difference(expected, wrong, "vision.onnx")


def test_a_guided_level_that_keeps_everything_takes_no_question(checkpoint: Checkpoint) -> None:
    vision = Vision(checkpoint.encoder, tiny.recipe(perception={"method": "coverage"}), checkpoint.layouts[0])
    assert list(vision.inputs) == ["pixel_values"]


def test_levels_share_graphs_where_they_choose_or_compress_alike(
    checkpoint: Checkpoint,
) -> None:
    half: dict[str, Any] = {"keep": 0.5}
    tables = {
        "off": {},
        "also_off": {"method": "coverage"},
        "half": half,
        "half_too": {"method": "diversity", "keep": 0.501},
        "same": half,
        "cover": {**half, "method": "coverage"},
        "cover_more": {**half, "method": "coverage", "alpha": 1.0},
        "shared": {"quota": 0.5},
    }
    recipes = {name: tiny.recipe(name=name, perception=table) for name, table in tables.items()}
    levels, makers = plan_levels(
        checkpoint, recipes, {name: [64] for name in recipes}, {name: Prepared(checkpoint.decoder) for name in recipes}
    )
    size = checkpoint.layouts[0].name
    views = {name: level.views[size] for name, level in levels.items()}
    assert [view.vision.removesuffix(size) for view in views.values()] == [
        "vision_", "vision_", "half.vision_", "half_too.vision_", "half.vision_", "cover.vision_",
        "cover_more.vision_", "shared.vision_",
    ]  # fmt: skip
    assert [view.tokens for view in views.values()] == [16, 16, 8, 8, 8, 8, 8, 16]
    assert views["shared"].adaptive == Adaptive([16], 0.9, 1, 0.5)
    assert views["half"].adaptive is None
    assert {bucket.prefill for level in levels.values() for bucket in level.buckets} == {"off.prefill_64"}
    for name, view in views.items():
        vision = makers[view.vision]()
        assert isinstance(vision, Vision)
        assert (vision.perception.keep, vision.perception.method) == (
            recipes[name].perception.keep,
            recipes[name].perception.method if name != "also_off" else "diversity",
        )


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Path:
    def make(out: Path) -> None:
        recipe = out.with_name("coverage.toml")
        recipe.write_text(
            '[quantize]\nmethod = "float32"\n[perception]\nmethod = "coverage"\nkeep = 0.4\nquestion_tokens = 8\n'
            "[window]\nleast = 8\nmost = 8\n"
        )
        build(tiny_path, "--out", out, "--recipe", recipe, "--images", 2, "--jobs", 1)

    return once(tmp_path_factory, "coverage-bundle", make)


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_a_built_bundle_answers_and_the_question_chooses(
    bundle_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    seen: list[np.ndarray] = []
    load = backends.load

    def recording(*arguments: Any) -> Any:
        session: Any = load(*arguments)
        run = session.run

        def recorded(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            outputs = run(feeds)
            seen.extend([outputs["kept"][0]] if "kept" in outputs else [])
            return outputs

        session.run = recorded
        return session

    monkeypatch.setattr(backends, "load", recording)
    vlm = runtime.open(bundle_path, threads=1)
    pictures = [tiny.picture(0), tiny.picture(1)]
    kept: list[list[list[int]]] = []
    for question in QUESTIONS:
        seen.clear()
        result = vlm.generate(question, pictures, 6, ignore_eos=True, question_later=later)
        assert len(result.tokens) == 6
        prompt = tiny.Prompt(checkpoint, question, pictures)
        after = prompt.ids[int((prompt.ids == checkpoint.image_token_id).nonzero()[-1]) + 1 :][-8:]
        words, asked = torch.zeros(1, 8, prompt.embeddings.shape[1]), torch.zeros(1, 8)
        if not later:
            words[0, : len(after)], asked[0, : len(after)] = checkpoint.embedding[after], 1
        with torch.no_grad():
            features = [checkpoint.encoder(pixels[None]) for pixels in prompt.inputs["pixel_values"]]
        stage = Coverage(0.4)
        kept.append([stage(each, words, asked)[0].tolist() for each in features])
        assert [each.tolist() for each in seen] == kept[-1]
    assert kept[0] == kept[1] == kept[2] if later else all(kept[i] != kept[i - 1] for i in range(3))
    assert len(vlm.generate(QUESTIONS[0], max_new_tokens=3, ignore_eos=True).tokens) == 3  # and without an image


@pytest.mark.slow
def test_a_built_adaptive_bundle_shares_its_tokens_out(
    tmp_path_factory: pytest.TempPathFactory, tiny_path: Path, checkpoint: Checkpoint
) -> None:
    text = "buckets = [0.25, 0.5]\ncoverage = 0.7\nquota = 0.5\nfloor = 2\n"

    def make(out: Path) -> None:
        recipe = out.with_name("adaptive.toml")
        recipe.write_text(f"[perception]\n{text}[fallback]\nsimple = 1.0\ncomplex = 2.0\n")
        build(tiny_path, "--out", out, "--recipe", recipe, "--images", 2, "--text-tokens", 8, "--jobs", 1)

    vlm = runtime.open(once(tmp_path_factory, "adaptive-bundle", make), threads=1)
    level = vlm.bundle.manifest.levels["adaptive"]
    (view,) = level.views.values()
    assert view.adaptive == Adaptive([4, 8, 16], 0.7, 2, 0.5, None, Fallback(simple=1.0, complex=2.0))
    assert level.buckets[-1].length == 48  # two images of 8 tokens each and the words
    stage = Diversity(buckets=(0.25, 0.5))
    pictures = [tiny.picture(0), np.full_like(tiny.picture(0), 90), tiny.picture(1) // 8, tiny.picture(2)]
    for number in (1, 2, 4):
        prompt = tiny.Prompt(checkpoint, QUESTIONS[0], pictures[:number])
        with torch.no_grad():
            features = [checkpoint.encoder(pixels[None]) for pixels in prompt.inputs["pixel_values"]]
        curves = [coverage(each, stage.order(each))[0].numpy() for each in features]
        most = [16] * number  # the prompt is complex: 40 % go at most, and of 4, 8 and 16 only 16 leaves 60 %
        result = vlm.generate(QUESTIONS[0], pictures[:number], 3, ignore_eos=True)
        room = level.buckets[-1].length - int((prompt.ids != checkpoint.image_token_id).sum())
        want = [2] * number
        while sum(want) < min(8 * number, room) and want != most:
            poorest = min((i for i in range(number) if want[i] < most[i]), key=lambda i: (curves[i][want[i] - 1], i))
            want[poorest] += 1
        assert result.stats.visual_tokens_by_image == want
        assert len(result.tokens) == 3
    assert 2 * 4 < room < 8 * 4  # four images were shrunk to it
