"""What tests of the guard share: a random model with samples, short answers, and a recipe that it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from calibration import guard as guards
from calibration import samples
from tests.export import tiny

ANSWERS = ["red circle blue teal no yes 0 9", "3 1 5", "", "yes", "what is the color of the shape ?", "7"]
HARD = """
[budget]
keep = 0.2
[protect]
sinks = 0
recent = 1
[window]
least = 2
most = 2
recent = 0.0
"""


@pytest.fixture(scope="module", autouse=True)
def short_answers() -> Iterator[None]:
    """A random model never ends its answer, and may repeat itself by chance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "MOST", 7)
        yield


@pytest.fixture(scope="module", name="folder")
def guarded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with grouped-query heads; samples with answers of many lengths, without, and without an image."""
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint", count=8)
    lines = [
        {"images": [f"{i}.png"], "prompt": "what color is the shape ?", "answer": ANSWERS[i % 6], "task": "ab"[i % 2]}
        for i in range(8)
    ]
    lines.append({"images": [], "prompt": "how many digits ?", "answer": "3 1 5"})
    (folder / "samples" / samples.FILE).write_text("\n".join(map(json.dumps, lines)))
    return folder
