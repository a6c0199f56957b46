"""Every family's vision encoder, at sizes of many kinds, against the model's own `get_image_features`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from calibration.evaluate import Eager, Prompt
from engines import trt
from engines.bundle import TensorSpec
from engines.errors import UserError
from engines.layout import Layout
from engines.ort import OrtSession
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.attention import use_hook
from export.families import FAMILIES, MISSING
from export.families.parts import _attention
from export.graphs import Graph
from export.stages.tokens import TEXT, VISUAL
from export.to_onnx import WeightFile, export
from tests.export import zoo
from tests.export.zoo import ZOO, Picture, picture

made = cache(zoo.model)

TILES = ("aya_vision", "idefics3", "internvl", "smolvlm")
FIXED = ("llava", "got_ocr2", "paligemma", "paligemma2", "gemma3", *TILES)
PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
ANY_SIZE = [name for name in ZOO if name not in FIXED]


def encoder(model: Any, picture: Picture, height: int, width: int) -> nn.Module:
    """As a checkpoint's layout of that size makes it."""
    shape = list(pixels_of(picture).shape)
    layout = Layout(f"{height}x{width}", height, width, shape, "<image>", 1, picture.grid)
    made = FAMILIES[model.config.model_type].encoder
    assert made
    return made(model, layout).eval()


def pixels_of(picture: Picture) -> Tensor:
    """As a vision graph takes them: without what the processor puts around a prompt's pictures."""
    return picture.pixel_values.reshape(picture.pixel_values.shape[-4:])


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def check(name: str, height: int, width: int, **more: int) -> None:
    model = made(name)
    taken = picture(model, height, width, **more)
    tokens, taps = zoo.features(model, taken)
    with torch.no_grad():
        got = encoder(model, taken, height, width)(pixels_of(taken))
    assert model.config.vision_config._attn_implementation == "eager"  # the model is left as it was
    close(got if taps is None else got[0], tokens[None])
    if taps is not None:
        close(got[1], taps)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_picture_of_the_towers_size(name: str, tiles: int) -> None:
    side = 128 if name == "got_ocr2" else 56
    check(name, side, side, tiles=tiles if name in TILES else 1)


@pytest.mark.parametrize("name", ANY_SIZE)
@settings(max_examples=25)
@given(st.data())
def test_a_picture_of_any_size(name: str, data: st.DataObject) -> None:
    """Tall, wide and small ones: odd grids, windows that are not full, tiles that are mostly padding; also videos."""
    vision = made(name).config.vision_config
    merge = 2 if name in ("mistral3", *PATCHES) else 1
    step = 1 if "image_grid_pinpoints" in made(name).config.to_dict() else vision.patch_size * merge
    least = 2 if name == "mistral3" else 1  # Hugging Face fails where its picture becomes one token
    sides = st.integers(least, 12) if step > 1 else st.integers(20, 250)
    height, width = (step * data.draw(sides) for _ in range(2))
    check(name, height, width, frames=data.draw(st.integers(1, 3)) if name in PATCHES else 1)


class Encoder(Graph):
    """A vision encoder as a graph of its own."""

    kind = "vision"

    def __init__(self, module: nn.Module, picture: Picture, taps: bool):
        super().__init__()
        self.module = module
        self._takes(TensorSpec("pixel_values", "float32", list(pixels_of(picture).shape)))
        self.outputs = ["visual_tokens", *(["taps"] if taps else [])]

    def compute(self, pixel_values: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        found = self.module(pixel_values)
        return dict(zip(self.outputs, found if len(self.outputs) > 1 else [found], strict=True))


# Of every encoder module one, at a size that takes most ways through it; LLaVA with CLIP is exported by many tests.
EXPORTED: dict[str, dict[str, int]] = {
    "got_ocr2": {"height": 128, "width": 128},
    "idefics3": {"height": 56, "width": 56, "tiles": 3},
    "internvl": {"height": 56, "width": 56, "tiles": 2},
    "llava_onevision": {"height": 150, "width": 100},
    "llava_pixtral": {"height": 70, "width": 42},
    "mistral3": {"height": 84, "width": 56},
    "qwen2_5_vl": {"height": 140, "width": 84, "frames": 2},
    "qwen3_vl": {"height": 128, "width": 96},
    "glm4v": {"height": 112, "width": 84, "frames": 2},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """A family's name -> its encoder's graph."""
    with WeightFile(tmp_path_factory.mktemp("encoders")) as weights:

        @cache
        def file(name: str) -> Path:
            size = EXPORTED[name]
            taken = picture(made(name), **size)
            module = encoder(made(name), taken, size["height"], size["width"])
            return weights.folder / export(Encoder(module, taken, name == "qwen3_vl"), name, weights).file

        yield file


@pytest.mark.parametrize(
    "name",
    [name if name in ("idefics3", "qwen3_vl") else pytest.param(name, marks=pytest.mark.slow) for name in EXPORTED],
)
def test_exported_encoders_run_in_onnx_runtime(name: str, exported: Callable[[str], Path]) -> None:
    taken = picture(made(name), **EXPORTED[name])
    got = OrtSession(exported(name)).run({"pixel_values": pixels_of(taken).numpy()})
    tokens, taps = zoo.features(made(name), taken)
    close(torch.from_numpy(got["visual_tokens"]), tokens[None])
    if taps is not None:
        close(torch.from_numpy(got["taps"]), taps)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13",
)
def test_tensorrt_builds_plans_of_encoders(exported: Callable[[str], Path], tmp_path: Path) -> None:
    names = ["idefics3", "llava_onevision", "mistral3", "qwen2_5_vl"]
    plans = trt.build_plans("trt-rtx", {name: exported(name) for name in names}, tmp_path)
    assert [plan.graph for plan in plans] == names


@given(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 9))
def test_segments_attend_to_themselves(lengths: list[int], frames: int, seed: int) -> None:
    frame = sum(lengths)
    query, key, value = np.random.default_rng(seed).standard_normal((3, 2, frames * frame, 4)).astype(np.float32)
    want = np.zeros((frames * frame, 2, 4))
    for start, end in pairwise(np.cumsum([0, *lengths * frames])):
        for head in range(2):
            for row in range(start, end):
                weights = np.exp(0.7 * key[head, start:end] @ query[head, row])
                want[row, head] = weights @ value[head, start:end] / weights.sum()
    ends: dict[str, Any] = {"cu_seq_lens_q": np.cumsum([0, *lengths]), "max_length_q": max(lengths)}
    q, k, v = (torch.from_numpy(each[None]) for each in (query, key, value))
    got, _ = _attention(nn.Identity(), q, k, v, scaling=0.7, **ends)
    np.testing.assert_allclose(got[0], want, atol=1e-5)


