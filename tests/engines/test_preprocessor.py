"""Settings in a bundle, and the size that each kind brings pictures to: as Hugging Face's own helpers say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size as idefics3_size
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from engines.errors import UserError
from engines.preprocessor import FILE, AnyRes, Grid, ImagePreprocessor, Kind, LongestEdge, Patches, Plain, Split

KINDS: dict[str, Kind] = {
    "plain": Plain({"height": 64, "width": 60}, {"height": 8, "width": 9}),
    "shortest edge": Plain({"shortest_edge": 32}, None),
    "nothing": Plain(None, None),
    "longest_edge": LongestEdge(1024, 1024, 28),
    "patches": Patches(14, 2, 2, 3136, 1003520),
    "clip": Patches(14, 2, 2, 12544, 9633792, clip=True),
    "grid": Grid(448, 448, 1, 12),
    "split": Split(2048, 512),
    "whole": Split(2048, 512, split=False),
    "anyres": AnyRes(336, [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]),
}
EDGES, POSITIVE = st.integers(1, 5000), st.integers(1, 60)


def of(kind: Kind) -> ImagePreprocessor:
    return ImagePreprocessor(kind, 3, 1 / 255, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4])


@pytest.mark.parametrize("name", KINDS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    of(KINDS[name]).write(tmp_path)
    assert ImagePreprocessor.read(tmp_path) == of(KINDS[name])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("plain", {"resize": {"longest_edge": 3}}, "resize must have height and width, or shortest_edge"),
        ("plain", {"resize": {"height": 3}}, "resize must have"),
        ("plain", {"resize": {"height": 0, "width": 3}}, "resize must be positive"),
        ("plain", {"resize": {"height": 2.5, "width": 3}}, "resize.height: expected int"),
        ("plain", {"crop": {"shortest_edge": 3}}, "crop must have height and width"),
        ("plain", {"crop": {"height": -1, "width": 3}}, "crop must be positive"),
        ("plain", {"do_flip": True}, "unknown key 'do_flip'"),
        ("plain", {"method": "panorama"}, "no method 'panorama': choose from plain, longest_edge, patches, grid"),
        ("plain", {"method": "grid"}, "unknown key 'crop'"),
        ("longest_edge", {"multiple": 0}, "multiple must be positive, got 0"),
        ("longest_edge", {"height": "high"}, "height: expected int"),
        ("patches", {"patch": 0}, "patch must be positive"),
        ("patches", {"merge": -2}, "merge must be positive"),
        ("patches", {"temporal": 0}, "temporal must be positive"),
        ("patches", {"least": 0}, "least must be positive"),
        ("patches", {"most": 100}, "most must be at least 3136 pixels, got 100"),
        ("patches", {"clip": 1}, "clip: expected bool"),
        ("grid", {"width": 0}, "width must be positive"),
        ("grid", {"least": 0}, "least must be positive"),
        ("grid", {"least": 13}, "most must be at least 13 tiles, got 12"),
        ("split", {"longest": 0}, "longest must be positive"),
        ("split", {"edge": -1}, "edge must be positive"),
        ("anyres", {"edge": 0}, "edge must be positive"),
        ("anyres", {"resolutions": []}, "resolutions must hold at least one"),
        ("anyres", {"resolutions": [[336]]}, "resolutions must be heights and widths in tiles of 336"),
        ("anyres", {"resolutions": [[336, 400]]}, "in tiles of 336, got"),
        ("anyres", {"resolutions": [[0, 336]]}, "in tiles of 336, got"),
    ],
)
def test_mistake_in_a_kind_names_the_file(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = dataclasses.asdict(of(KINDS[name]))
    (tmp_path / FILE).write_text(json.dumps(data | {"kind": data["kind"] | changes}))
    with pytest.raises(UserError, match=FILE.replace(".", r"\.") + ".*" + message):
        ImagePreprocessor.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resample": 6}, "resample must be one of"),
        ({"resample": "bicubic"}, "resample: expected int"),
        ({"rescale": None}, "rescale: expected float"),
        ({"mean": [0.5]}, "mean and std must have 3 numbers"),
        ({"std": [0.5, 0.5, 0.0]}, "std must be positive"),
        ({"do_flip": True}, "unknown key 'do_flip'"),
        ({"kind": []}, "kind"),
    ],
)
def test_mistake_names_the_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(dataclasses.asdict(of(KINDS["plain"])) | changes))
    with pytest.raises(UserError, match=FILE.replace(".", r"\.") + ".*" + message):
        ImagePreprocessor.read(tmp_path)


def test_missing_key_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        ImagePreprocessor.read(tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(UserError, match="missing key 'kind'"):
        ImagePreprocessor.read(tmp_path)


def picture(height: int, width: int) -> Any:
    """As far as Hugging Face's helpers look at it: [3, height, width]."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


