"""The page itself: nothing that a checkpoint brings along becomes markup, and what is not there is left out."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from calibration.report.page import Gallery, Picture, Plot, Recipe, Section, Table, render

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACw="


class Tags(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_of_a_checkpoint_stays_text() -> None:
    section = Section(
        "Title " + EVIL,
        EVIL,
        tables=[Table(EVIL, [[EVIL], [EVIL]])],
        plots=[Plot(EVIL, EVIL, "<svg></svg>")],
        galleries=[Gallery(EVIL, EVIL, [Picture(EVIL, DOT)])],
        recipes=[Recipe(EVIL, [(EVIL, True), (EVIL, False)])],
    )
    page = Tags(render(EVIL, [EVIL], [EVIL], [section, Section(EVIL, missing=EVIL)]))
    assert [attributes for tag, attributes in page.tags if tag == "img"] == [{"src": DOT, "alt": EVIL}]
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    # Title, heading, fact, warning; link, heading and text of the section; and what is in it, the picture's alt aside.
    # Title and command of what is missing.
    assert page.text.count(EVIL) == 4 + 3 + 11 + 2


def test_nothing_may_be_fetched_or_run() -> None:
    (policy,) = [a["content"] for tag, a in Tags(render("", [], [], [])).tags if a.get("http-equiv")]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@pytest.mark.parametrize("full", [False, True])
def test_a_section_with_nothing_in_it_is_left_out(full: bool) -> None:
    page = Tags(render("page", [], [], [Section("Where is it?", "words", tables=[Table("it", [["is"]])] * full)]))
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["#where-is-it-"] * full
    assert ("words" in page.text) == full


def test_what_was_not_measured_is_one_list_behind_all_that_was() -> None:
    there = [Section(title, tables=[Table("", [[""]])]) for title in ("First", "Last")]
    absent = [Section(title, missing=f"measure {title}") for title in ("this", "that")]
    page = Tags(render("page", [], [], [there[0], *absent, there[1]]))
    assert [attributes["id"] for tag, attributes in page.tags if tag == "h2"] == ["first", "last", "not-measured"]
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["#first", "#last", "#not-measured"]
    assert page.text.split("Not measured")[-1].split()[-6:] == ["this", "measure", "this", "that", "measure", "that"]
