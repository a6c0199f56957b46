"""What a model looks at in both directions is read by one prefill: anything else is refused, and nothing is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import runtime
from engines.errors import UserError
from runtime.model import VLM
from runtime.session import Session
from tests.runtime.asking import image

LONG = "one two big red " * 20  # 80 words, and the longest bucket has 40 tokens
IMAGE, PROMPT = "looks at an image in both directions", "looks at a prompt in both directions"


def opened(path: Path, block: str) -> VLM:
    vlm = runtime.open(path, level="tight", threads=1)
    vlm.model = dataclasses.replace(vlm.model, block=block)  # type: ignore[arg-type]
    return vlm


def test_an_image_must_lie_in_prefill(bundle_path: Path) -> None:
    vlm = opened(bundle_path, "image")
    assert vlm.generate("what is it " + LONG, [image(0)], 3).text  # the text behind it may follow
    assert vlm.generate("what is it", [image(0)], 3, question_later=True).text
    content = [{"type": "text", "text": LONG}, {"type": "image"}]
    with pytest.raises(UserError, match=IMAGE):
        vlm.generate([{"role": "user", "content": content}], [image(0)])
    chat = Session(vlm)
    before = chat.ask("what is it", [image(0)], 3, ignore_eos=True).tokens
    with pytest.raises(UserError, match=IMAGE):
        chat.ask("and this", [image(1)])
    other = Session(vlm)
    assert other.ask("what is it", [image(0)], 3, ignore_eos=True).tokens == before
    asked = (each.ask("is it blue", max_new_tokens=3, ignore_eos=True).tokens for each in (chat, other))
    assert next(asked) == next(asked)  # what was refused left no trace


def test_a_prompt_that_looks_both_ways_is_read_at_once(bundle_path: Path) -> None:
    vlm = opened(bundle_path, "prompt")
    assert vlm.generate("what is it", [image(0)], 3).text
    with pytest.raises(UserError, match=PROMPT):
        vlm.stream(LONG, [image(0)])
    with pytest.raises(UserError, match=PROMPT):
        vlm.generate("what is it", [image(0)], 3, question_later=True)
    chat = Session(vlm)
    chat.ask("what is it", [image(0)], 3)
    with pytest.raises(UserError, match=PROMPT):
        chat.ask("and now")
