"""Settings from image processors as checkpoints in the field have them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

from engines.preprocessor import AnyRes, Grid, Kind, LongestEdge, Patches, Plain, Split
from export.layouts import layout
from export.preprocessors import load_processor, settings
from runtime.preprocess import preprocess
from tests.export import processors
from tests.export.zoo import IMAGE

COMMON = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
PINPOINTS = [[336, 672], [672, 336]]
# A family, what preprocessor_config.json of published checkpoints of it says, and the kind.
PUBLISHED: dict[str, tuple[str, dict[str, Any], Kind]] = {
    "CLIPImageProcessor": (
        "llava",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "do_center_crop": True},
        Plain({"shortest_edge": 336}, {"height": 336, "width": 336}),
    ),
    "SiglipImageProcessor": (
        "paligemma",
        {"size": {"height": 224, "width": 224}, "image_seq_length": 256, "processor_class": "PaliGemmaProcessor"},
        Plain({"height": 224, "width": 224}, None),
    ),
    "Gemma3ImageProcessor": (
        "gemma3",
        {"size": {"height": 896, "width": 896}, "do_pan_and_scan": None, "resample": 2},
        Plain({"height": 896, "width": 896}, None),
    ),
    "Qwen2VLImageProcessor": (
        "qwen2_vl",
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        Patches(14, 2, 2, 3136, 12845056),
    ),
    "Qwen2VLImageProcessorFast": (
        "qwen3_vl",
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2},
        Patches(16, 2, 2, 65536, 16777216),
    ),
    "Glm4vImageProcessor": (
        "glm4v",
        {"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14, "merge_size": 2},
        Patches(14, 2, 2, 12544, 9633792, clip=True),
    ),
    "GotOcr2ImageProcessorFast": (
        "internvl",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12},
        Grid(448, 448, 1, 12),
    ),
    "GotOcr2ImageProcessor": (
        "got_ocr2",
        {"size": {"height": 1024, "width": 1024}},
        Plain({"height": 1024, "width": 1024}, None),
    ),
    "Idefics3ImageProcessor": (
        "smolvlm",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": True},
        Split(2048, 512),
    ),
    "SmolVLMImageProcessor": (
        "smolvlm",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": False},
        Split(2048, 512, split=False),
    ),
    "LlavaNextImageProcessor": (
        "llava_next",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": PINPOINTS},
        AnyRes(336, PINPOINTS),
    ),
    "LlavaOnevisionImageProcessor": (
        "llava_onevision",
        {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": [[384, 384], [384, 768]]},
        AnyRes(384, [[384, 384], [384, 768]]),
    ),
    "PixtralImageProcessor": (
        "mistral3",
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        LongestEdge(1540, 1540, 28),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_checkpoints(name: str, tmp_path: Path) -> None:
    """Files of their own for the image processor, named as they are, also after what needs torchvision."""
    family, config, kind = PUBLISHED[name]
    processors.save(family, tmp_path)
    file = tmp_path / "processor_config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in own.items() if key != "image_processor"}))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(COMMON | HALF | config | {"image_processor_type": name})
    )
    found = settings(load_processor(tmp_path))
    assert found.kind == kind
    assert (found.resample, found.rescale) == (config.get("resample", 3), 1 / 255)
    assert (found.mean, found.std) == (HALF["image_mean"], HALF["image_std"])


@pytest.mark.parametrize("name", ["qwen2_vl", "mistral3", "llava"])
def test_class_is_found_where_only_the_model_names_it(name: str, tmp_path: Path) -> None:
    processors.save(name, tmp_path)
    own = json.loads((tmp_path / "processor_config.json").read_text())
    for file in tmp_path.glob("*.json"):
        data = json.loads(file.read_text())
        if isinstance(data, dict) and data.pop("processor_class", None):
            file.write_text(json.dumps(data))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    assert type(load_processor(tmp_path)).__name__ == own["processor_class"]


def test_off_is_nothing() -> None:
    processor = processors.make("gemma3")
    processor.image_processor.do_rescale = processor.image_processor.do_normalize = False
    found = settings(processor)
    assert (found.rescale, found.mean, found.std) == (1.0, [0.0] * 3, [1.0] * 3)
    processor.image_processor.do_resize = False
    assert settings(processor).kind == Plain(None, None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"do_pan_and_scan": True}, "pan and scan"),
        ("smolvlm", {"do_resize": False}, "SmolVLMImageProcessorPil with do_resize off"),
        ("llava_next", {"crop_size": {"height": 28, "width": 28}}, r"squares of one size, got \[28, 56\]"),
        ("llava_onevision", {"size": {"height": 28, "width": 56}}, r"squares of one size, got \[28, 56\]"),
        ("llava_onevision", {"image_grid_pinpoints": [[56, 57]]}, "in tiles of 56"),
    ],
)
def test_what_the_runtime_does_not_do_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    processor = processors.make(name)
    for key, value in changes.items():
        setattr(processor.image_processor, key, value)
    with pytest.raises(ValueError, match=message):
        settings(processor)


def test_unknown_image_processor_is_refused_by_name() -> None:
    processor = processors.make("llava")
    processor.image_processor = hf.BlipImageProcessorPil()
    with pytest.raises(ValueError, match="BlipImageProcessorPil is none of CLIPImageProcessor, SiglipImageProcessor"):
        settings(processor)


@pytest.mark.parametrize("name", [name for name in processors.TINY if not name.startswith("paligemma")])
def test_pictures_are_what_the_layout_says(name: str) -> None:
    """A layout is what the processor makes of a blank picture; the runtime makes the same of one that comes to it."""
    processor = processors.make(name)
    own = settings(processor)
    size = own.kind.target(84, 112)
    assert own.kind.target(*size) == size  # a picture of a layout's size stays as it is
    made = layout(Path(name), processor, IMAGE, *size)
    picture = np.random.default_rng(0).integers(0, 256, (84, 112, 3), np.uint8)
    assert [*preprocess(picture, own, made).shape] == made.pixel_values
