"""Imported first by every script here: a missing package is one line that says what to type, not a stack trace."""

import os
import sys
from pathlib import Path
from types import TracebackType

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where this project itself is not installed

from engines.errors import MISSING_PACKAGE


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {error}: {MISSING_PACKAGE}", file=sys.stderr, flush=True)
    os._exit(2)  # a hook cannot choose the exit code otherwise


sys.excepthook = _tell
