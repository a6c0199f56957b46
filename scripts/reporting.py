"""What the measuring scripts share: options, a Markdown table, a file written whole or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

from engines.bundle import check_outside
from engines.errors import Parser, UserError, positive

QUESTION = "is there a red circle in the image ?"


def choice(text: str, known: Sequence[str], what: str) -> list[str]:
    """The names in a comma-separated list, each checked."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no {what} {unknown[0]!r}: choose from {','.join(known)}")
    if not names:
        raise UserError(f"no {what} given: choose from {','.join(known)}")
    return list(dict.fromkeys(names))


def answering(
    doc: str | None, argv: Sequence[str] | None, *, tokens: int, times: int, levels: str = "all"
) -> argparse.Namespace:
    """The options of what a bundle is asked at each of its levels.

    Args:
        tokens, times: of an answer, and how often it is given, by default.
        levels: which are taken by default, as help says it.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--levels", metavar="A,B", help=f"default: {levels}")
    parser.add_argument(
        "--tokens", type=positive, default=tokens, metavar="N", help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--times", type=positive, default=times, metavar="N", help="measured (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    arguments = parser.parse_args(argv)
    check_folder(arguments.json, "--json")
    return arguments


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the first row is its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return lines


def binomial_error(share: float, count: int) -> float:
    """One standard error of a share of `count` questions, taken as independent though some are about one image."""
    return sqrt(share * (1 - share) / count)


def check_folder(file: Path | None, option: str) -> None:
    """Refuse, before anything is measured, a file whose folder does not exist, or is a bundle's."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise UserError(f"{file.parent} is not a folder: make it, or give another {option}")
    check_outside(file)


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
