"""Videos of folders, animated pictures and lists: which frames are taken, when they are, and what the model sees."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engines.errors import UserError
from engines.layout import VideoStyle
from runtime.__main__ import main
from runtime.model import VLM
from runtime.preprocess import load_rgb
from runtime.session import Session
from runtime.video import FPS, MOST, Clip, Video, read
from tests.runtime.asking import Recorder, image

PAIRS = VideoStyle("<video>", "<v>", 9, 2)
ENDS = replace(PAIRS, ends=True)
SHADES = [0, 90, 180, 240, 30]  # of grey frames, which no palette changes


def shades(clip: Clip) -> list[int]:
    return [int(load_rgb(frame)[0, 0, 0]) for frame in clip.frames()]


def frames() -> list[Image.Image]:
    return [Image.new("RGB", (12, 10), (shade,) * 3) for shade in SHADES]


def animated(kind: str, duration: int = 250) -> bytes:
    file, (first, *rest) = io.BytesIO(), frames()
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    first.save(file, kind, save_all=True, append_images=rest, duration=duration, **options)
    return file.getvalue()


def folder(path: Path) -> Path:
    path.mkdir()
    for number, frame in enumerate(frames()):
        frame.save(path / f"{number:03}.png")
    (path / ".hidden").write_text("no frame")
    return path


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animated_picture_is_a_video(kind: str, tmp_path: Path) -> None:
    (tmp_path / "clip").write_bytes(animated(kind))
    for source in (tmp_path / "clip", str(tmp_path / "clip"), animated(kind)):
        clip = read(Video(source)).sampled(None, None)
        assert (clip.total, clip.fps, shades(clip)) == (5, 4.0, SHADES)
    assert shades(read(Video(animated(kind))).sampled(2, PAIRS)) == [SHADES[0], SHADES[2]]
    assert read(Video(animated(kind), fps=10)).fps == 10


def test_a_folder_is_a_video_in_the_order_of_its_names(tmp_path: Path) -> None:
    clip = read(Video(folder(tmp_path / "frames"), fps=2)).sampled(None, None)
    assert (clip.total, clip.fps, shades(clip)) == (5, 2, SHADES)
    assert read(Video(frames())).fps == FPS  # where nothing tells


def test_numbers_in_names_count_by_value(tmp_path: Path) -> None:
    for number, frame in zip((1, 2, 9, 10, 11), frames(), strict=True):
        frame.save(tmp_path / f"frame{number}.png")
    assert shades(read(Video(tmp_path)).sampled(None, None)) == SHADES


@given(total=st.integers(1, 400), most=st.integers(1, 400))
def test_frames_are_spread_as_hugging_face_spreads_them(total: int, most: int) -> None:
    """`default_sample_indices_fn`, Qwen2-VL's and Qwen3-VL's `sample_frames`, which refuse more than there are."""
    clip = Clip("", [np.zeros((1, 1), np.uint8)] * total, total, FPS)
    plain, pairs, ends = (clip.sampled(most, style).taken for style in (None, PAIRS, ENDS))
    if most >= total:
        assert plain == pairs == ends == list(range(total))
        return
    assert plain == (np.arange(most) * total // most).tolist()
    assert ends == np.linspace(0, total - 1, most).round().astype(int).tolist()
    if rounded := round(most / 2) * 2:
        assert pairs == np.arange(0, total, total / rounded).astype(np.float32).astype(int)[:rounded].tolist()


def test_times_and_seconds() -> None:
    clip = Clip("", [image(0)] * 10, 10, 5.0).sampled(4, PAIRS)
    assert clip.taken == [0, 2, 5, 7]
    assert clip.seconds == pytest.approx(2 / (4 / 10 * 5))  # a pair's, of frames that come twice a second
    assert [len(each) for each in clip.pictures()] == [2, 2]
    odd = Clip("", [image(0)] * 3, 3, 2.0).sampled(None, PAIRS)
    assert [len(each) for each in odd.pictures()] == [2, 1]
    before, behind = (
        replace(PAIRS, start="[", end="]", time="before"),
        replace(PAIRS, start="[", end="]", time="behind"),
    )
    assert PAIRS.text(2, [0.0, 0.5, 1.0]) == "<v><v><v><v>"
    assert before.text(1, [0.0, 0.5, 1.5]) == "<0.2 seconds>[<v>]<1.5 seconds>[<v>]"
    assert behind.text(1, [0.0, 0.5, 1.5]) == "[<v>]0[<v>]1"


def test_where_a_family_has_no_videos_frames_are_images(tight: VLM, recorder: Recorder) -> None:
    shown = [image(1), image(2), image(3)]
    whole = tight.generate("what is it", shown, 5, ignore_eos=True)
    video = tight.generate("what is it", [Video(shown)], 5, ignore_eos=True)
    assert (video.tokens, video.stats.images) == (whole.tokens, 3)
    few = tight.generate("what is it", [Video(shown, frames=2)], 5, ignore_eos=True)
    assert few.tokens == tight.generate("what is it", shown[:2], 5, ignore_eos=True).tokens
    text = {"type": "text", "text": "what is it"}
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "video"}, text]}]
    mixed = tight.generate(chat, [shown[0], Video(shown[1:])], 5, ignore_eos=True)
    assert mixed.tokens == whole.tokens
    later = Session(tight).ask("what is it", [Video(shown)], 5, ignore_eos=True)
    assert later.tokens == Session(tight).ask("what is it", shown, 5, ignore_eos=True).tokens


def test_a_video_of_a_message_must_be_given(tight: VLM) -> None:
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what is it"}]}]
    with pytest.raises(UserError, match="the messages have a video, but none was given"):
        tight.generate(chat, [], 1)
    with pytest.raises(UserError, match="1 image placeholder, but 2 images were given"):
        tight.generate([{"role": "user", "content": [{"type": "image"}]}], [Video([image(1), image(2)])], 1)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llava_onevision", "llava_onevision takes no videos here: it pools the tokens of its frames"),
        ("smolvlm", "smolvlm takes no videos here: it shows its frames in single tiles"),
        ("internvl", "internvl takes no videos here: it numbers its frames"),
    ],
)
def test_a_family_with_another_way_is_told_by_name(
    tight: VLM, model_type: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tight.pictures._bundle
    model = replace(bundle.manifest.model, model_type=model_type)
    monkeypatch.setattr(tight.pictures, "_bundle", replace(bundle, manifest=replace(bundle.manifest, model=model)))
    with pytest.raises(UserError, match=message):
        tight.generate("what is it", [Video([image(1)])], 1)


def film(path: Path) -> Path:
    path.write_bytes(b"\0\0\0\x20ftypisom")
    return path


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def strange(path: Path) -> Path:
    (folder(path) / "002.png").write_text("no picture")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: film(path.with_suffix(".mp4")), "clip.mp4: films are not read here: make a folder of its frames"),
        (empty, "clip: a folder without images"),
        (strange, "002.png: not a readable image"),
        (lambda path: path, "clip: no such file"),
    ],
)
def test_mistakes_are_one_line(
    make: Callable[[Path], Path], message: str, tight: VLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError) as error:
        tight.generate("what is it", [Video(make(tmp_path / "clip"))], 1)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_wrong_options_are_told() -> None:
    for options, message in (({"frames": 0}, "frames must be at least 1"), ({"fps": 0}, "fps must be from 0.001")):
        with pytest.raises(UserError, match=message):
            Video([image(0)], **options)
    with pytest.raises(UserError, match="a video must be a folder of images"):
        read(Video([]))
    with pytest.raises(UserError, match=f"the video has {MOST + 1} frames, more than {MOST}: take fewer"):
        read(Video([image(0)] * (MOST + 1))).sampled(None, None)


def test_from_the_command_line(
    bundle_path: Path, tight: VLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, asked = folder(tmp_path / "frames"), ["ask", str(bundle_path), "--level", "tight", "--max-new-tokens", "4"]
    main([*asked, "--video", str(path), "--frames", "2", "what is it"])
    expected = tight.generate("what is it", [Video(path, frames=2)], 4)
    assert capsys.readouterr().out == expected.text + "\n"
    with pytest.raises(UserError, match="--frames and --fps are of videos"):
        main([*asked, "--frames", "2", "what is it"])
