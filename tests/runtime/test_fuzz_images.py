"""Any image that Pillow can write, damaged in any way, is an image or a UserError: FUZZ=20 tries so many times more."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from engines.errors import UserError
from runtime.preprocess import FORMATS, load_rgb, preprocess
from tests.fuzz import damaged, examples
from tests.layouts import plain
from tests.runtime import toy

PLAIN = ["1", "L", "P", "RGB", "RGBA", "CMYK", "I"]
MODES = [*PLAIN, "F", "LA", "PA", "RGBX", "YCbCr", "LAB", "HSV", "La", "RGBa", "I;16"]
Image.init()


def picture(mode: str, width: int, height: int) -> Image.Image:
    """Random bytes as an image of any mode."""
    size = len(Image.new(mode, (width, height)).tobytes())
    return Image.frombytes(mode, (width, height), np.random.default_rng(width).bytes(size))


@cache
def files() -> dict[tuple[str, str], bytes]:
    """Of every format that this Pillow writes, and mode that the format knows."""
    made: dict[tuple[str, str], bytes] = {}
    for kind in sorted(Image.SAVE):
        for mode in MODES:
            file = io.BytesIO()
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                picture(mode, 23, 17).save(file, kind)
                made[kind, mode] = file.getvalue()
    return made


def understood(data: bytes) -> np.ndarray | None:
    """What the runtime makes of a file; None where it refuses it in one line."""
    try:
        pixels = load_rgb(data)
    except UserError as error:
        told = str(error)
    else:
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3
        assert pixels.shape[2] == 3
        assert pixels.size
        with suppress(UserError):  # too narrow
            assert preprocess(pixels, toy.PREPROCESSOR, plain(8, 8)).shape == (1, 3, 8, 8)
        return pixels
    assert "\n" not in told
    return None


def test_formats() -> None:
    """Those that are read, and of the others some that Pillow would have read."""
    kinds = {kind for kind, _ in files()}
    assert {kind for kind in FORMATS if kind in Image.SAVE} <= kinds
    assert {"EPS", "PCX", "SGI", "PDF"} <= kinds - set(FORMATS)


@pytest.mark.parametrize(("kind", "mode"), files())
def test_every_format_is_read_as_pillow_reads_it_or_refused(kind: str, mode: str) -> None:
    pixels = understood(files()[kind, mode])
    if kind not in FORMATS and kind != "MPO":  # an MPO begins with a JPEG, and is read as one
        assert pixels is None
    elif pixels is not None and mode in ("1", "L", "RGB", "CMYK"):  # the others have an alpha channel or a palette
        with Image.open(io.BytesIO(files()[kind, mode])) as image:
            np.testing.assert_array_equal(pixels, np.array(image.convert("RGB")))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@examples(400)
@given(data=st.data())
def test_a_damaged_file_is_an_image_or_told(data: st.DataObject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tags that make no sense
        understood(data.draw(damaged(data.draw(st.sampled_from(sorted(files().items())))[1])))


@examples(100)
@given(st.sampled_from(MODES), st.integers(0, 40), st.integers(0, 40))
def test_an_image_of_any_mode_is_taken_or_told(mode: str, width: int, height: int) -> None:
    image = picture(mode, width, height) if width and height else Image.new(mode, (width, height))
    try:
        pixels = load_rgb(image)
    except UserError:
        levels = np.asarray(image) if mode == "I" and width and height else np.zeros(1)
        assert not (width and height) or mode not in PLAIN or levels.min() < 0 or levels.max() > 65535
        return
    assert pixels.shape == (height, width, 3)


SIZES = st.one_of(st.integers(0, 300), st.sampled_from([2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1]))


def declaring(kind: str, width: int, height: int) -> bytes:
    """A file of a few bytes whose header declares this size."""
    if kind == "PNG":
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
        chunks = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts]
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    if kind == "BMP":
        return b"BM" + struct.pack("<IHHIIIIHHIIIIII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    if kind == "PPM":
        return f"P6\n{width} {height}\n255\n".encode()
    small = struct.pack("<HH", width % 2**16, height % 2**16)
    if kind == "GIF":
        return b"GIF89a" + small + b"\0\0\0," + bytes(4) + small + b"\0\2\0;"
    return b"\0\0\2" + bytes(9) + small + b"\x18\0"  # TGA


@examples(100)
@given(st.sampled_from(["PNG", "BMP", "PPM", "GIF", "TGA"]), SIZES, SIZES)
def test_a_size_that_is_only_declared_is_refused_before_memory_is_taken(kind: str, width: int, height: int) -> None:
    assume(width * height > 10_000)
    with pytest.raises(UserError):
        load_rgb(declaring(kind, width, height))
