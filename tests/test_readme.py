"""README's table of model families: all that there are, and what is said of them is in words that it explains."""

from __future__ import annotations

from pathlib import Path

from export.families import FAMILIES
from tests.export import test_answers, test_mrope_end_to_end, test_pictures_end_to_end, test_text_only, zoo

README = Path(__file__).parents[1] / "README.md"
COLUMNS = ["family", "models", "vision", "prefill", "decode", "pruning", "plan", "int4 weights"]
TESTS = {"eager", "ort", "answer"}
WORDS = [TESTS | {"no images"}, TESTS, TESTS, TESTS | {"demo", "no images"}, {"vision", "all"}, {"demo"}]


def table() -> list[list[str]]:
    section = README.read_text().split("### Model families\n")[1].split("\n### ")[0]
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
    for row in rows:  # one answer goes through all of them
        assert len({"answer" in cell for cell in row[2:6] if cell != "no images"}) == 1, row
