"""Sessions with the demo model: a chat is one prompt of the whole conversation, and a page is read once."""

from __future__ import annotations

from typing import Any

import pytest

import runtime
from demo_vlm.suites import suites
from engines.bundle import Bundle
from runtime.session import Session

pytestmark = pytest.mark.slow


def user(question: str, images: int = 0) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}] * images + [{"type": "text", "text": question}]}


@pytest.mark.parametrize("most", [6, 1])
def test_a_chat_at_off_is_one_prompt(demo_bundle: Bundle, most: int) -> None:
    """Images in the first turn and in a later one, which is read behind the prompt; answers that end or are cut off."""
    vlm = runtime.open(demo_bundle.path, level="off", threads=1)
    items = suites(["easy1", "page1"], 8)
    compared = cut = 0
    for first, second in zip(items["easy1"], items["page1"], strict=True):
        session, messages, images = Session(vlm), list[dict[str, Any]](), list[Any]()
        turns = [(first.question, first.images), (second.question, second.images), ("what shape is in the image?", [])]
        for question, pictures in turns:
            messages.append(user(question, len(pictures)))
            images += pictures
            alone = vlm.generate(messages, images, most)
            turn = session.ask(question, pictures, most)
            assert turn.tokens == alone.tokens
            assert turn.stats.prompt_tokens == alone.stats.prompt_tokens
            messages.append({"role": "assistant", "content": turn.text})
            compared, cut = compared + len(turn.tokens), cut + (turn.stats.stop_reason == "max_new_tokens")
    assert compared > 12
    assert cut > 12 or most > 1


@pytest.mark.parametrize("level", ["off", "balanced"])
def test_a_page_is_read_once_for_many_questions(demo_bundle: Bundle, level: str) -> None:
    """Forks answer as a question that comes later does, and are right."""
    vlm = runtime.open(demo_bundle.path, level=level, threads=1)
    right = asked = 0
    for item in suites(["easy1"], 12)["easy1"]:
        page = Session(vlm)
        page.read([{"role": "user", "content": [{"type": "image"}]}], item.images)
        answers = [page.fork().ask(item.question, max_new_tokens=4).text.strip() for _ in range(2)]
        alone = vlm.generate(item.question, item.images, 4, question_later=True)
        assert answers == [alone.text.strip()] * 2
        right, asked = right + (answers[0] == item.answer), asked + 1
    assert right >= asked - 1
