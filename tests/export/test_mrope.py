"""Position ids of M-RoPE against Hugging Face's own, here and as they were when this was written."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.mrope import MRope
from export.mrope import FAMILIES, mrope_of

GOLDEN = Path(__file__).with_name("mrope.json")
TEXT, IMAGE, VIDEO = 0, 1, 2  # as Hugging Face's processors number them
TINY: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}


@cache
def model(family: str, merge: int = 2, speed: float = 2) -> Any:
    """Hugging Face's model, which counts positions without its weights."""
    vision: dict[str, Any] = {"spatial_merge_size": merge, "depth": 1, "hidden_size": 16, "num_heads": 2}
    vision |= {"tokens_per_second": speed} if family == "qwen2_5_vl" else {}
    config = transformers.AutoConfig.for_model(family, text_config=TINY, vision_config=vision)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


@dataclass(frozen=True)
class Piece:
    """Part of a prompt: so many tokens of text, or a picture of (t, h, w) visual tokens that take some seconds each."""

    text: int = 0
    size: tuple[int, int, int] | None = None
    seconds: float = 1.0

    def tokens(self, apart: bool) -> list[int]:
        """Types of its tokens; where frames stand apart, each has its time as text before it."""
        if self.size is None:
            return [TEXT] * self.text
        frames, height, width = self.size
        if frames > 1 and apart:
            return ([TEXT] * 2 + [VIDEO] * height * width) * frames
        return [VIDEO if frames > 1 else IMAGE] * (frames * height * width)


def with_text(pieces: list[Piece]) -> list[Piece]:
    """As in a prompt: there is always text between two pictures."""
    return [part for piece in pieces for part in ([Piece(text=1), piece] if piece.size else [piece])]


def ours(pieces: list[Piece], rule: MRope, start: int = 0) -> np.ndarray:
    types = np.array([t for piece in pieces for t in piece.tokens(rule.frames_apart)])
    pictures = [piece for piece in pieces if piece.size]
    grids = [grid(piece, rule.merge) for piece in pictures]
    return rule.position_ids(types != TEXT, grids, start, [piece.seconds for piece in pictures])


def grid(piece: Piece, merge: int) -> list[int]:
    assert piece.size
    return [piece.size[0], piece.size[1] * merge, piece.size[2] * merge]


