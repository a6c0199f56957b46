"""A request's images: which layout each has, and its pixels as the vision graph of that layout takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engines.bundle import REBUILD, Bundle, Layout
from engines.errors import UserError
from engines.layout import choose_layout
from engines.preprocessor import FILE, ImagePreprocessor
from runtime.preprocess import decoding_bytes, measure, preprocess

if TYPE_CHECKING:
    import numpy as np

    from runtime.preprocess import ImageSource


class Pictures:
    """What an opened bundle makes of images."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._known = bundle, bundle.manifest.model.layouts
        if self._known:
            self._settings = ImagePreprocessor.read(bundle.path)

    def layouts(self, images: Sequence[ImageSource]) -> list[Layout]:
        """What each of them is brought to, by their headers: the layout of the size that the model's own rule says.

        Where there is none, the one nearest to that.

        Raises:
            UserError: the model takes no images, or one of these is none.
        """
        known = self._known
        if images and not known:
            raise UserError(f"{self._bundle.path} is of a model that takes no images: ask it without")
        if len(known) == 1:
            return [known[0] for _ in images]
        return [choose_layout(*self._settings.kind.target(*measure(image)), known) for image in images]

    def decoding(self, images: Sequence[ImageSource], layouts: Sequence[Layout]) -> int:
        """Bytes that decoding them takes at most; one after another."""
        pairs = zip(images, layouts, strict=True)
        return max((decoding_bytes(image, self._settings, layout) for image, layout in pairs), default=0)

    def pixels(self, images: Sequence[ImageSource], layouts: Sequence[Layout]) -> list[np.ndarray]:
        """Their pixels.

        Raises:
            UserError: an image cannot be read, or the bundle's parts do not fit.
        """
        made = [preprocess(image, self._settings, layout) for image, layout in zip(images, layouts, strict=True)]
        for pixels, layout in zip(made, layouts, strict=True):
            if [*pixels.shape] != (taken := layout.pixel_values):
                path = self._bundle.file(FILE)
                raise UserError(f"{path} makes images of {[*pixels.shape]}, the graph takes {taken}: {REBUILD}")
        return made
