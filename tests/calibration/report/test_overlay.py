"""What is drawn over pictures, against loops over pixels and an eigenvalue decomposition."""

from __future__ import annotations

import base64
import io
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from calibration.report import overlay

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))


@given(SIZES)
def test_patches_are_square_and_in_reading_order(sizes: tuple[int, int, int, int]) -> None:
    rows, columns, side, _ = sizes
    assert overlay.grid(rows * columns, rows * side, columns * side) == (rows, columns)


@pytest.mark.parametrize(("tokens", "height", "width"), [(577, 336, 336), (64, 64, 32), (7, 64, 64), (1, 10, 100)])
def test_other_numbers_of_tokens_are_no_grid(tokens: int, height: int, width: int) -> None:
    assert overlay.grid(tokens, height, width) is None


@given(SIZES, st.data())
def test_every_pixel_gets_its_patch(sizes: tuple[int, int, int, int], data: st.DataObject) -> None:
    rows, columns, high, wide = sizes
    patches = data.draw(arrays.arrays(float, (rows * columns, 2), elements=st.floats(0, 1)))
    got = overlay.spread(patches, (rows, columns), (rows * high, columns * wide))
    assert got.shape == (rows * high, columns * wide, 2)
    for y, x in product(range(rows * high), range(columns * wide)):
        np.testing.assert_array_equal(got[y, x], patches[(y // high) * columns + x // wide])


def picture(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


@given(SIZES, st.data())
def test_dropped_patches_fade(sizes: tuple[int, int, int, int], data: st.DataObject) -> None:
    rows, columns, high, wide = sizes
    kept = data.draw(arrays.arrays(float, rows * columns, elements=st.floats(0, 1)))
    whole = picture(rows * high, columns * wide)
    got = overlay.faded(whole, kept, (rows, columns))
    for y, x, channel in product(range(rows * high), range(columns * wide), range(3)):
        left = 0.12 + 0.88 * kept[(y // high) * columns + x // wide]
        assert abs(got[y, x, channel] - (left * whole[y, x, channel] + (1 - left) * 128)) <= 0.51
    np.testing.assert_array_equal(overlay.faded(whole, np.ones(rows * columns), (rows, columns)), whole)


@given(SIZES, st.data())
def test_heat_is_relative_to_the_most(sizes: tuple[int, int, int, int], data: st.DataObject) -> None:
    rows, columns, high, wide = sizes
    mass = data.draw(arrays.arrays(float, rows * columns, elements=st.floats(0, 1)))
    whole = picture(rows * high, columns * wide)
    got = overlay.heat(whole, mass, (rows, columns))
    np.testing.assert_array_equal(got, overlay.heat(whole, 2.0 * mass, (rows, columns)))
    brightest = int(mass.argmax())
    y, x = (brightest // columns) * high, (brightest % columns) * wide
    grey = sum(int(level) for level in whole[y, x]) / 3
    hottest = np.array([252, 255, 164]) if mass.max() > 0 else np.array([0, 0, 4])  # the ends of matplotlib's inferno
    np.testing.assert_allclose(got[y, x], 0.7 * hottest + 0.3 * grey, atol=1.1)


@given(st.integers(4, 12), st.integers(1, 8), st.integers(0, 99))
def test_colors_are_the_first_principal_components(tokens: int, features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = np.concatenate([rng.exponential(size=(tokens, features)), np.full((tokens, 1), 0.25)], axis=1)
    colors, explained = overlay.principal(vectors)
    assert colors.shape == (tokens, 3)
    assert ((colors >= 0) & (colors <= 1)).all()

    unit = np.array([(column - column.mean()) / column.std() for column in vectors.T[:-1]]).T  # the last never changes
    values, axes = np.linalg.eigh(unit.T @ unit)
    assert explained == pytest.approx(values[::-1][:3].sum() / values.sum())
    for channel in range(min(3, np.linalg.matrix_rank(unit))):
        score = unit @ axes[:, -1 - channel]
        score = score if score.max() > -score.min() else -score
        np.testing.assert_allclose(colors[:, channel], (score - score.min()) / np.ptp(score), atol=1e-6)


def test_patches_that_are_all_alike_have_one_color() -> None:
    colors, explained = overlay.principal(np.full((9, 4), 0.125, np.float32))
    assert (colors == colors[0]).all()
    assert explained == 0


@pytest.mark.parametrize(
    ("height", "width", "drawn"), [(64, 64, (224, 224)), (32, 64, (112, 224)), (448, 896, (112, 224))]
)
def test_an_address_holds_the_whole_picture(height: int, width: int, drawn: tuple[int, int]) -> None:
    address = overlay.uri(np.broadcast_to(np.array([250, 120, 10], np.uint8), (height, width, 3)))
    kind, _, content = address.partition(",")
    assert kind == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert (image.height, image.width) == drawn
        np.testing.assert_allclose(np.asarray(image.convert("RGB")).reshape(-1, 3).mean(axis=0), [250, 120, 10], atol=6)
