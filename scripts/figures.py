"""What a benchmark measured: its tables, which are those of its JSON file and of BENCHMARKS.md, and its plot."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engines.errors import UserError, one_line
from plots import Panel, draw
from reporting import markdown, write

PACKAGES = ("numpy", "onnxruntime")
LAST_LEVEL = 32 << 20  # bytes of a processor's largest cache, where the system does not tell


def processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def last_level() -> int:
    """Bytes of the processor's largest cache."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes), default=LAST_LEVEL)


def instructions() -> list[str]:
    """The widest vector instructions that Linux tells of; they decide more than a processor's name."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [
        name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm") if name in words
    ]


def machine() -> dict[str, Any]:
    known = {"processor": processor(), "cores": os.cpu_count(), "instructions": instructions()}
    return known | {"last_level_cache": last_level(), "python": platform.python_version()}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Figures:
    """What one run of a benchmark found.

    Attributes:
        command: what to type to measure it again.
        tables: title -> rows of cells, the first of them the header.
        notes: what columns mean; what was not measured, and why.
        values: all that was measured, as numbers.
        panels: that are drawn; none: there is no plot.
        versions: package -> version, the peers' too.
    """

    command: str
    tables: dict[str, list[list[str]]]
    notes: list[str]
    values: dict[str, Any]
    panels: list[Panel] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: versions(PACKAGES))
    machine: dict[str, Any] = field(default_factory=machine)

    def text(self) -> str:
        """Markdown: where it ran, the tables, the notes."""
        parts = [self.where()]
        for title, rows in self.tables.items():
            parts += [f"{title}:"] * bool(title) + ["\n".join(markdown(rows))]
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def where(self) -> str:
        """Processor and versions, one line."""
        cores = (
            f"{self.machine['processor']} ({', '.join(self.machine['instructions'])}), {self.machine['cores']} cores"
        )
        return ", ".join(
            [cores, f"Python {self.machine['python']}", *(" ".join(each) for each in self.versions.items())]
        )

    def report(self, file: Path | None) -> None:
        """Print it; and where a file is given, keep it, and the plot beside it."""
        print(self.text(), end="")
        if file is not None:
            write(file, json.dumps(asdict(self), indent=1) + "\n")
            self.draw(file.with_suffix(".svg"))

    def draw(self, file: Path) -> None:
        """Draw the panels, if there are any, where matplotlib is installed."""
        if not self.panels:
            return
        try:
            drawn = draw(self.panels)
        except ImportError as error:
            print(f"without a plot: {error}: pip install matplotlib", file=sys.stderr)
        else:
            write(file, drawn)


def read(file: Path) -> Figures:
    """The figures in a file of `report`.

    Raises:
        UserError: they are not.
    """
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return Figures(**known | {"panels": [Panel(**panel) for panel in known["panels"]]})
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{file} has no figures of a benchmark: {one_line(error)}: measure them again") from error


def typed(script: str, argv: Sequence[str] | None) -> str:
    """The command line, as the user has typed it; a JSON file does not change what is measured."""
    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--json=")]
    if "--json" in words:
        del words[(at := words.index("--json")) : at + 2]
    return shlex.join(["python", f"scripts/{script}", *words])
