"""What was measured, kept in files: a run that was killed finds it again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from calibration.samples import Sample
from engines.bundle import check_outside, sha256
from engines.errors import UserError, without_names

FORMAT = 1  # of the files: to be raised where what is measured changes
T = TypeVar("T")


def digest(*known: Any) -> str:
    """A name for what plain data describes."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def digest_of(samples: Sequence[Sample]) -> str:
    """A name for samples, by what is in them and not by where they lie."""
    return digest([([sha256(path) for path in s.images], s.prompt, s.answer, s.task) for s in samples])


def write(path: Path, content: str | bytes) -> None:
    """The whole content or nothing; of two runs at once the last one's."""
    with _beside(path) as folder:
        part = Path(folder, path.name)
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)


def check_writable(path: Path, *read: Path) -> None:
    """Refuse, before anything is measured, a file that could not be written, or in a folder that is a bundle or read.

    Raises:
        UserError: why.
    """
    check_outside(path, *read)
    try:
        with _beside(path):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written: {without_names(error)}: choose another place") from error


def _beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".part.", dir=path.parent)


class Memory:
    """Results in a folder, a JSON file each, named by all that a result depends on.

    Attributes:
        known: what all of them depend on: the checkpoint, the samples.
        found: how many were there already.
    """

    def __init__(self, folder: Path, *known: Any):
        self.folder, self.known, self.found = folder, known, 0

    def __call__(self, measure: Callable[[], Any], read: Callable[[Any], T], *known: Any) -> T:
        """What `read` makes of the plain data that `measure` gives; measured only if it is not in the folder.

        Args:
            read: fails if the data are damaged, or of other code: then they are measured again.
            known: what it depends on besides, plain data.
        """
        path = self.folder / f"{digest(FORMAT, self.known, known)}.json"
        try:
            found = read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, LookupError, RecursionError, UserError):
            told = measure()
            write(path, json.dumps(told))
            return read(told)
        self.found += 1
        return found
