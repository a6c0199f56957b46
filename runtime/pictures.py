"""A request's images and videos: the layout of each, and its pixels as the vision graph of that layout takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engines.bundle import Bundle, Layout, rebuild
from engines.errors import UserError
from engines.layout import choose_layout
from engines.preprocessor import FILE, ImagePreprocessor
from runtime.preprocess import decoding_bytes, measure, preprocess
from runtime.video import MISSING, Clip, Shown, Video, parts, read

if TYPE_CHECKING:
    import numpy as np

    from runtime.preprocess import ImageSource


class Pictures:
    """What an opened bundle makes of images."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._known = bundle, bundle.manifest.model.layouts
        if self._known:
            self._settings = ImagePreprocessor.read(bundle.path)

    def shown(self, images: Sequence[ImageSource | Video]) -> list[Shown]:
        """What each of them is brought to, by their headers: the layout of the size that the model's own rule says.

        Where there is none, the one nearest to that. Of videos, which of their frames are looked at.

        Raises:
            UserError: the model takes no images, or one of these is none.
        """
        known = self._known
        if images and not known:
            raise UserError(f"{self._bundle.path} is of a model that takes no images: ask it without")
        return [self._clip(each) if isinstance(each, Video) else self._layout(each) for each in images]

    def _layout(self, image: ImageSource) -> Layout:
        if len(known := self._known) == 1:
            return known[0]
        return choose_layout(*self._settings.kind.target(*measure(image)), known)

    def _clip(self, video: Video) -> Clip:
        model = self._bundle.manifest.model
        if model.video is None and (model.mrope or model.model_type in MISSING):
            how = MISSING.get(model.model_type, "has a chat template or a processor that writes none as it should")
            raise UserError(f"{model.model_type} takes no videos here: it {how}. Give some of its frames as images")
        clip = read(video).sampled(video.frames, model.video)
        return replace(clip, layout=self._layout(clip.first))

    def decoding(self, images: Sequence[ImageSource | Video], shown: Sequence[Shown]) -> int:
        """Bytes that decoding them takes at most; one picture after another."""
        most = 0
        for each, own in zip(images, shown, strict=True):
            clip, layout = (own, own.parts[0]) if isinstance(own, Clip) else (None, own)
            source: Any = clip.first if clip else each
            most = max(most, (clip.together if clip else 1) * decoding_bytes(source, self._settings, layout))
        return most

    def pixels(self, images: Sequence[ImageSource | Video], shown: Sequence[Shown]) -> list[np.ndarray]:
        """Their pixels, one array a picture.

        Raises:
            UserError: an image cannot be read, or the bundle's parts do not fit.
        """
        made: list[np.ndarray] = []
        for number, (each, own) in enumerate(zip(images, shown, strict=True), 1):
            pictures: Any = own.pictures() if isinstance(own, Clip) else [each]
            layout = own.parts[0] if isinstance(own, Clip) else own
            name = f"video {number}" if isinstance(own, Clip) else f"image {number}"
            made += [preprocess(picture, self._settings, layout, name) for picture in pictures]
        for pixels, layout in zip(made, parts(shown), strict=True):
            if [*pixels.shape] != (taken := layout.pixel_values):
                path, other = self._bundle.path, f"images of {[*pixels.shape]}, the graph takes {taken}"
                raise UserError(f"{path / FILE} makes {other}: {rebuild(path)}")
        return made
