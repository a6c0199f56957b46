"""What was measured, kept in files: a run that was killed finds it again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from calibration.samples import Sample
from engines.bundle import sha256


def digest(*known: Any) -> str:
    """A name for what plain data describes."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def digest_of(samples: Sequence[Sample]) -> str:
    """A name for samples, by what is in them and not by where they lie."""
    return digest([([sha256(path) for path in s.images], s.prompt, s.answer, s.task) for s in samples])


def write(path: Path, text: str) -> None:
    """The whole text or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class Memory:
    """Results in a folder, a JSON file each, named by all that a result depends on.

    Attributes:
        known: what all of them depend on: the checkpoint, the samples.
        found: how many were there already.
    """

    def __init__(self, folder: Path, *known: Any):
        self.folder, self.known, self.found = folder, known, 0

    def __call__(self, measure: Callable[[], Any], *known: Any) -> Any:
        """The plain data that `measure` gives; measured only if it is not in the folder.

        Args:
            known: what it depends on besides, plain data.
        """
        path = self.folder / f"{digest(self.known, known)}.json"
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or damaged
            told = measure()
            write(path, json.dumps(told))
        else:
            self.found += 1
        return told
