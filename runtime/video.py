"""Videos: frames of a folder, of an animated picture or of a list, and what they are in a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from engines.errors import UserError
from engines.layout import Layout, VideoStyle
from runtime.preprocess import checked, composited, opened
from runtime.sampling import check_number

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from runtime.preprocess import ImageSource

FPS = 24.0  # where nothing tells: so does Hugging Face
MOST = 768  # frames that are taken
# Families with a way of their own to see a video, and what of it is missing here; others see its frames as images.
MISSING = {
    "internvl": "numbers its frames, each in a single tile",
    "llava_onevision": "pools the tokens of its frames",
    "smolvlm": "shows its frames in single tiles, each with its time, behind an introduction",
}


@dataclass(frozen=True)
class Video:
    """A video, in a request's list of images.

    Attributes:
        source: a folder of images, whose names are in the order of time, numbers in them by value; an animated GIF,
            WebP or PNG file, or its bytes; or images, as a request takes them.
        frames: that are taken at most, spread evenly (in pairs, where a model looks at pairs); None: all.
        fps: frames a second of the source; None: as a file's first frame says, else 24.
    """

    source: str | Path | bytes | Sequence[ImageSource]
    frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.frames is not None:
            check_number("frames", self.frames, 1)
        if self.fps is not None:
            check_number("fps", self.fps, 1e-3, 1e3, whole=False)


@dataclass(frozen=True)
class Clip:
    """A video of a request: which of its frames are looked at.

    Attributes:
        name: for messages.
        source: images, one a frame, or the animated file that has them all.
        total: frames of the source.
        fps: of the source.
        taken: indices of the frames that are taken, ascending.
        layout: what its frames are brought to; what is looked at together is one picture of it.
        together: frames that are looked at together.
        style: how it is written into a prompt; None: its frames are images.
    """

    name: str
    source: Sequence[ImageSource] | Path | bytes
    total: int
    fps: float
    taken: list[int] = field(default_factory=list)
    layout: Layout | None = None
    style: VideoStyle | None = None

    @property
    def together(self) -> int:
        return self.style.frames if self.style else 1

    @property
    def parts(self) -> list[Layout]:
        """Of each picture."""
        assert self.layout
        return [self.layout] * -(-len(self.taken) // self.together)

    @property
    def text(self) -> str:
        """What takes the placeholder's place."""
        assert self.style and self.layout
        return self.style.text(self.layout.tokens, [index / self.fps for index in self.taken])

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def grid(self) -> list[int]:
        """Patches, [time, height, width]."""
        assert self.layout
        return [len(self.parts), *self.layout.grid[1:]]

    @property
    def seconds(self) -> float:
        """That a picture of it shows."""
        return self.together / (len(self.taken) / self.total * self.fps)

    def sampled(self, most: int | None, style: VideoStyle | None) -> Clip:
        """With the frames that are to be taken, as Hugging Face samples so many for the family."""
        most = self.total if most is None else min(most, self.total)
        pair, ends = (style.frames, style.ends) if style else (1, False)
        count = most if ends or most == self.total else round(most / pair) * pair or most
        if count > MOST:
            raise UserError(f"{self.name} has {count} frames, more than {MOST}: take fewer of them with  --frames N")
        even = [i * self.total // count for i in range(count)]
        taken = np.linspace(0, self.total - 1, count).round().astype(int).tolist() if ends else even
        return replace(self, taken=taken, style=style)

    def frames(self) -> Iterator[ImageSource]:
        """Those that are taken, one after another; of a file each is decoded when it is asked for."""
        if not isinstance(self.source, Path | bytes):
            yield from (self.source[index] for index in self.taken)
            return
        with animation(self.source, self.name) as picture:
            for index in self.taken:
                picture.seek(index)
                yield composited(picture)

    def pictures(self) -> Iterator[list[ImageSource]]:
        """The frames of each picture."""
        held: list[ImageSource] = []
        for frame in self.frames():
            held.append(frame)
            if len(held) == self.together:
                yield held
                held = []
        if held:
            yield held

    @property
    def first(self) -> ImageSource:
        """What tells the size of its frames."""
        return self.source if isinstance(self.source, Path | bytes) else self.source[0]


Shown: TypeAlias = Layout | Clip  # an image of a request, or a video


def parts(shown: Sequence[Shown]) -> list[Layout]:
    """Layouts of all pictures: of each image, and of what is looked at together of each video."""
    return [part for each in shown for part in (each.parts if isinstance(each, Clip) else [each])]


def flat(shown: Sequence[Shown]) -> list[Shown]:
    """As a prompt has it: a video whose frames are images is as many images."""
    return [part for each in shown for part in ([each] if isinstance(each, Layout) or each.style else each.parts)]


def read(video: Video) -> Clip:
    """A video, all of whose frames would be taken. Of a file its headers are read.

    Raises:
        UserError: there is none, or nothing that is one.
    """
    source = video.source
    if isinstance(source, str | Path) and source != "" and Path(source).is_dir():
        names = [path for path in Path(source).iterdir() if path.is_file() and not path.name.startswith(".")]
        if not names:
            raise UserError(f"{source}: a folder without images: a video needs one a frame")
        names.sort(key=by_number)
        return Clip(f"video {source}", names, len(names), video.fps or FPS)
    if isinstance(source, str | Path | bytes):
        file = source if isinstance(source, bytes) else checked(source)
        name = "the video" if isinstance(source, bytes) else str(source)
        total, shown = _headers(file, name)
        return Clip(name, file, total, video.fps or (1000 / shown if shown > 0 else FPS))
    if not isinstance(source, Sequence) or not source:
        raise UserError("a video must be a folder of images, an animated picture or a list with an image a frame")
    return Clip("the video", source, len(source), video.fps or FPS)


def _headers(file: Path | bytes, name: str) -> tuple[int, float]:
    """Frames of an animated picture, and how many milliseconds the first one is shown, 0 if nothing tells."""
    with animation(file, name) as picture:
        if picture.format == "WEBP":  # which tells it of a decoded frame only
            picture.load()
        return getattr(picture, "n_frames", 1), float(picture.info.get("duration") or 0)


def by_number(path: Path) -> list[tuple[int, str]]:
    """A key that puts 2.png before 10.png."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", path.name)]


@contextmanager
def animation(file: Path | bytes, name: str) -> Iterator[PILImage]:
    """An animated picture's file.

    Raises:
        UserError: it is missing or no picture; or a film, which Pillow does not read.
    """
    try:
        opened_file = BytesIO(file) if isinstance(file, bytes) else checked(file)
        with opened(opened_file, name) as picture:
            yield picture
    except UserError as error:
        films = (".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".mpg", ".mpeg")
        if isinstance(file, Path) and file.suffix.lower() in films and file.is_file():
            raise UserError(
                f"{name}: films are not read here: make a folder of its frames with  "
                f"ffmpeg -i {name} -vf fps=2 frames/%05d.png  and give that, with  --fps 2"
            ) from error
        raise
