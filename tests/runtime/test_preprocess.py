"""Images as Hugging Face's own code makes them: `load_image` for files, the PIL image processor for the rest."""

from __future__ import annotations

import io
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from calibration import samples
from engines.errors import UserError
from engines.preprocessor import ImagePreprocessor, Plain
from runtime import preprocess as module
from runtime.preprocess import UNPACKED, load_rgb, opened, preprocess
from tests.layouts import made_by

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
STEP = 1 / 255 / max(STD)  # one level of an 8-bit channel, after normalisation

STRETCH = ImagePreprocessor(Plain({"height": 64, "width": 64}, None), 3, 1 / 255, MEAN, STD)
KINDS = {
    "stretch": STRETCH,
    "crop": ImagePreprocessor(Plain({"shortest_edge": 48}, {"height": 48, "width": 48}), 3, 1 / 255, MEAN, STD),
    "odd crop": ImagePreprocessor(Plain({"shortest_edge": 33}, {"height": 31, "width": 29}), 2, 1 / 255, MEAN, STD),
    "crop larger than image": ImagePreprocessor(
        Plain({"shortest_edge": 20}, {"height": 47, "width": 50}), 1, 1 / 255, MEAN, STD
    ),
    "crop only": ImagePreprocessor(Plain(None, {"height": 24, "width": 25}), 3, 1 / 255, MEAN, STD),
    "wide": ImagePreprocessor(Plain({"height": 20, "width": 70}, None), 0, 1 / 127.5, [1.0, 1.0, 1.0], [1.0, 0.5, 2.0]),
}


def reference(settings: ImagePreprocessor) -> CLIPImageProcessorPil:
    kind = settings.kind
    assert isinstance(kind, Plain)
    return CLIPImageProcessorPil(
        do_resize=kind.resize is not None,
        size=kind.resize or {"height": 1, "width": 1},
        resample=settings.resample,
        do_center_crop=kind.crop is not None,
        crop_size=kind.crop or {"height": 1, "width": 1},
        rescale_factor=settings.rescale,
        image_mean=settings.mean,
        image_std=settings.std,
    )


def assert_same(source: Any, theirs: Any, settings: ImagePreprocessor = STRETCH) -> None:
    """Ours of `source` equals theirs of what they make of it, far closer than one 8-bit level."""
    ours = preprocess(source, settings, made_by(settings))
    expected = reference(settings)(images=theirs, return_tensors="np")["pixel_values"]
    assert ours.dtype == np.float32
    assert ours.flags.c_contiguous
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() < STEP / 1000


def pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 64), (1, 1), (37, 91), (300, 5), (5, 300), (129, 64), (63, 65)])
def test_equals_hugging_face(kind: str, size: tuple[int, int]) -> None:
    array = pixels(*size)
    assert_same(array, Image.fromarray(array), KINDS[kind])
    assert_same(Image.fromarray(array), Image.fromarray(array), KINDS[kind])


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(sorted(KINDS)),
    channels=st.sampled_from([1, 3, 4]),
)
def test_any_array_equals_hugging_face(height: int, width: int, seed: int, kind: str, channels: int) -> None:
    array = pixels(height, width, channels, seed)
    # Their guess of where the channels are fails on arrays like [3, W, 3]; a caller who knows says so.
    image = np.array(reference(KINDS[kind]).convert_to_rgb(array, input_data_format="channels_last"))
    np.testing.assert_array_equal(load_rgb(array), image)
    assert_same(array, Image.fromarray(image), KINDS[kind])


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


def palette(transparent: bool) -> tuple[Image.Image, dict[str, Any]]:
    image = Image.fromarray(pixels(40, 30)).quantize(16)
    return image, {"transparency": 3} if transparent else {}


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


