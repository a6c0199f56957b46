from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UserError
from engines.preprocessor import FILE, ImagePreprocessor

CLIP = ImagePreprocessor(
    {"height": 64, "width": 60}, 3, {"height": 8, "width": 9}, 1 / 255, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
)


@pytest.mark.parametrize("changes", [{}, {"resize": {"shortest_edge": 32}}, {"resize": None, "crop": None}])
def test_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = dataclasses.replace(CLIP, **changes)
    settings.write(tmp_path)
    assert ImagePreprocessor.read(tmp_path) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resize": {"longest_edge": 3}}, "resize must have height and width, or shortest_edge"),
        ({"resize": {"height": 3}}, "resize must have"),
        ({"resize": {"height": 0, "width": 3}}, "resize must be positive"),
        ({"resize": {"height": 2.5, "width": 3}}, "resize.height: expected int"),
        ({"crop": {"shortest_edge": 3}}, "crop must have height and width"),
        ({"crop": {"height": -1, "width": 3}}, "crop must be positive"),
        ({"resample": 6}, "resample must be one of"),
        ({"resample": "bicubic"}, "resample: expected int"),
        ({"rescale": None}, "rescale: expected float"),
        ({"mean": [0.5]}, "mean and std must have 3 numbers"),
        ({"std": [0.5, 0.5, 0.0]}, "std must be positive"),
        ({"do_flip": True}, "unknown key 'do_flip'"),
    ],
)
def test_mistake_names_the_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(dataclasses.asdict(CLIP) | changes))
    with pytest.raises(UserError, match=FILE.replace(".", r"\.") + ".*" + message):
        ImagePreprocessor.read(tmp_path)


def test_missing_key_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        ImagePreprocessor.read(tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(UserError, match="missing key 'resize'"):
        ImagePreprocessor.read(tmp_path)
