"""Pictures of every kind of preprocessing, bit for bit as the families' own image processors make them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engines.layout import Layout
from engines.preprocessor import ImagePreprocessor, Patches, Size
from export.preprocessors import settings as settings_of
from runtime.pictures import Pictures
from runtime.preprocess import preprocess
from tests.export import processors
from tests.layouts import plain
from tests.runtime.test_preprocess import pixels

# One family of each kind; the rules with other settings: tests/engines/test_preprocessor.py.
FAMILIES = ["llava", "mistral3", "llava_next", "llava_onevision", "smolvlm", "qwen2_vl", "glm4v", "internvl", "gemma3"]
EDGES = st.integers(2, 150)  # of 1 x 150 pixels Pixtral's makes nothing


@cache
def family(name: str) -> tuple[Any, ImagePreprocessor]:
    processor = processors.make(name)
    return processor, settings_of(processor)


def theirs(name: str, picture: Image.Image) -> np.ndarray:
    processor, _ = family(name)
    more = {"patch_size": processor.patch_size * processor.spatial_merge_size} if name == "mistral3" else {}
    return np.asarray(processor.image_processor(images=[picture], return_tensors="np", **more)["pixel_values"])


def layout(size: Size, expected: np.ndarray) -> Layout:
    """Of one prompt with one picture: tiles without the axis of prompts."""
    return Layout(f"{size[0]}x{size[1]}", *size, [*expected.shape[-4:]], "<image>", 1)


def assert_same(name: str, source: Any, picture: Image.Image) -> None:
    expected, own = theirs(name, picture), family(name)[1]
    size = own.kind.target(picture.height, picture.width)
    made = preprocess(source, own, layout(size, expected))
    assert made.dtype == np.float32
    assert [*made.shape] == layout(size, expected).pixel_values
    np.testing.assert_array_equal(made, expected.reshape(made.shape))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(height=EDGES, width=EDGES, seed=st.integers(0, 2**31))
def test_equals_the_familys_own(name: str, height: int, width: int, seed: int) -> None:
    array = pixels(height, width, seed=seed)
    assert_same(name, array, Image.fromarray(array))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [(1, 1), (1, 100), (100, 1), (700, 90), (90, 700), (56, 56), (57, 56), (224, 224)])
def test_extremes_equal_the_familys_own(name: str, size: Size) -> None:
    array = pixels(*size)
    assert_same(name, array, Image.fromarray(array))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 2), ("RGBA", 4), ("CMYK", 4)])
def test_grey_and_transparent_pictures_equal_the_familys_own(name: str, mode: str, channels: int) -> None:
    picture = Image.fromarray(pixels(61, 83, channels).squeeze(), mode)
    assert_same(name, picture, picture)


# Pictures that fit no layout: of 84 x 112, which nobody asked for, one of 30 x 150 must be made.
@pytest.mark.parametrize("name", ["mistral3", "smolvlm", "qwen2_vl", "internvl", "gemma3"])
def test_what_fits_no_layout_is_resized_to_it(name: str) -> None:
    own = family(name)[1]
    array, size = pixels(30, 150), own.kind.target(84, 112)
    stretched = Image.fromarray(array).resize(size[::-1], Image.Resampling(own.resample))
    expected = theirs(name, stretched)
    made = preprocess(array, own, layout(size, expected))
    whole = name in ("smolvlm", "internvl")  # whose last tile is the whole, of the picture itself where it can be
    expected = expected.reshape(made.shape)
    np.testing.assert_array_equal(made[:-1] if whole else made, expected[:-1] if whole else expected)


def test_what_fits_no_layout_is_padded_where_the_family_pads() -> None:
    own = family("llava_next")[1]
    array, size = pixels(30, 150), (84, 112)
    black = np.zeros((*size, 3), np.uint8)
    inside = np.array(Image.fromarray(array).resize((112, 23), Image.Resampling(own.resample)))  # 112 / 150 * 30 = 22.4
    black[(84 - 23) // 2 : (84 - 23) // 2 + 23] = inside
    expected = theirs("llava_next", Image.fromarray(black))
    made = preprocess(array, own, layout(size, expected))
    np.testing.assert_array_equal(made[1:], expected.reshape(made.shape)[1:])  # but the first, which is the whole
    np.testing.assert_array_equal(made[0], theirs("llava_next", Image.fromarray(array))[0, 0])


@pytest.mark.parametrize("frames", [2, 3, 6])
def test_frames_of_a_video_are_cut_together(frames: int) -> None:
    """Pairs of frames, an odd one doubled: every value of every patch is where the formula says."""
    own = family("qwen2_vl")[1]
    kind = own.kind
    assert isinstance(kind, Patches)
    pictures = [pixels(84, 56, seed=k) for k in range(frames)]
    times, rows, columns, p, m = (frames + 1) // 2, 6, 4, kind.patch, kind.merge
    shape, name = [times * rows * columns, 3 * 2 * p * p], "84x56"
    made = preprocess(pictures, own, Layout(name, 84, 56, shape, "<video>", 1, [times, rows, columns]))
    number = 0
    for time in range(times):
        for row, column in ((r, c) for r in range(0, rows, m) for c in range(0, columns, m)):
            for y, x in ((row + a, column + b) for a in range(m) for b in range(m)):
                for channel in range(3):
                    for step in range(2):
                        frame = pictures[min(2 * time + step, frames - 1)]
                        cut = frame[y * p : y * p + p, x * p : x * p + p, channel] / 255
                        place = (channel * 2 + step) * p * p
                        found = made[number, place : place + p * p].reshape(p, p)
                        assert found == pytest.approx((cut - own.mean[channel]) / own.std[channel], abs=1e-6)
                number += 1
    assert number == len(made) == shape[0]


def test_the_models_own_rule_chooses_the_layout() -> None:
    """SmolVLM enlarges a small picture to its longest edge, and does not look for a small layout."""
    pictures = object.__new__(Pictures)
    pictures._settings, pictures._known = family("smolvlm")[1], [plain(56, 56), plain(112, 112), plain(56, 112)]
    sizes = [(30, 40), (40, 30), (10, 90), (500, 500)]
    chosen = [each.name for each in pictures.shown([pixels(*size) for size in sizes])]
    assert chosen == ["112x112", "112x112", "56x112", "112x112"]
