"""Needles in a haystack: facts strewn into a novel, and a question about each at its end.

Imports nothing of this project that needs transformers: kvpress's methods are measured in another environment.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.errors import UserError

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange")
THINGS = (
    "lantern",
    "carriage",
    "piano",
    "bridge",
    "garden",
    "letter",
    "window",
    "clock",
    "boat",
    "ladder",
    "mirror",
    "tower",
)
ASKED = (
    "Some secret codes are hidden in the following text. Remember them. I will ask you about one of them afterwards."
)


@dataclass(frozen=True)
class Needle:
    """One question.

    Attributes:
        depth: where its fact stands, 0 the beginning and 1 the end of the haystack.
        tail: tokens behind the haystack: the question and the beginning of the answer.
        answer: the tokens that must follow.
    """

    depth: float
    tail: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Haystack:
    """What all of its questions follow; `ids` and the longest of their tails are as many tokens as were asked for."""

    title: str
    ids: list[int]
    needles: list[Needle]


def window(text: str, number: int, count: int, tokens: int, tokenizer: Any) -> list[int]:
    """The tokens of one of `count` places of a text, spread evenly, from the beginning of a paragraph on.

    Raises:
        UserError: the text is too short.
    """
    room = 8 * tokens  # characters: English has four or five a token
    start = max(len(text) - room, 0) * (2 * number + 1) // (2 * count)
    ids = tokenizer(text[text.find("\n", start) + 1 :][:room], add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < tokens:
        raise UserError(f"a text of {len(text)} characters is too short for {tokens} tokens: give a longer one")
    return ids


def places(texts: dict[str, str], count: int) -> list[tuple[str, str, int, int]]:
    """Title, text, and which of how many places in it, `count` of them: another text each as long as there are some."""
    titles = list(texts)
    each = [len(range(i, count, len(titles))) for i in range(len(titles))]
    spread = [(titles[i % len(titles)], i // len(titles), each[i % len(titles)]) for i in range(count)]
    return [(title, texts[title], number, of) for title, number, of in spread]


def haystack(tokenizer: Any, place: tuple[str, str, int, int], length: int, needles: int, seed: int) -> Haystack:
    """A prompt of `length` tokens, its answer begun, in as many versions as there are needles.

    Args:
        place: of `places`.
        seed: chooses what the facts are.

    Raises:
        UserError: the text is too short, or the prompt for so many needles.
    """
    title, text, number, of = place
    chance = random.Random(seed)
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    facts = [(name, str(chance.randrange(1000, 10000))) for name in chance.sample(names, needles)]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    mark = "\u2042"
    said = [{"role": "user", "content": f"{ASKED}\n\n{mark}\n\n{mark}"}]
    before, between, after = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True).split(mark)
    tails = [
        ids(f"{between}What is the secret code of the {name}?{after}The secret code of the {name} is")
        for name, _ in facts
    ]
    told = [ids(f" The secret code of the {name} is {code}.") for name, code in facts]
    head = ids(before)
    room = length - len(head) - max(map(len, tails)) - sum(map(len, told))
    if room < 2 * needles:
        raise UserError(
            f"{needles} needles do not fit a prompt of {length} tokens: give a longer one, or fewer of them"
        )
    straw = window(text, number, of, room, tokenizer)
    depths = [(i + 0.5) / needles for i in range(needles)]
    edges = [0, *(_sentence(straw, round(depth * room), tokenizer) for depth in depths), room]
    parts = [straw[a:b] for a, b in itertools.pairwise(edges)]
    filled = [
        *head,
        *parts[0],
        *(token for fact, part in zip(told, parts[1:], strict=True) for token in [*fact, *part]),
    ]
    answers = [ids(f" {code}") for _, code in facts]
    return Haystack(
        f"{title} {number + 1}/{of}", filled, [Needle(*each) for each in zip(depths, tails, answers, strict=True)]
    )


def _sentence(ids: Sequence[int], near: int, tokenizer: Any, reach: int = 200) -> int:
    """Where a sentence ends, at or before a place."""
    for at in range(near, max(near - reach, 0), -1):
        if tokenizer.decode(ids[at - 1 : at]).rstrip().endswith((".", "!", "?")):
            return at
    return near
