"""Pictures of several sizes: which layout they get, and prompts that mix them, against the reference."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import runtime
from engines.errors import UserError
from engines.layout import choose_layout
from runtime.preprocess import ORIENTATION, load_rgb, measure, preprocess
from runtime.session import Session
from tests.layouts import plain
from tests.runtime import reference, toy
from tests.runtime.asking import Recorder, ask, ids_of, image, places

SIDES = st.integers(1, 3000)
TURN = "</s> user : image 2 : <image> how many assistant :"  # what the template writes behind an answer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that knows pictures of 8 x 8 and of 8 x 16, the latter with words among its image tokens."""
    return toy.build(tmp_path_factory.mktemp("both") / "bundle", layouts=(toy.SQUARE, toy.WIDE))


def wide(seed: int) -> np.ndarray:
    return np.concatenate([image(seed), image(seed + 100)], axis=1)


@given(SIDES, SIDES, st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=6, unique=True))
def test_the_nearest_in_shape_and_area(height: int, width: int, sizes: list[tuple[int, int]]) -> None:
    """By how many times one area is the other, and twice by how many times one aspect ratio is the other, as logs."""
    layouts = [plain(*size) for size in sizes]
    apart = []
    for h, w in sizes:
        area, aspect = (height * width) / (h * w), (height / width) / (h / w)
        apart.append(np.log(max(area, 1 / area)) + 2 * np.log(max(aspect, 1 / aspect)))
    chosen = choose_layout(height, width, layouts)
    assert apart[layouts.index(chosen)] == pytest.approx(min(apart), abs=1e-9)
    for layout in layouts:
        assert choose_layout(layout.height, layout.width, layouts) is layout


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_header_tells_the_size_of_the_upright_picture(kind: str, turn: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    Image.new("RGB", (30, 20)).save(tmp_path / "image", kind, exif=exif)
    for source in (tmp_path / "image", (tmp_path / "image").read_bytes()):
        assert measure(source) == load_rgb(source).shape[:2]


def test_the_size_of_what_is_no_file() -> None:
    assert measure(np.zeros((7, 9, 3), np.uint8)) == measure(Image.new("L", (9, 7))) == (7, 9)
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)).save(file, "PNG")
    assert measure(file.getvalue()[:200]) == (70, 90)  # nothing is decoded
    with pytest.raises(UserError, match="not a readable image"):
        measure(b"nothing")


def test_a_picture_is_brought_to_its_layout() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), np.uint8)
    for layout in (toy.SQUARE, toy.WIDE):
        size = layout.width, layout.height
        resized = np.array(Image.fromarray(pixels).resize(size, Image.Resampling(toy.PREPROCESSOR.resample)))
        wanted = (resized / 255 - np.array(toy.PREPROCESSOR.mean)) / np.array(toy.PREPROCESSOR.std)
        made = preprocess(pixels, toy.PREPROCESSOR, layout)
        assert made.shape == (1, 3, layout.height, layout.width)
        assert np.allclose(made[0].transpose(1, 2, 0), wanted, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"question_later": True}])
@pytest.mark.parametrize("level", ["loose", "tight", "thrifty", "shared", "frugal", "gated", "fallen"])
def test_answers_about_pictures_of_two_sizes(
    both: Path, level: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, positions and logits as the reference has them, with words between a wide picture's tokens."""
    monkeypatch.setattr("runtime.gate.memory_pressure", lambda budget: 0.3)
    recorder, vlm = Recorder(monkeypatch), runtime.open(both, level=level, threads=1)
    for pictures in ([wide(0)], [image(1), wide(2)], [wide(3), image(4), wide(5)]):
        recorder.calls.clear()
        question = "what is it" if len(pictures) < 3 else "yes"
        if level == "loose" and (len(pictures) == 3 or options):
            continue  # it never compacts, and has no room
        judge = reference.answer(ids_of(question, len(pictures)), pictures, level, 6, **options, pressure=0.3)
        result = ask(vlm, question, pictures, max_new_tokens=6, **options)
        stats = result.stats
        assert result.tokens == judge.tokens
        assert stats.visual_tokens_by_image == [len(kept) for kept in judge.kept]
        assert stats.layouts == ["8x16" if picture.shape[1] == 16 else "8x8" for picture in pictures]
        assert [position for read, _ in recorder.steps() for position in read] == judge.decoded
        seen = recorder.of("vision")
        assert [call[0].endswith("8x16") for call in seen] == [picture.shape[1] == 16 for picture in pictures]


def test_a_session_goes_on_with_a_picture_of_another_size(both: Path, tmp_path: Path) -> None:
    """As the reference answers, also from a file."""
    vlm = runtime.open(both, level="tight", threads=1)
    session, pictures = Session(vlm), [image(1), wide(2)]
    first = session.ask("what is it", pictures[:1], 3, ignore_eos=True)
    session.save(tmp_path / "chat.safetensors")
    begun = ids_of("what is it", 1)
    ids = [*begun, *first.tokens, *(toy.WORDS.index(word) for word in TURN.split())]
    judge = reference.answer(ids, pictures, "tight", 5, ignore_eos=True, answered=[len(begun), len(ids)])
    for going_on in (session, Session.load(vlm, tmp_path / "chat.safetensors")):
        result = going_on.ask("how many", pictures[1:], 5, ignore_eos=True)
        assert result.tokens == judge.tokens
        assert result.stats.layouts == ["8x16"]


def test_an_image_token_in_an_answer_is_no_image(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may say its image token; the next turn reads the rest of the answer, and no image is expected for it."""
    session = Session(runtime.open(both, level="tight", threads=1))
    session.ask("what is it", [image(1)], 2, ignore_eos=True)
    session._settle()
    session._unread = [toy.IMAGE, toy.WORDS.index("red")]
    assert session.ask("how many", [wide(2)], 2, ignore_eos=True).tokens


def test_any_other_size_gets_the_nearest(both: Path) -> None:
    vlm = runtime.open(both, level="tight", threads=1)
    for height, width, name in ((80, 90, "8x8"), (30, 70, "8x16"), (70, 30, "8x8"), (9, 15, "8x16")):
        result = ask(vlm, "what", [np.zeros((height, width, 3), np.uint8)], max_new_tokens=1)
        assert result.stats.layouts == [name]
        assert len(result.stats.patches[0]) == (8 if name == "8x16" else 4)


def test_a_picture_that_is_too_large_is_told_with_its_own_tokens(both: Path) -> None:
    vlm = runtime.open(both, level="loose", threads=1)
    ids = ids_of("what is it", 8)
    tokens = len(ids) + len(places(ids)) * (toy.WIDE.tokens + 3 - 1)
    with pytest.raises(UserError, match=rf"the prompt has {tokens} tokens"):
        vlm.generate("what is it", [wide(i) for i in range(8)])