FILES: dict[str, Any] = {
    "palette.png": palette(False),
    "palette_transparent.png": palette(True),
    "rgba.png": (Image.fromarray(pixels(41, 33, 4)), {}),
    "grey_alpha.png": (Image.fromarray(pixels(20, 33, 2), "LA"), {}),
    "grey.png": (Image.fromarray(pixels(20, 33, 1)[..., 0]), {}),
    "grey_transparent.png": (Image.fromarray(pixels(20, 33, 1)[..., 0]), {"transparency": 7}),
    "bits.png": (Image.fromarray(pixels(20, 33, 1)[..., 0] > 99), {}),
    "cmyk.jpg": (Image.fromarray(pixels(40, 30, 4), "CMYK"), {}),
    "grey.jpg": (Image.fromarray(pixels(40, 30, 1)[..., 0]), {}),
    "animated.gif": (
        Image.fromarray(pixels(20, 30)).quantize(16),
        {"save_all": True, "append_images": [Image.fromarray(pixels(20, 30, seed=1)).quantize(16)]},
    ),
    "rgba.webp": (Image.fromarray(pixels(41, 33, 4)), {"lossless": True}),
    "stereo.mpo": (
        Image.fromarray(pixels(20, 30)),
        {"save_all": True, "append_images": [Image.fromarray(pixels(20, 30, seed=1))]},
    ),
    "image.bmp": (Image.fromarray(pixels(41, 33)), {}),
    "image.tiff": (Image.fromarray(pixels(41, 33)), {}),
    "rotated.png": (Image.fromarray(pixels(20, 50)), {"exif": exif(6)}),
} | {f"turned_{n}.jpg": (Image.fromarray(pixels(48, 20)), {"exif": exif(n)}) for n in range(1, 9)}


@pytest.mark.parametrize("name", FILES)
def test_file_equals_load_image(name: str, tmp_path: Path) -> None:
    image, options = FILES[name]
    path = save(tmp_path / name, image, **options)
    np.testing.assert_array_equal(load_rgb(path), convert_to_rgb(load_image(str(path)), return_numpy=True))
    assert_same(str(path), load_image(str(path)))


@pytest.mark.parametrize("name", FILES)
def test_opened_image_equals_their_processor(name: str, tmp_path: Path) -> None:
    """An image that the caller opened is composited onto white and not turned: what their processor does with it."""
    image, options = FILES[name]
    path = save(tmp_path / name, image, **options)
    with Image.open(path) as ours, Image.open(path) as theirs:
        assert_same(ours, theirs)


SIXTEEN = np.arange(65536, dtype=np.uint16).reshape(256, 256)


@pytest.mark.parametrize(
    ("name", "array", "options"),
    [
        ("grey.png", SIXTEEN, {}),
        ("transparent.png", SIXTEEN, {"transparency": 40000}),
        ("grey.tiff", SIXTEEN, {}),
        ("big_endian.tiff", SIXTEEN.astype(">u2"), {}),
        ("signed.tiff", SIXTEEN.astype(np.int32), {}),
        ("grey.pgm", SIXTEEN, {}),
    ],
)
def test_sixteen_bits_are_what_they_show(name: str, array: np.ndarray, options: dict[str, Any], tmp_path: Path) -> None:
    """Also in calibration; Hugging Face's would be white above 255."""
    path, levels = save(tmp_path / name, Image.fromarray(array), **options), np.round(SIXTEEN / 257)
    with Image.open(path) as opened_here:
        for read in (load_rgb(path), load_rgb(opened_here), np.array(samples.opened(path))):
            np.testing.assert_array_equal(read, np.repeat(levels[..., None], 3, axis=-1))


@pytest.mark.parametrize(
    ("name", "kind", "white"),
    [("dark.png", np.uint16, 65535), ("dark.tiff", np.uint16, 65535), ("dark.pgm", np.uint16, 65535),
     ("wide.tiff", np.int32, 255)],
)  # fmt: skip
def test_dark_is_what_the_file_says(name: str, kind: type, white: int, tmp_path: Path) -> None:
    """Numbers up to 255 are dark in 16 bits; in 32, which say nothing, they are Pillow's own 8, also without a file."""
    dark = np.arange(256).reshape(16, 16)
    path, levels = save(tmp_path / name, image := Image.fromarray(dark.astype(kind))), np.round(dark / white * 255)
    with Image.open(path) as opened_here:
        for read in (load_rgb(path), load_rgb(opened_here), load_rgb(image), np.array(samples.opened(path))):
            np.testing.assert_array_equal(read, np.repeat(levels[..., None], 3, axis=-1))


@pytest.mark.parametrize("array", [np.linspace(0, 1, 6, dtype=np.float32), np.array([0, 70_000], np.int32)])
def test_levels_without_a_known_white_are_refused(array: np.ndarray, tmp_path: Path) -> None:
    path = save(tmp_path / "levels.tiff", Image.fromarray(array[None]))
    for read in (load_rgb, samples.opened):
        with pytest.raises(UserError, match=r"levels\.tiff.* pixels of mode \w from 0 to .*: save it with 8"):
            read(path)


