"""Sentences and images: the rule against a walk from token to token, in numpy and in the graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.tokens import ALIGNED, FIRST, PADDING, TEXT, VISUAL, marked, segments, sentence_ends
from export.stages.tokens import first_marks, unpacked

ENDS = [7, 8]


LATIN = [".", " ?", "!", "...", "\n", ".\n\n", " \n ", '."', "?)", "end."]


@pytest.mark.parametrize("text", [*LATIN, "\u3002", "\uff01\u300d", "\uff1f", "\u061f", "\u0964"])
def test_ends_of_sentences(text: str) -> None:
    assert sentence_ends(["a", text]) == [1]


@pytest.mark.parametrize("text", ["", " ", "a", ",", ".5", ":", "</s>", '"', ".a", "、", "\t"])
def test_no_ends_of_sentences(text: str) -> None:
    assert sentence_ends([text]) == []


@given(st.lists(st.integers(5, 9) | st.just(-1), max_size=20), st.integers(1, 3))
def test_segments_and_marks_by_definition(items: list[int], size: int) -> None:
    """-1 is an image of `size` tokens."""
    ids, images, want, first = [], [], [], []
    image = sentence = 0
    before = None
    for item in items:
        if item < 0:
            image += 1
            ids += [4] * size
            images += [image] * size
            want += [image] * size
            first += [False] * size
        else:
            begins = before is None or before < 0 or (before in ENDS and item not in ENDS)
            sentence += begins
            ids.append(item)
            images.append(0)
            want.append(sentence)
            first.append(begins)
        before = item
    numbers = segments(np.array(ids, np.int64), np.array(images, np.int64), ENDS)
    assert numbers.tolist() == want
    assert numbers.dtype == np.int32
    kinds = np.where(np.array(images) > 0, VISUAL, TEXT).astype(np.int32)
    packed = marked(kinds, numbers)
    assert packed.tolist() == [kind + FIRST * begins for kind, begins in zip(kinds, first, strict=True)]

    # The same behind padding, in a graph.
    padded = (torch.from_numpy(np.pad(array, (3, 0)))[None] for array in (kinds, numbers))
    in_graph = first_marks(*padded)
    assert in_graph.dtype == torch.int32
    assert in_graph[0].tolist() == [0, 0, 0, *(FIRST * begins for begins in first)]


@given(
    st.lists(
        st.tuples(st.sampled_from([PADDING, TEXT, VISUAL]), st.sampled_from([0, FIRST, ALIGNED, FIRST + ALIGNED])),
        min_size=1,
    )
)
def test_kinds_and_marks_are_told_apart(pairs: list[tuple[int, int]]) -> None:
    kinds, marks = unpacked(torch.tensor([kind + mark for kind, mark in pairs], dtype=torch.int32))
    assert list(zip(kinds.tolist(), marks.tolist(), strict=True)) == pairs
