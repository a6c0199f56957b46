"""What the commands' options have in common."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Progress

Commands: TypeAlias = "argparse._SubParsersAction"


def number(fits: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """The `type` of an option that takes a number."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be a number {what}, got {text!r}")
        return value

    return number


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The model that is measured, and what it is measured on: they stand first in every such command's help."""
    parser.add_argument("checkpoint", type=Path, help="folder as save_pretrained writes it")
    parser.add_argument(
        "--samples",
        help="folder with samples.jsonl, easy-vqa or, text alone, pydoc (default: CHECKPOINT/samples; "
        "pydoc for a model of text alone that has none)",
    )


share = number(lambda share: 0 <= share <= 1, "from 0 to 1")
part = number(lambda share: 0 < share < 1, "above 0 and below 1")
nats = number(lambda nats: 0 < nats < 1e6, "above 0")
size = number(lambda size: 0 <= size < 2**20, "of GiB from 0")


def numbers(text: str) -> dict[str, float | int]:
    """NAME=NUMBER,... as the `type` of an option."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {name.strip(): float(number) if set(".e") & set(number) else int(number) for name, _, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=NUMBER,..., got {text!r}") from None


def as_json(told: Any, indent: int | None = None) -> str:
    """Plain data as JSON, which knows no NaN and no infinity: null stands for them."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(told), indent=indent, allow_nan=False)


def progress_bar() -> Progress:
    """A bar on a terminal; elsewhere nothing, so that a mistake is one line."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