def test_rotated_photo_is_turned_upright(tmp_path: Path) -> None:
    """Not only as they do, but right: the bright left half of a stored image with orientation 6 is on top."""
    array = np.zeros((20, 60, 3), np.uint8)
    array[:, :30] = 255
    path = save(tmp_path / "photo.jpg", Image.fromarray(array), exif=exif(6), quality=95)
    turned = load_rgb(path)
    assert turned.shape == (60, 20, 3)
    assert turned[:25].min() > 200
    assert turned[35:].max() < 50


def test_fully_transparent_image_is_white() -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert (load_rgb(image) == 255).all()
    assert (load_rgb(np.array(image)) == 255).all()


def test_array_is_not_changed() -> None:
    array = pixels(30, 20, 4)
    before = array.copy()
    preprocess(array, STRETCH, made_by(STRETCH))
    np.testing.assert_array_equal(array, before)


ENCODED = ["png", "jpeg", "gif", "webp", "bmp", "tiff"]


@pytest.mark.parametrize("kind", ENCODED)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95])
def test_truncated_file_is_told(kind: str, share: float, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(pixels(60, 70)).save(buffer, kind)
    path = tmp_path / f"image.{kind}"
    path.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * share)])
    with pytest.raises(UserError, match=rf"image\.{kind}: not a readable image"):
        load_rgb(path)


def test_truncated_image_that_the_caller_opened(tmp_path: Path) -> None:
    path = save(tmp_path / "image.png", Image.fromarray(pixels(60, 70)))
    path.write_bytes(path.read_bytes()[:5000])
    with Image.open(path) as image, pytest.raises(UserError, match="not a readable image"):
        load_rgb(image)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_image_with_too_many_pixels_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "bomb.png", Image.new("L", (300, 200)))
    for limit in (50_000, 20_000):  # where Pillow only warns, and where it refuses
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(UserError, match=r"bomb\.png: too many pixels"):
            load_rgb(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60_000)
    assert load_rgb(path).shape == (200, 300, 3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_threads_leave_filters_of_warnings_alone_and_keep_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    small, large = (
        save(tmp_path / "small.png", Image.new("L", (9, 9))),
        save(tmp_path / "l.png", Image.new("L", (300, 200))),
    )
    inside, before = threading.Barrier(4, timeout=60), [*warnings.filters]
    told: list[str] = []

    def work() -> None:
        for _ in range(20):
            inside.wait()
            with opened(small, "small"):
                inside.wait()
            try:
                load_rgb(large)
            except UserError as error:
                told.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before
    assert len(told) == 80
    assert all("too many pixels" in each for each in told)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_default_limit_refuses_a_real_bomb(tmp_path: Path) -> None:
    """100 megapixels in 12 kB."""
    path = save(tmp_path / "bomb.png", Image.new("1", (10_000, 10_000)))
    with pytest.raises(UserError, match="too many pixels"):
        load_rgb(path)


def test_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "image.png", Image.fromarray(pixels(60, 70)))
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    with pytest.raises(UserError, match=r"image\.png: larger than"):
        load_rgb(path)


def test_narrow_image_does_not_blow_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pixel by 100,000 with its shorter edge stretched to 2,000 would be 200 gigapixels."""
    settings = ImagePreprocessor(Plain({"shortest_edge": 2000}, {"height": 9, "width": 9}), 3, 1 / 255, MEAN, STD)
    with pytest.raises(UserError, match="too narrow"):
        preprocess(pixels(1, 100_000), settings, made_by(settings))


def test_formats_that_run_programs_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "image.eps", Image.fromarray(pixels(10, 10)))
    with pytest.raises(UserError, match="not a readable image"):
        load_rgb(path)


def test_text_file_is_no_image(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("not an image")
    with pytest.raises(UserError, match=r"notes\.png: not a readable image: damaged, or none of PNG, JPEG, "):
        load_rgb(path)


@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "iCCP"])
def test_what_a_small_file_unpacks_to_is_bounded(kind: str) -> None:
    """Pillow unpacks it as it reads the header, also what nobody asks for."""
    file, info = io.BytesIO(), PngInfo()
    for number in range(3):
        text = "a" * (UNPACKED // 2)
        if kind == "zTXt":
            info.add_text(f"k{number}", text, zip=True)
        else:
            info.add_itxt(f"k{number}", text, zip=True)
    profile = bytes(UNPACKED + 1) if kind == "iCCP" else None
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=None if profile else info, icc_profile=profile)
    assert len(file.getvalue()) < 10_000
    with pytest.raises(UserError, match=r"not a readable image: .*(text chunks|too large)"):
        load_rgb(file.getvalue())