@given(EDGES, EDGES, POSITIVE, st.integers(1, 4), st.integers(1, 10**6), st.integers(1, 10**7), st.booleans())
def test_patches_are_those_of_smart_resize(
    height: int, width: int, patch: int, merge: int, least: int, more: int, clip: bool
) -> None:
    kind, edge = Patches(patch, merge, 2, least, least + more, clip), patch * merge
    if max(height, width) > 200 * min(height, width):  # refused there; here it is brought to the nearest layout
        return
    if clip:
        expected = glm_resize(2, height, width, 2, edge, least, least + more)
    else:
        expected = smart_resize(height, width, edge, least, least + more)
    assert kind.target(height, width) == expected
    assert all(side % edge == 0 for side in expected)


@pytest.mark.parametrize("clip", [False, True])
def test_what_smart_resize_refuses_keeps_its_shape(clip: bool) -> None:
    height, width = Patches(14, 2, 2, 3136, 10**6, clip).target(30, 6001)
    assert width / height == pytest.approx(6001 / 30, rel=0.01)


@given(EDGES, EDGES, st.integers(1, 600), st.integers(1, 600), st.integers(1, 4), st.integers(0, 12))
def test_grids_are_those_of_the_optimal_canvas(
    height: int, width: int, tile_height: int, tile_width: int, least: int, more: int
) -> None:
    limits = least, least + more
    columns, rows = get_optimal_tiled_canvas((height, width), (tile_height, tile_width), *limits)
    assert Grid(tile_height, tile_width, *limits).target(height, width) == (rows * tile_height, columns * tile_width)


@given(EDGES, EDGES, st.integers(1, 2000), st.integers(1, 2000), POSITIVE)
def test_longest_edges_are_those_of_pixtral(height: int, width: int, tallest: int, widest: int, patch: int) -> None:
    ratio = max(height / tallest, width / widest)
    if min(height, width) < ratio:  # nothing would be left of a side
        return
    expected = get_resize_output_image_size(picture(height, width), (tallest, widest), patch, "channels_first")
    assert LongestEdge(tallest, widest, patch).target(height, width) == expected


@settings(deadline=None)
@given(EDGES, EDGES, st.integers(2, 5000), st.integers(2, 600), st.booleans())
def test_splits_are_those_of_idefics3(height: int, width: int, longest: int, edge: int, split: bool) -> None:
    asked = []

    class Asked(Idefics3ImageProcessorPil):
        """Notes the sizes that it would resize to."""

        def resize(self, image: Any, size: Any, resample: Any = None, *args: Any, **more: Any) -> Any:
            if size.longest_edge:
                asked.append(idefics3_size(image, size.longest_edge))
            else:
                asked.append((size.height, size.width))
            return picture(*asked[-1])

    processor = Asked(size={"longest_edge": longest}, max_image_size={"longest_edge": edge})
    first = processor.resize(picture(height, width), processor.size)
    if split:
        processor.resize_for_vision_encoder(first, edge)
    else:
        asked.append((edge, edge))
    assert Split(longest, edge, split).steps(height, width) == asked


RESOLUTION = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(EDGES, EDGES, st.integers(14, 400), st.lists(RESOLUTION, min_size=1, max_size=8))
def test_resolutions_are_those_that_fit_best(height: int, width: int, edge: int, tiles: list[tuple[int, int]]) -> None:
    resolutions = [[rows * edge, columns * edge] for rows, columns in tiles]
    kind = AnyRes(edge, resolutions)
    best: Any = select_best_resolution((height, width), resolutions)
    if best is None:  # nothing is left of a side anywhere
        return
    assert kind.canvas(height, width) == best
    expected = get_patch_output_size(picture(height, width), best, "channels_first")
    assert kind.target(height, width) == expected


@given(EDGES, EDGES, st.integers(1, 600))
def test_shortest_edges_are_as_long_as_they_should_be(height: int, width: int, edge: int) -> None:
    new = Plain({"shortest_edge": edge}, None).target(height, width)
    assert min(new) == edge
    assert max(new) == int(edge * max(height, width) / min(height, width))
    assert new[0] == new[1] or (new[0] < new[1]) == (height < width)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "nothing"])
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_something_is_left_of_any_picture(name: str, height: int, width: int) -> None:
    assert min(min(size) for size in [*KINDS[name].steps(height, width), KINDS[name].target(height, width)]) >= 1


def test_crop_is_the_size_and_without_either_it_stays_what_it_was() -> None:
    assert KINDS["plain"].target(500, 40) == (8, 9)
    assert KINDS["nothing"].target(500, 40) == (500, 40)
