"""Imported first by every script here: a package that is missing, or too old for what is imported from it, is one line
that says what to type, not a stack trace.
"""

import os
import sys
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before a copy that is installed, and may be an old one
if Path(getattr(sys.modules["__main__"], "__file__", "")).parent == Path(__file__).parent:  # not where tests import it
    import engines.interruption  # noqa: F401

from engines import releases
from engines.errors import MISSING_PACKAGE, UserError, one_line


def _too_old() -> str:
    try:
        releases.check_installed()
    except UserError as error:
        return str(error)
    return ""


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    missing = MISSING_PACKAGE if issubclass(kind, ModuleNotFoundError) else ""
    advice = issubclass(kind, ImportError) and (_too_old() or missing)
    if not advice:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {one_line(error)}: {advice}", file=sys.stderr, flush=True)
    os._exit(2)  # a hook cannot choose the exit code otherwise


sys.excepthook = _tell
