"""Pictures with something drawn over their patches: numbers of visual tokens -> pixels -> a data URI."""

from __future__ import annotations

import base64
import io
import math

import numpy as np
from numpy.typing import NDArray

SIDE = 224  # pixels of a drawn picture's longer side
FADED = 0.12  # what is left of a patch that was dropped
GROUND = 128  # grey that it fades into, seen on white and on black

Pixels = NDArray[np.uint8]  # [height, width, 3]


def grid(tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of the patches of an image, if its tokens are square patches in reading order."""
    rows = round(math.sqrt(tokens * height / width))
    if rows < 1 or tokens % rows:
        return None
    columns = tokens // rows
    return (rows, columns) if rows * width == columns * height else None


def spread(patches: NDArray, shape: tuple[int, int], size: tuple[int, int]) -> NDArray:
    """Of every pixel what its patch has.

    Args:
        patches: [rows * columns, ...], in reading order.
        shape: rows and columns; size: height and width.

    Returns:
        [height, width, ...].
    """
    y, x = (np.arange(pixels) * patches_ // pixels for pixels, patches_ in zip(size, shape, strict=True))
    return patches.reshape(*shape, *patches.shape[1:])[y[:, None], x]


def enlarged(picture: Pixels) -> Pixels:
    """The picture with a longer side of `SIDE` pixels; small ones by whole pixels, so that edges stay edges."""
    from PIL import Image

    height, width = picture.shape[:2]
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(picture).resize(size, way))


def heat(picture: Pixels, mass: NDArray, shape: tuple[int, int]) -> Pixels:
    """Attention over the picture in grey: from nothing, dark, to the most that a patch gets, bright.

    Args:
        mass: [rows * columns], at least 0.
    """
    from matplotlib import colormaps

    relative = mass / mass.max() if mass.any() else mass
    return tinted(picture, colormaps["inferno"](relative)[:, :3], shape)


def tinted(picture: Pixels, colors: NDArray, shape: tuple[int, int], share: float = 0.7) -> Pixels:
    """Colors of the patches, [rows * columns, 3] from 0 to 1, over the picture in grey, which keeps the rest."""
    grey = picture.mean(axis=2, keepdims=True) / 255
    mixed = share * spread(colors, shape, picture.shape[:2]) + (1 - share) * grey
    return np.round(255 * mixed).astype(np.uint8)


def faded(picture: Pixels, kept: NDArray, shape: tuple[int, int]) -> Pixels:
    """The picture where patches are kept; where they are dropped, nearly grey.

    Args:
        kept: from 0 to 1, [rows * columns].
    """
    left = FADED + (1 - FADED) * spread(kept, shape, picture.shape[:2])[..., None]
    return np.round(left * picture + (1 - left) * GROUND).astype(np.uint8)


def principal(vectors: NDArray) -> tuple[NDArray, float]:
    """Three colors for what differs most: the first three principal components of [tokens, features].

    Features count alike, each by its standard deviation; one that never changes counts nothing.

    Returns:
        Colors, [tokens, 3], each channel from 0 to 1; and the share of all variance that they show.
    """
    varied = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    deviation = varied.std(axis=0)
    changes = deviation > 1e-9 * np.abs(vectors).max(initial=0)
    colors = np.full((len(vectors), 3), 0.5)
    if not changes.any():
        return colors, 0.0
    parts, sizes, _ = np.linalg.svd(varied[:, changes] / deviation[changes], full_matrices=False)
    scores = (parts * sizes)[:, :3]
    # A component's sign is nobody's: the patch that stands out most is bright, whichever the SVD gives.
    scores *= np.sign(np.take_along_axis(scores, np.abs(scores).argmax(axis=0)[None], axis=0))
    reach = np.ptp(scores, axis=0)
    colors[:, : scores.shape[1]] = (scores - scores.min(axis=0)) / np.where(reach > 0, reach, 1)
    power = np.square(sizes)
    return colors, float(power[:3].sum() / power.sum())


def uri(picture: Pixels) -> str:
    """The picture inside an address."""
    from PIL import Image

    with io.BytesIO() as out:
        Image.fromarray(enlarged(picture)).save(out, format="webp", quality=85)
        return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()
