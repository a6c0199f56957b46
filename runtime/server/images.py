"""Images of requests: read from their URLs, and their declared sizes checked before any pixel is decoded."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO

from engines.errors import UserError
from engines.preprocessor import ImagePreprocessor, Plain
from runtime.preprocess import TooManyPixels, opened, upright_size
from runtime.server.errors import Refused

DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+=-]+)*?;base64,")


@dataclass(frozen=True)
class File:
    """What a client sent as an image, or was fetched for it.

    Attributes:
        origin: where it is from, as messages about it tell.
    """

    data: bytes = field(repr=False)  # asyncio shows what a task returns, and would copy it twice
    origin: str = ""


@dataclass(frozen=True)
class Image:
    """The bytes of an image file, and its size."""

    data: bytes = field(repr=False)
    width: int
    height: int


def at(url: str, fetched: Mapping[str, File]) -> File:
    """What a data URL holds, or was fetched from a remote one."""
    if url in fetched:
        return fetched[url]
    if (head := DATA_URL.match(url)) is None:
        far = url[:8].lower().startswith(("http:", "https:"))
        what = "images are not fetched from this host (serve --image-host)" if far else "no data URL"
        message = f"image_url {url[:40]!r}: {what}: send the image itself, as  data:image/png;base64,..."
        raise Refused(400, message, "invalid_image_url", "image_url")
    try:
        return File(base64.b64decode(url[head.end() :], validate=True))
    except ValueError as error:
        raise Refused(400, f"image_url: not base64: {error}", "invalid_image_url", "image_url") from error


def check(file: File, pixels: int, number: int, upright: bool) -> Image:
    """Read an image's header, and refuse what declares more than `pixels`; size as it is stored unless `upright`."""
    name = f"image {number}{file.origin}"
    try:
        with opened(BytesIO(file.data), name) as image:
            height, width = upright_size(image) if upright else (image.height, image.width)
    except TooManyPixels as error:  # of Pillow, whose limit is higher
        message = f"{name} has more than {pixels / 10**6:g} million pixels: shrink it"
        raise Refused(400, message, "image_too_large") from error
    except UserError as error:
        raise Refused(400, str(error), "invalid_image") from error
    if width * height > pixels:
        message = f"{name} has {width} x {height} pixels, more than {pixels / 10**6:g} million: shrink it"
        raise Refused(400, message, "image_too_large")
    return Image(file.data, width, height)


def region(width: int, height: int, settings: ImagePreprocessor) -> tuple[float, float, float, float]:
    """What the model sees of an image: left, top, width and height in shares of the image's; padding lies outside."""
    if not isinstance(kind := settings.kind, Plain):
        return 0, 0, 1, 1
    new_height, new_width = (kind.steps(height, width) or [(height, width)])[-1]
    crop = kind.crop or {"width": new_width, "height": new_height}
    shares = crop["width"] / new_width, crop["height"] / new_height
    return (1 - shares[0]) / 2, (1 - shares[1]) / 2, *shares
