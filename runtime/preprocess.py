"""Image -> pixel_values, equal to what Hugging Face's PIL image processors make of the same image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import ceil, prod
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import numpy as np

from engines.errors import UserError, one_line
from engines.layout import Layout
from engines.preprocessor import AnyRes, Grid, ImagePreprocessor, Patches, Plain, Size, Split, eight_bits, fitted

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    ImageSource = str | Path | bytes | PILImage | np.ndarray

MAX_FILE_BYTES = 256 * 2**20
# Bytes a pixel that decoding takes at most: Pillow's copies and its decoders' own (22 kinds of files: 13 to 35); an
# array with an alpha channel is composited in float64 (65).
DECODING, COMPOSITING = 40, 72
UNPACKED = 2**19  # of a PNG's text, or its color profile; Pillow, which unpacks it with the header, allows 64 MiB
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: what is stored lies on its side
# Only plain decoders: Pillow would hand an EPS file to an external program.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")


class ImageError(UserError):
    """An image that cannot be read."""


class TooManyPixels(ImageError):
    """An image whose header declares more of them than Pillow takes."""


def load_rgb(source: ImageSource, name: str = "the image") -> np.ndarray:
    """Read an image as Hugging Face does (but 16 bits a pixel as what they show), which differs by where it comes from.

    A file is turned upright by its EXIF tag and loses its alpha channel (`load_image`); a PIL image or an array is
    taken as it is. What is transparent then is composited onto white (`convert_to_rgb`).

    Args:
        source: path, bytes of an image file, PIL image, or uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4].
        name: what messages call one that is no file.

    Returns:
        uint8 [H, W, 3].

    Raises:
        UserError: the file is missing, truncated, too large or no image; or the array is no image.
    """
    from PIL import Image  # here, so that `import runtime` stays quick

    if isinstance(source, np.ndarray):
        return _array_rgb(source)
    if isinstance(source, Image.Image):
        return _image_rgb(source, name)
    if isinstance(source, bytes):
        return _decoded(BytesIO(source), name)
    if isinstance(source, str | Path):
        return _decoded(checked(source), str(source))
    raise UserError(f"image must be a path, bytes, a PIL image or an array, got {type(source).__name__}")


def measure(source: ImageSource) -> Size:
    """Height and width of what `load_rgb` makes of it; by the image's header, nothing is decoded.

    Raises:
        UserError: what `load_rgb` raises, as far as the header tells it.
    """
    from PIL import Image

    if isinstance(source, np.ndarray):
        height, width = _checked_array(source).shape[:2]
        return height, width
    if isinstance(source, Image.Image):
        return source.height, source.width
    file = BytesIO(source) if isinstance(source, bytes) else checked(source)
    with opened(file, "the image" if isinstance(source, bytes) else str(source)) as image:
        return upright_size(image)


def upright_size(image: PILImage) -> Size:
    """Height and width of an image file once it is turned upright, before it is decoded."""
    from PIL import Image

    # PNG's own method decodes all of a file that has no EXIF before its pixels; TIFF's size is upright already.
    turned = image.format != "TIFF" and Image.Image.getexif(image).get(ORIENTATION) in TURNED
    return (image.width, image.height) if turned else (image.height, image.width)


def decoding_bytes(source: ImageSource, settings: ImagePreprocessor, layout: Layout) -> int:
    """What `preprocess` takes at most beside what it returns; by the image's header, nothing is decoded.

    Raises:
        UserError: what `load_rgb` raises, as far as the header tells it.
    """
    height, width = measure(source)
    each = COMPOSITING if isinstance(source, np.ndarray) else DECODING
    resized = max(map(prod, _steps(height, width, settings, layout)), default=0)
    cut = prod(layout.pixel_values) // 3  # what is cut from it has so many pixels
    return each * height * width + DECODING * (resized + cut)


def checked(source: str | Path) -> Path:
    if source == "":  # which Path takes for this folder
        raise UserError("an image's or a video's path is empty: name a file")
    path = Path(source)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # a name that is too long, a zero byte in it, no permission, ...
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    if not S_ISREG(status.st_mode):  # pipes and devices would block or never end
        raise UserError(f"{path}: not a file")
    if status.st_size > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB: shrink the image")
    return path


@contextmanager
def opened(file: Path | BytesIO, name: str) -> Iterator[PILImage]:
    """An image file whose header was read, and whose pixels are not decoded yet.

    Raises:
        ImageError: what is done with it fails, or it is no image, or has too many pixels.
    """
    from PIL import Image, PngImagePlugin, UnidentifiedImageError

    try:
        Image.init()
        PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = UNPACKED
        with Image.open(file, formats=[kind for kind in FORMATS if kind in Image.OPEN]) as image:
            # Pillow warns above its limit (89 megapixels) and refuses only twice that. Filters of warnings belong to
            # the whole process, so its warning is not made an error: other threads may open images too.
            if (limit := Image.MAX_IMAGE_PIXELS) is not None and image.width * image.height > limit:
                raise Image.DecompressionBombError(f"{image.width} x {image.height}, more than {limit}")
            yield image
    except UnidentifiedImageError as error:  # its message names the object that was read, by its address
        raise ImageError(f"{name}: not a readable image: damaged, or none of {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise TooManyPixels(f"{name}: too many pixels: shrink the image ({one_line(error)})") from error
    except Exception as error:  # a decoder fails in many ways, and each of them is this file's fault
        raise ImageError(f"{name}: not a readable image: {one_line(error)}") from error


def _decoded(file: Path | BytesIO, name: str) -> np.ndarray:
    from PIL import ImageOps

    with opened(file, name) as image:
        ImageOps.exif_transpose(image, in_place=True)  # a copy would not tell its format
        return composited(eight_bits(image).convert("RGB"))


def _image_rgb(image: PILImage, name: str) -> np.ndarray:
    try:
        pixels = composited(image)
    except Exception as error:  # opened lazily by the caller: its file may be truncated
        raise ImageError(f"{name}: not a readable image: {one_line(error)}") from error
    return _not_empty(pixels)


def composited(image: PILImage) -> np.ndarray:
    """`convert_to_rgb`: onto white where the image is transparent, by an alpha channel or a transparent color."""
    from PIL import Image

    image = eight_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.array(image.convert("RGB"))


def _array_rgb(array: np.ndarray) -> np.ndarray:
    array = _checked_array(array)
    if array.shape[-1] == 1:
        return np.repeat(array, 3, axis=-1)
    if array.shape[-1] == 4:
        alpha = array[..., 3:] / 255
        return np.round(alpha * array[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return array


def _checked_array(array: np.ndarray) -> np.ndarray:
    """[H, W, 1], [H, W, 3] or [H, W, 4]."""
    if array.dtype != np.uint8:
        raise UserError(f"image array must be uint8 (0 to 255), got {array.dtype}")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise UserError(f"image array must be [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], got {list(array.shape)}")
    return _not_empty(array)


def _not_empty(pixels: np.ndarray) -> np.ndarray:
    if pixels.size == 0:
        raise UserError(f"the image is empty: {pixels.shape[1]} x {pixels.shape[0]} pixels")
    return pixels


def preprocess(
    source: ImageSource | Sequence[ImageSource], settings: ImagePreprocessor, layout: Layout, name: str = "the image"
) -> np.ndarray:
    """Load one picture, bring it to the layout, cut it, rescale and normalise it.

    Args:
        source: one picture, or the frames of a video, as many as the layout has; of patches over several frames the
            last one is repeated where some are missing.
        name: what messages call one that is no file.

    Returns:
        float32, of the shape of the layout's `pixel_values` if the settings are those that it was made with.
    """
    frames: list[ImageSource] = [*source] if isinstance(source, list | tuple) else [source]  # type: ignore[list-item]
    if isinstance(kind := settings.kind, Patches):
        pictures = np.stack([_resized(load_rgb(frame, name), settings, layout) for frame in frames])
        made = _patches(_normal(pictures, settings), kind)
    else:
        made = np.concatenate([_normal(_tiles(load_rgb(frame, name), settings, layout), settings) for frame in frames])
    return made


def _steps(height: int, width: int, settings: ImagePreprocessor, layout: Layout) -> list[Size]:
    """Sizes that a picture is resized to: by the model's rule, if it leads to the layout."""
    kind, size = settings.kind, (layout.height, layout.width)
    if kind.target(height, width) == size:
        return kind.steps(height, width)
    return [fitted(height, width, size) if isinstance(kind, AnyRes) else size]


