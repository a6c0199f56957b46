"""The grid of quantized weights, against its formula written out in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engines.weights import Table, pack, unpack
from export.weights import Grid

LARGEST = {4: (7, 8, 7.4, 7.8, 8.4, 8.8), 8: (127,)}  # of a block, in scales: what may be tried
RANGE = {4: (-8, 7), 8: (-127, 127)}


def weights(rows: int, width: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (rows, width)) * np.exp(rng.normal(0, spread, (rows, 1)))
    return torch.from_numpy(values.astype(np.float32))


def blocks_of(width: int, group: int) -> list[slice]:
    return [slice(first, min(first + group, width)) for first in range(0, width, group)]


def least_error(block: list[float], bits: int) -> tuple[float, float]:
    """Of the squares, with the best of the scales, each rounded to 16 significant bits -> from, to.

    Two where a scale lies halfway between those: float32 may round it to either.
    """
    least, most = RANGE[bits]
    found = []
    for divisor in LARGEST[bits]:
        mantissa, exponent = math.frexp(max(map(abs, block)) / divisor)
        scales = {math.ldexp(round(mantissa * 2**16 + off), exponent - 16) for off in (-0.02, 0.02)}
        found.append(
            [
                sum((min(max(round(x / scale), least), most) * scale - x) ** 2 for x in block) if scale else 0.0
                for scale in scales
            ]
        )
    return min(map(min, found)), min(map(max, found))


@given(
    rows=st.integers(1, 5),
    width=st.integers(32, 300),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 2**16),
)
@example(rows=2, width=184, bits=8, group=32, seed=2)  # a scale halfway between two
def test_every_block_has_the_scale_that_errs_least(rows: int, width: int, bits: int, group: int, seed: int) -> None:
    weight, grid = weights(rows, width, seed), Grid(bits, group)
    nearest = grid.nearest(weight)
    assert nearest.shape == weight.shape
    for row in range(rows):
        for columns in blocks_of(width, grid.group_of(width)):
            block = weight[row, columns].double().tolist()
            error = (nearest[row, columns].double() - weight[row, columns].double()).square().sum().item()
            # Where a value lies halfway, float32 may round it the other way: the error is the same.
            low, high = least_error(block, bits)
            assert low * (1 - 1e-3) - 1e-9 <= error <= high * (1 + 1e-3) + 1e-9


@given(
    rows=st.integers(1, 20),
    width=st.integers(32, 300),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)
def test_what_lies_on_the_grid_is_found_and_stays(
    rows: int, width: int, bits: int, group: int, seed: int, size: float
) -> None:
    grid = Grid(bits, group)
    nearest = grid.nearest(weights(rows, width, seed) * size)
    torch.testing.assert_close(grid.nearest(nearest), nearest, rtol=0, atol=0)
    found = grid.find(nearest)
    assert found is not None
    values, scales = found
    assert (scales > 0).all()  # TensorRT takes no other
    assert values.min() >= RANGE[bits][0]
    assert values.max() <= RANGE[bits][1]
    assert values.shape[2] == grid.group_of(width)
    for row in range(rows):
        for number, columns in enumerate(blocks_of(width, values.shape[2])):
            for place, column in enumerate(range(columns.start, columns.stop)):
                assert values[row, number, place].item() * scales[row, number].item() == nearest[row, column].item()


def test_what_lies_on_no_grid_is_not_found() -> None:
    weight = Grid(4, 32).nearest(weights(64, 96, 0))
    assert Grid(4, 32).find(weight) is not None
    weight[40, 50] *= 1.01  # behind the rows that are looked at first
    assert Grid(4, 32).find(weight) is None
    assert Grid(8, 32).find(weights(64, 96, 0)) is None


def test_blocks_of_nothing() -> None:
    weight = torch.zeros(2, 64)
    weight[0, 40] = 3.0
    found = Grid(4, 32).find(Grid(4, 32).nearest(weight))
    assert found is not None
    assert found[1].tolist()[1] == [1.0, 1.0]
    torch.testing.assert_close(Grid(4, 32).nearest(weight)[0], weight[0], rtol=1e-5, atol=0)


def test_fewer_bits_and_larger_groups_err_more() -> None:
    weight = weights(64, 256, 1)
    errors = [
        (Grid(bits, g).nearest(weight) - weight).square().sum() for bits, g in ((8, 32), (8, 128), (4, 32), (4, 128))
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize(("width", "group"), [(256, 128), (576, 64), (96, 32), (100, 32)])
def test_a_group_divides_a_row_where_it_can(width: int, group: int) -> None:
    assert Grid(8, 128).group_of(width) == group


@given(rows=st.integers(1, 6), width=st.integers(32, 100), bits=st.sampled_from([4, 8]), seed=st.integers(0, 2**16))
def test_stored_rows_are_read_back(rows: int, width: int, bits: int, seed: int) -> None:
    grid = Grid(bits, 32)
    nearest = grid.nearest(weights(rows, width, seed))
    found = grid.find(nearest)
    assert found is not None
    values, scales = found[0].numpy(), found[1].numpy()
    codes = pack(values, bits)
    np.testing.assert_array_equal(unpack(codes, bits), values)
    for row in range(rows):  # the layout: the earlier of two codes in the lower half of its byte
        for block in range(values.shape[1]):
            for place in range(32):
                byte = int(codes[row, block, place * bits // 8])
                code = byte if bits == 8 else (byte >> 4 if place % 2 else byte & 15)
                assert code - 2 ** (bits - 1) == values[row, block, place]
    table = Table(codes, scales, bits, width)
    ids = np.random.default_rng(seed).integers(0, rows, 7)
    np.testing.assert_array_equal(table[ids], nearest.numpy()[ids])
    np.testing.assert_array_equal(table[rows - 1], nearest.numpy()[-1])
