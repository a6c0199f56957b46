"""Reading calibration samples: every mistake is one clear message."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from calibration import samples
from engines.errors import UserError, one_line
from tests.export import tiny

PLAIN: Any = SimpleNamespace(brought=lambda image: image, processor=None)
GOOD = {"images": ["0.png"], "prompt": "what ?", "answer": "red"}


def write(folder: Path, *lines: object) -> Path:
    tiny.samples(folder)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / samples.FILE).write_text(text)
    return folder


def test_reads_in_order_and_skips_blank_lines(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "s",
        GOOD,
        "  ",
        {"images": ["1.png", "0.png"], "prompt": "p", "task": "t"},
        {"images": [], "prompt": ""},
    )
    first, second, third = samples.read(folder)
    assert first == samples.Sample([folder / "0.png"], "what ?", "red")
    assert second == samples.Sample([folder / "1.png", folder / "0.png"], "p", task="t")
    assert third.images == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not "),
        ("[]", ":2: not "),
        ("7", ":2: not "),
        ({"prompt": "p"}, ":2: not .*images"),
        ({"images": ["0.png"]}, ":2: not .*prompt"),
        ({"images": 3, "prompt": "p"}, ":2: not "),
        ({"images": ["0.png"], "prompt": "p", "task": 1}, ":2: not .*task"),
        ({"images": [3], "prompt": "p"}, ":2: not "),
        ({"images": ["0.png", "no.png"], "prompt": "p"}, "no.png does not exist"),
        ({"images": [""], "prompt": "p"}, "does not exist"),
        ({"images": "0.png", "prompt": "p"}, ":2: not .*a list"),
        ({"images": {"0.png": 1}, "prompt": "p"}, ":2: not .*a list"),
        ({"images": "", "prompt": "p"}, ":2: not .*a list"),
        ({"images": [], "prompt": "p", "anwser": "red"}, ":2: not .*unknown key 'anwser'; known keys: images"),
        ({"images": ["x" * 999], "prompt": "p"}, r":2: image .{1,200}\.\.\. does not exist"),
        ("[" * 100_000, ":2: not "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        samples.read(write(tmp_path / "s", GOOD, line))


@pytest.mark.parametrize("mark", ["\u2028", "\u0085"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, mark: str) -> None:
    folder = write(tmp_path / "s", json.dumps(GOOD | {"prompt": f"a{mark}b"}, ensure_ascii=False))
    assert len(samples.read(folder)) == 1


def test_no_folder_and_no_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--samples"):
        samples.read(tmp_path / "none")
    text = write(tmp_path / "s", {"images": [], "prompt": "p"})
    with pytest.raises(UserError, match="no sample has an image"):
        samples.read(text)
    assert samples.read(text, text_only=True) == [samples.Sample([], "p")]


@pytest.mark.parametrize("text_only", [False, True])
def test_no_sample(tmp_path: Path, text_only: bool) -> None:
    with pytest.raises(UserError, match="holds no sample"):
        samples.read(write(tmp_path / "s", "", " "), text_only)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    (folder / samples.FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        samples.read(folder)


@pytest.mark.parametrize("keep", [0, 60])
def test_a_damaged_image(tmp_path: Path, keep: int) -> None:
    folder = write(tmp_path / "s", GOOD)
    image = folder / "0.png"
    image.write_bytes(image.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"0\.png cannot be read") as error:
        samples.model_inputs(PLAIN, samples.read(folder)[0])
    assert "\n" not in one_line(error.value)


@pytest.mark.parametrize(
    "content",
    [b"P6\n4 x\n255\n", b"P5 4 4 99999999\n", b"DDS " + b"\x7c\0\0\0" + bytes(150), b"\x01\xda\x01\x05" + bytes(600)],
    ids=["ppm", "pgm", "dds", "sgi"],
)
def test_whatever_a_decoder_raises_is_one_line(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "s", GOOD)
    (folder / "0.png").write_bytes(content)
    with pytest.raises(UserError, match=r"0\.png cannot be read"):
        samples.model_inputs(PLAIN, samples.read(folder)[0])


def test_an_image_of_too_many_pixels_is_refused_and_does_not_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder = write(tmp_path / "s", GOOD)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", tiny.IMAGE_SIZE**2 * 2 // 3)
    with pytest.raises(UserError, match=r"0\.png cannot be read: .*exceeds limit"):
        samples.model_inputs(PLAIN, samples.read(folder)[0])
    assert not recwarn.list


def test_a_long_prompt_is_shown_shortened(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", GOOD | {"prompt": "what ? " * 1000})
    with pytest.raises(UserError, match="makes no prompt") as error:
        samples.model_inputs(PLAIN, samples.read(folder)[0])
    assert len(str(error.value)) < 2 * samples.SHOWN
