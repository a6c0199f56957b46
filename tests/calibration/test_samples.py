"""Reading calibration samples: every mistake is one clear message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibration import samples
from engines.errors import UserError, one_line
from tests.export import tiny

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
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        samples.read(write(tmp_path / "s", GOOD, line))


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
        samples.model_inputs(None, samples.read(folder)[0])
    assert "\n" not in one_line(error.value)
