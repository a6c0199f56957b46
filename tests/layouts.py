"""Layouts for tests: of plain pictures."""

from __future__ import annotations

from typing import Any

from engines.layout import Layout
from engines.preprocessor import ImagePreprocessor


def plain(height: int, width: int, tokens: int = 1, text: str = "", **more: Any) -> Layout:
    """Of one picture as it is: pixel_values are [1, 3, height, width], the text so many image tokens."""
    shape = [1, 3, height, width]
    return Layout(f"{height}x{width}", height, width, shape, text or "<image>" * tokens, tokens, **more)


def made_by(settings: ImagePreprocessor) -> Layout:
    """What a preprocessor makes of every picture."""
    return plain(*settings.kind.target(64, 64))