def _tiles(pixels: np.ndarray, settings: ImagePreprocessor, layout: Layout) -> np.ndarray:
    """What is cut from the picture, uint8 [tiles, height, width, 3]."""
    kind = settings.kind
    picture = _resized(pixels, settings, layout)
    if isinstance(kind, AnyRes):
        canvas = _padded(picture, kind.canvas(layout.height, layout.width))
        return np.stack([_resize(pixels, kind.tile, settings.resample), *_cut(canvas, kind.tile)])
    if isinstance(kind, Grid | Split) and picture.shape[:2] != kind.tile:
        whole = _resize(pixels if isinstance(kind, Grid) else picture, kind.tile, settings.resample)
        return np.stack([*_cut(picture, kind.tile), whole])
    return picture[None]


def _cut(pixels: np.ndarray, tile: Size) -> np.ndarray:
    """Row by row, [tiles, height, width, 3]."""
    rows, columns = (side // edge for side, edge in zip(pixels.shape, tile, strict=False))
    return pixels.reshape(rows, tile[0], columns, tile[1], 3).swapaxes(1, 2).reshape(-1, *tile, 3)


def _patches(frames: np.ndarray, kind: Patches) -> np.ndarray:
    """Flat patches of [frames, 3, height, width], those that are merged one after another: [patches, values]."""
    missing = -len(frames) % kind.temporal
    frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    rows, columns = (side // (kind.patch * kind.merge) for side in frames.shape[2:])
    cut = frames.reshape(-1, kind.temporal, 3, rows, kind.merge, kind.patch, columns, kind.merge, kind.patch)
    time_row_column, merged, inside = (0, 3, 6), (4, 7), (2, 1, 5, 8)
    values = 3 * kind.temporal * kind.patch**2
    return cut.transpose(*time_row_column, *merged, *inside).reshape(-1, values)


def _normal(pixels: np.ndarray, settings: ImagePreprocessor) -> np.ndarray:
    """uint8 [n, height, width, 3] -> float32 [n, 3, height, width]."""
    levels = np.multiply(pixels, settings.rescale, dtype=np.float64).astype(np.float32)
    levels -= np.array(settings.mean, np.float32)
    levels /= np.array(settings.std, np.float32)
    return np.ascontiguousarray(levels.transpose(0, 3, 1, 2))


def _resized(pixels: np.ndarray, settings: ImagePreprocessor, layout: Layout) -> np.ndarray:
    """In the layout's size: by the model's rule; else padded, if the family pads, or its aspect ratio is not kept."""
    kind, size = settings.kind, (layout.height, layout.width)
    height, width = pixels.shape[:2]
    for step in _steps(height, width, settings, layout):
        pixels = _resize(pixels, step, settings.resample)
    if isinstance(kind, Plain) and kind.crop and kind.target(height, width) == size:
        return _crop(pixels, *size)
    return _padded(pixels, size)


def _resize(pixels: np.ndarray, size: Size, resample: int) -> np.ndarray:
    from PIL import Image

    (height, width), limit = pixels.shape[:2], Image.MAX_IMAGE_PIXELS
    if limit is not None and prod(size) > limit:
        raise ImageError(
            f"image of {width} x {height} pixels is too narrow: it would be resized to {size[1]} x {size[0]}"
        )
    return np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling(resample)))


def _crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Centre crop; an image smaller than the crop is centred on black first, odd remainders going to the top left."""
    missing = [max(0, wanted - had) for wanted, had in zip((height, width), pixels.shape, strict=False)]
    before = [ceil(m / 2) for m in missing]
    pixels = np.pad(pixels, [(b, m - b) for b, m in zip(before, missing, strict=True)] + [(0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _padded(pixels: np.ndarray, size: Size) -> np.ndarray:
    """Black around it, odd remainders at the bottom and on the right."""
    missing = [wanted - had for wanted, had in zip(size, pixels.shape, strict=False)]
    return np.pad(pixels, [(m // 2, m - m // 2) for m in missing] + [(0, 0)])
