"""scripts/needles.py: how long a haystack is, and where its needles lie."""

from __future__ import annotations

from typing import Any

import pytest

import needles
from engines.errors import UserError

TEXT = "".join(f"Line {i} of it. It goes on.\n" for i in range(2000))
PLACE = ("lines", TEXT, 0, 1)


class Letters:
    """A tokenizer with a token a letter."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, said: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        return f"<user>{said[0]['content']}<answer>"


def test_a_prompt_is_as_long_as_was_asked_for() -> None:
    hay = needles.haystack(Letters(), PLACE, 3000, 4, seed=0)
    assert len(hay.ids) + max(len(needle.tail) for needle in hay.needles) == 3000
    assert len(hay.needles) == 4
    assert hay.title == "lines 1/1"


def test_every_needle_is_asked_for_and_lies_at_its_depth_behind_a_sentence() -> None:
    hay, tokens = needles.haystack(Letters(), PLACE, 3000, 4, seed=1), Letters()
    text = tokens.decode(hay.ids)
    begins = text.index("Line")
    assert text.startswith(f"<user>{needles.ASKED}")
    for needle in hay.needles:
        asked = tokens.decode(needle.tail)
        name = asked.split("code of the ")[1].split("?")[0]
        fact = f" The secret code of the {name} is{tokens.decode(needle.answer)}."
        assert asked.endswith(f"<answer>The secret code of the {name} is")
        assert text.count(fact) == 1
        at = text.index(fact)
        assert text[at - 1] == "."
        assert (at - begins) / (len(text) - begins) == pytest.approx(needle.depth, abs=0.05)


def test_haystacks_differ_and_are_the_same_again() -> None:
    one, other, again = (needles.haystack(Letters(), PLACE, 3000, 4, seed) for seed in (0, 1, 0))
    assert one == again
    assert [needle.answer for needle in one.needles] != [needle.answer for needle in other.needles]


def test_places_are_spread_over_all_texts() -> None:
    found = needles.places({"a": "A", "b": "B"}, 5)
    assert [(title, number, of) for title, _, number, of in found] == [
        ("a", 0, 3),
        ("b", 0, 2),
        ("a", 1, 3),
        ("b", 1, 2),
        ("a", 2, 3),
    ]
    whole = [needles.window(TEXT, number, 3, 100, Letters()) for number in range(3)]
    firsts = [Letters().decode(ids).split(".")[0] for ids in whole]
    assert all(first.startswith("Line ") for first in firsts)
    numbers = [int(first.split()[1]) for first in firsts]
    assert 250 < numbers[0] < 400 < 950 < numbers[1] < 1050 < 1600 < numbers[2] < 1750


def test_mistakes() -> None:
    with pytest.raises(UserError, match="of 11 characters is too short for 100 tokens"):
        needles.window("Hello\nthere", 0, 1, 100, Letters())
    with pytest.raises(UserError, match="4 needles do not fit a prompt of 400 tokens"):
        needles.haystack(Letters(), PLACE, 400, 4, seed=0)
