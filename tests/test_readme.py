"""README's table of model families: all that there are, and what is said of them is in words that it explains.

And links, of README and of all pages that it leads to: what they name is there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from export.families import FAMILIES
from tests.export import (
    test_answers,
    test_every_family,
    test_mrope_end_to_end,
    test_pictures_end_to_end,
    test_text_only,
    zoo,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "BENCHMARKS.md", ROOT / "scripts/jetson.md", *DOCS]
COLUMNS = ["family", "models", "vision", "prefill", "decode", "pruning", "plan", "int4 weights"]
TESTS = {"eager", "ort", "answer"}
WORDS = [TESTS | {"no images"}, TESTS, TESTS, TESTS | {"demo", "no images"}, {"all"}, {"answer", "demo"}]


def table() -> list[list[str]]:
    section = README.read_text().split("## Model families\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]


def test_every_family_has_its_row() -> None:
    columns, _, *rows = table()
    assert columns == COLUMNS
    assert [row[0] for row in rows] == [f"`{name}`" for name in sorted(FAMILIES)]


def test_cells_are_in_words_that_are_explained() -> None:
    _, _, *rows = table()
    for row in rows:
        for cell, words in zip(row[2:], WORDS, strict=True):
            assert set(filter(None, cell.split(", "))) <= words, row
        assert ("no images" in row) == (FAMILIES[row[0].strip("`")].encoder is None)


def test_families_that_answer_are_those_that_are_asked() -> None:
    _, _, *rows = table()
    pictures = {*test_answers.SIZES, *test_mrope_end_to_end.SIZES, test_pictures_end_to_end.NAME}
    asked = {*map(zoo.model_type, pictures), *test_text_only.CONFIGS}
    assert {row[0].strip("`") for row in rows if "answer" in row[4]} == asked
    more = {*map(zoo.model_type, test_every_family.SIZES), *test_text_only.CONFIGS}
    assert {row[0].strip("`") for row in rows if row[6] == "all" and "answer" in row[7]} == more
    for row in rows:  # one answer goes through all of them
        assert len({"answer" in cell for cell in row[2:6] if cell != "no images"}) == 1, row


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    return {
        re.sub(r"[^\w\- ]", "", line).replace(" ", "-").lower() for line in re.findall(r"^#+ (.*)", prose(page), re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_leads_to_every_page() -> None:
    assert {f"docs/{page.name}" for page in DOCS} <= set(re.findall(r"\]\(([^)\s]+)\)", README.read_text()))
