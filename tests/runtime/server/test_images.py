"""Where the grid of patches lies on an image."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engines.preprocessor import ImagePreprocessor, Plain
from runtime.preprocess import ORIENTATION, preprocess
from runtime.server.images import File, check, region
from runtime.server.levels import grid
from tests.layouts import made_by, plain

SIZES = st.integers(60, 200)
HOW: dict[str, tuple[dict[str, int] | None, dict[str, int] | None]] = {  # resize and crop
    "stretch": ({"height": 40, "width": 50}, None),
    "crop": ({"shortest_edge": 60}, {"height": 40, "width": 44}),
    "square": ({"shortest_edge": 40}, {"height": 40, "width": 40}),
    "pad": (None, {"height": 220, "width": 210}),
}


@given(SIZES, SIZES, st.sampled_from(sorted(HOW)))
def test_the_region_is_what_the_model_sees(width: int, height: int, kind: str) -> None:
    """An image whose red grows to the right and whose green grows downwards tells where its pixels went."""
    settings = ImagePreprocessor(Plain(*HOW[kind]), 2, 1.0, [0.0] * 3, [1.0] * 3)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = (np.arange(width) + 0.5) / width * 250
    pixels[..., 1] = ((np.arange(height) + 0.5) / height * 250)[:, None]
    pixels[..., 2] = 255
    seen = preprocess(pixels, settings, made_by(settings))[0]
    left, top, wide, high = region(width, height, settings)
    rows, columns = seen.shape[1:]
    for row, column in ((rows // 4, columns // 4), (rows // 2, columns // 2), (3 * rows // 4, 3 * columns // 4)):
        x, y = left + wide * (column + 0.5) / columns, top + high * (row + 0.5) / rows
        if seen[2, row, column] < 250:  # padding
            continue
        assert seen[0, row, column] / 250 == pytest.approx(x, abs=0.03)
        assert seen[1, row, column] / 250 == pytest.approx(y, abs=0.03)
    if kind == "pad":
        assert min(left, top) < 0


def test_a_photo_on_its_side_has_the_size_of_the_upright_one() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[ORIENTATION] = 6
    Image.new("RGB", (30, 20)).save(file, "JPEG", exif=exif)
    for upright, size in ((True, (20, 30)), (False, (30, 20))):
        known = check(File(file.getvalue()), 1000, 1, upright)
        assert (known.width, known.height) == size


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_a_grid_is_of_squares(rows: int, columns: int, edge: int) -> None:
    assert grid(plain(rows * edge, columns * edge, rows * columns)) == (rows, columns)
    assert grid(plain(rows * edge, columns * edge, rows * columns + 1)) != (rows, columns)


def test_what_is_no_grid_of_squares_is_none() -> None:
    assert grid(plain(336, 336, 577)) is None
    assert grid(plain(64, 64, 10**6)) is None