def hugging_face(prompts: list[list[Piece]], hf: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Position ids of each prompt of a batch that is padded on the left, and the difference for what follows."""
    rule = mrope_of(hf.config)
    assert rule
    types = [[t for piece in prompt for t in piece.tokens(rule.frames_apart)] for prompt in prompts]
    longest = max(map(len, types))
    padded = torch.tensor([[TEXT] * (longest - len(row)) + row for row in types])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in types])
    pictures = [piece for prompt in prompts for piece in prompt if piece.size]
    images = [grid(p, rule.merge) for p in pictures if p.size and p.size[0] == 1]
    videos = [p for p in pictures if p.size and p.size[0] > 1]
    inputs: dict[str, Any] = {"image_grid_thw": torch.tensor(images) if images else None}
    inputs["video_grid_thw"] = torch.tensor([grid(p, rule.merge) for p in videos]) if videos else None
    if rule.tokens_per_second is not None:
        inputs["second_per_grid_ts"] = torch.tensor([p.seconds for p in videos])
    ids, delta = hf.get_rope_index(padded, mm_token_type_ids=padded, attention_mask=mask, **inputs)
    return [ids[:, i, longest - len(row) :].numpy() for i, row in enumerate(types)], delta[:, 0].numpy()


def pieces(most: int = 6) -> st.SearchStrategy[list[Piece]]:
    side = st.integers(1, 5)
    text = st.builds(Piece, text=st.integers(1, 9))
    image = st.builds(Piece, size=st.tuples(st.just(1), side, side))
    seconds = st.sampled_from([0.1, 0.5, 2 / 3, 1.0, 1.7])
    video = st.builds(Piece, size=st.tuples(st.integers(2, 5), side, side), seconds=seconds)
    return st.lists(st.one_of(text, image, video), min_size=1, max_size=most).map(with_text)


CASES = {
    "text only": [Piece(text=9)],
    "image first": [Piece(size=(1, 3, 2)), Piece(text=5)],
    "images of several grids": [
        Piece(text=4), Piece(size=(1, 2, 5)), Piece(text=1), Piece(size=(1, 4, 4)), Piece(text=3),
        Piece(size=(1, 1, 1)), Piece(text=2),
    ],
    "video": [Piece(text=3), Piece(size=(4, 2, 3), seconds=0.5), Piece(text=6)],
    "image after video": [
        Piece(text=2), Piece(size=(3, 2, 2), seconds=2 / 3), Piece(text=2), Piece(size=(1, 3, 4)), Piece(text=4),
    ],
    "video last": [Piece(text=1), Piece(size=(1, 2, 2)), Piece(text=1), Piece(size=(2, 3, 1), seconds=1.7)],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(prompts=st.lists(pieces(), min_size=1, max_size=3), merge=st.integers(1, 3), speed=st.sampled_from([1, 2, 25]))
@example(prompts=[*CASES.values()], merge=2, speed=2)
def test_positions_are_hugging_faces(family: str, prompts: list[list[Piece]], merge: int, speed: int) -> None:
    hf = model(family, merge, speed)
    rule = mrope_of(hf.config)
    assert rule
    wanted, deltas = hugging_face(prompts, hf)
    for prompt, ids, delta in zip(prompts, wanted, deltas, strict=True):
        got = ours(prompt, rule)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, ids)
        assert got.max() + 1 - got.shape[1] == delta


@given(prompt=pieces(), start=st.integers(0, 1000))
def test_a_later_part_counts_on(prompt: list[Piece], start: int) -> None:
    rule = MRope(2, 2.0)
    np.testing.assert_array_equal(ours(prompt, rule, start), ours(prompt, rule) + start)


@given(grids=st.lists(st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4)), min_size=2, max_size=4))
def test_pictures_may_stand_side_by_side(grids: list[tuple[int, int, int]]) -> None:
    """As tiles of a picture do, with no text between them: written from the formula, token by token."""
    wanted, start = [], 3
    for frames, height, width in grids:
        wanted += [
            [start + t, start + y, start + x] for t in range(frames) for y in range(height) for x in range(width)
        ]
        start += max(height, width)
    got = MRope(1).position_ids(np.ones(len(wanted), bool), grids, 3)
    np.testing.assert_array_equal(got, np.array(wanted).T)


def test_a_grid_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="5 visual tokens"):
        MRope(2).position_ids(np.ones(5, bool), [[1, 4, 4]])
    with pytest.raises(ValueError, match="1 visual tokens"):
        MRope(2).position_ids(np.array([False, True]), [])
    with pytest.raises(ValueError, match="merge"):
        MRope(0)


def test_other_families_have_one_position() -> None:
    assert mrope_of(transformers.LlavaConfig()) is None


def golden() -> dict[str, dict[str, list[list[int]]]]:
    """Of each family and case, what the transformers that is installed counts."""
    return {
        family: {name: hugging_face([case], model(family))[0][0].tolist() for name, case in CASES.items()}
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_golden_positions(family: str, case: str) -> None:
    stored = json.loads(GOLDEN.read_text())
    wanted, rule = stored["positions"][family][case], mrope_of(model(family).config)
    now, installed = hugging_face([CASES[case]], model(family))[0][0].tolist(), transformers.__version__
    assert now == wanted, (
        f"transformers {installed} changed the positions of {family} ({case}): they were others in "
        f"{stored['transformers']}. Follow it in engines/mrope.py, then: python tests/export/test_mrope.py"
    )
    assert rule
    assert ours(CASES[case], rule).tolist() == wanted


if __name__ == "__main__":
    found = {"transformers": transformers.__version__, "positions": golden()}
    GOLDEN.write_text(json.dumps(found) + "\n")
    print(f"wrote {GOLDEN}", file=sys.stderr)
