"""What the measuring scripts share: options, a Markdown table, a file written whole or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path

from engines.bundle import check_outside
from engines.errors import Parser, UserError, positive, without_names

PLOT = ", its plot beside it"
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
    doc: str | None, argv: Sequence[str] | None, *, tokens: int, times: int, levels: str = "all", kept: str = PLOT
) -> argparse.Namespace:
    """The options of what a bundle is asked at each of its levels.

    Args:
        tokens, times: of an answer, and how often it is given, by default.
        levels: which are taken by default, as help says it.
        kept: see `json_option`.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--levels", metavar="A,B", help=f"default: {levels}")
    parser.add_argument(
        "--tokens", type=positive, default=tokens, metavar="N", help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--times", type=positive, default=times, metavar="N", help="measured (default: %(default)s)")
    json_option(parser, kept)
    return parser.parse_args(argv)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the first row is its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return lines


def binomial_error(share: float, count: int) -> float:
    """One standard error of a share of `count` questions, taken as independent though some are about one image."""
    return sqrt(share * (1 - share) / count)


def json_option(parser: argparse.ArgumentParser, kept: str = PLOT, required: bool = False) -> None:
    """Add `--json FILE`, of which help says that all is kept there, and `kept`."""
    told = f"keep all that was measured in FILE{kept}"
    parser.add_argument("--json", type=new_file("--json"), required=required, metavar="FILE", help=told)


def new_file(option: str) -> Callable[[str], Path]:
    """The `type` of an option that names a file: it refuses, before anything is measured, a file whose folder does not
    exist, or is a bundle's.
    """

    def checked(text: str) -> Path:
        file = Path(text)
        if not file.parent.is_dir():
            raise UserError(f"{file.parent} is not a folder: make it, or give another {option}")
        check_outside(file)
        return file

    return checked


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {without_names(error)}") from error
