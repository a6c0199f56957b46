"""What a page is made of, and the template that writes it: everything that is not ours to trust is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Plot:
    """A drawing with its legend in words.

    Attributes:
        svg: from `plots.svg`; the only text that the template does not escape.
        caption: one sentence: what is shown, by which unit.
    """

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Picture:
    """An input image with something drawn over it; `uri` holds all of it."""

    title: str
    uri: str


@dataclass(frozen=True)
class Gallery:
    """Pictures of one image side by side."""

    title: str
    caption: str
    pictures: list[Picture]


@dataclass(frozen=True)
class Table:
    caption: str
    rows: Sequence[Sequence[str]]  # the first one is the header


@dataclass(frozen=True)
class Recipe:
    """A recipe's file, line by line, and whether the line differs from the default."""

    title: str
    lines: list[tuple[str, bool]]


@dataclass(frozen=True)
class Section:
    """
    Attributes:
        missing: commands that would measure it, where nothing did: the page's end lists them.
    """

    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    galleries: list[Gallery] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    missing: str = ""

    @property
    def id(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())

    def __bool__(self) -> bool:
        return any((self.tables, self.plots, self.galleries, self.recipes))


def render(title: str, facts: Sequence[str], warnings: Sequence[str], sections: Sequence[Section]) -> str:
    """The page; a section with nothing in it is left out."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    shown, missing = [s for s in sections if s], [s for s in sections if s.missing]
    return page.render(title=title, facts=facts, warnings=warnings, sections=shown, missing=missing)