@pytest.mark.parametrize("name", ["llava_pixtral", "mistral3", "llava_onevision", "idefics3", *PATCHES])
def test_encoders_know_their_tokens_without_weights(name: str) -> None:
    model = made(name)
    taken = picture(model, 224, 224)
    with torch.device("meta"):
        bare = hf.AutoModelForImageTextToText.from_config(model.config)
    module = encoder(bare, taken, 224, 224)
    with torch.device("meta"):
        got = module(torch.zeros(pixels_of(taken).shape))
    tokens, taps = zoo.features(model, taken)
    assert (got if taps is None else got[0]).shape == tokens[None].shape


@pytest.mark.parametrize("name", ["llava_pixtral", "mistral3"])
def test_two_layouts_of_a_model_that_has_not_run_yet(name: str) -> None:
    model = zoo.model(name)
    for height, width in ((56, 84), (84, 56)):
        taken = picture(model, height, width)
        with torch.no_grad():
            got = encoder(model, taken, height, width)(pixels_of(taken))
        close(got, zoo.features(made(name), taken)[0][None])
    close(got, zoo.features(model, taken)[0][None])


# The decoders of the others: test_decoders.py, test_mrope_graphs.py.
PLAIN = (
    "llava",
    "llava_pixtral",
    "mistral3",
    "llava_next",
    "llava_onevision",
    "idefics3",
    "smolvlm",
    "internvl",
    "got_ocr2",
)


@pytest.mark.parametrize("name", PLAIN)
def test_decoders_go_on_as_hugging_face_does(name: str) -> None:
    model, ours, steps = made(name), zoo.model(name), 16
    size = EXPORTED.get(name, {"height": 56, "width": 56})
    taken = picture(model, **size)
    tokens, _ = zoo.features(model, taken)
    generator = torch.Generator().manual_seed(0)
    before, after, said = (torch.randint(5, 290, (count,), generator=generator) for count in (3, 6, steps))
    prompt = torch.cat([before, torch.full([len(tokens)], zoo.IMAGE), after])
    ids = torch.cat([prompt, said])[None]
    with torch.no_grad():
        want = model(input_ids=ids, pixel_values=taken.pixel_values, **taken.more).logits[0, len(prompt) - 1 : -1]
    decoder = FAMILIES[model.config.model_type].decoder(ours)
    use_hook(decoder.language_model)
    embedding, visual = ours.get_input_embeddings().weight, prompt == zoo.IMAGE
    embeddings = embedding[prompt].clone()
    embeddings[visual] = encoder(ours, taken, size["height"], size["width"])(pixels_of(taken))[0]
    kinds, order = torch.where(visual, VISUAL, TEXT), torch.arange(len(prompt))
    eager = Eager(decoder, recipes.load("off"), 256)
    got = [eager.prefill([Prompt(embeddings, kinds, order, visual.int())])]
    for step, token in enumerate(said[:-1]):
        got.append(eager.decode(embedding[token][None], [len(prompt) + step]))
    assert (torch.cat(got) - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("model_type", MISSING)
def test_what_is_missing_is_told(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UserError, match=f"{model_type}.*not supported") as raised:
        checkpoints.load(tmp_path)
    assert MISSING[model_type] in str(raised.value)
