"""Which of an image's tokens the compressed cache holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime
from engines.bundle import Bucket
from runtime.prompt import image_positions
from runtime.state import State
from tests.runtime import toy
from tests.runtime.asking import Recorder, ask, ids_of, image


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.booleans())
def test_the_share_of_heads_that_hold_a_position(seed: int, heads: list[int], compacts: bool) -> None:
    random, total, slots, window = np.random.default_rng(seed), 12, 5, 4
    seen = np.sort(random.choice(total, 8, replace=False)).astype(np.int32)
    arrays, holders = {}, []
    bias = np.where(random.random((1, window)) < 0.5, 0.0, -np.inf)
    positions = np.where(np.isfinite(bias), random.choice(seen, (1, window), replace=False), -1).astype(np.int32)
    inside = {int(p) for p, b in zip(positions[0], bias[0], strict=True) if b == 0}
    for layer, count in enumerate(heads):
        rest = [p for p in seen if int(p) not in inside]
        stored = np.stack([random.permutation([*rest, *[-1] * slots])[:slots] for _ in range(count)])
        arrays[f"store_bias.{layer}"] = np.where(stored >= 0, 0.0, -np.inf)[None]
        arrays[f"store_positions.{layer}"] = stored[None].astype(np.int32)
        holders += [inside | {int(p) for p in row if p >= 0} for row in stored]
    arrays |= {"window_bias": bias, "window_positions": positions}
    if not compacts:
        arrays = {name: array for name, array in arrays.items() if "positions" not in name}
    held = State(arrays, Bucket(total, [slots] * len(heads), window, 2, "p", "d", "c")).holders(seen, total)
    if compacts:
        assert held is not None
        assert held.tolist() == pytest.approx([sum(p in each for each in holders) / sum(heads) for p in range(total)])
    else:
        assert held is None  # 5 slots and 2 recent tokens of a prompt of 8, and nothing says which


def test_a_store_with_room_for_all_holds_all() -> None:
    arrays = {"store_bias.0": np.zeros((1, 2, 6)), "window_bias": np.zeros((1, 3))}
    held = State(arrays, Bucket(6, [6], 3, 0, "p", "d", "")).holders(np.array([0, 2, 3]), 5)
    assert held is not None
    assert held.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("level", ["loose", "tight", "thrifty"])
def test_patches_of_an_answer(bundle_path: Path, recorder: Recorder, level: str) -> None:
    """The toy's store has the last C tokens before the window, which has the prompt's last 4."""
    question, images = "what is it how many", [image(1), image(2), image(3)]
    result = ask(runtime.open(bundle_path, level=level, threads=1), question, images, max_new_tokens=2)
    by_image = [set(outputs["kept"][0].tolist()) for _, _, outputs in recorder.of("vision")]
    if level == "thrifty":
        by_image = [
            {int(k) for k, rank in zip(out["kept"][0], out["order"][0], strict=True) if rank < count}
            for (_, _, out), count in zip(recorder.of("vision"), result.stats.visual_tokens_by_image, strict=True)
        ]
    rows: list[tuple[int, int] | None] = []  # image and token of every row that the model sees, None for text
    number = 0
    for token in ids_of(question, 3):
        rows += [(number, k) for k in sorted(by_image[number])] if token == toy.IMAGE else [None]
        number += token == toy.IMAGE
    sizes = toy.LEVELS["loose" if level == "loose" else "tight"][2]
    (capacities,) = (slots for length, slots, _, _ in sizes if length == result.stats.bucket)
    expected = np.zeros((3, toy.IMAGE_TOKENS))
    for slots, heads in zip(capacities, toy.KV_HEADS, strict=True):
        for row in rows[-4 - slots :]:
            if row is not None:
                expected[row] += heads / sum(toy.KV_HEADS)
    assert np.allclose(result.stats.patches, expected, atol=1e-4)
    assert level == "loose" or 0 < expected.sum() < expected.size


def test_positions_of_images() -> None:
    places = image_positions([1, 4, 4, 7, 4, 4, 9, 4], [3, 2], 4)  # text stands between the first one's tokens
    assert [own.tolist() for own in places] == [[1, 2, 4], [5, 7]]
    assert image_positions([1], [], 4) == []
