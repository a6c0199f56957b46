"""scripts/ask_easy_vqa.py: the question must be about the image it names."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import easy_vqa
import pytest

import ask_easy_vqa


@pytest.mark.parametrize("images", [1, 4])
def test_the_image_named_is_the_one_the_data_set_asks_about(images: int) -> None:
    texts, truths, owners = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    triples = set(zip(texts, truths, (paths[owner] for owner in owners), strict=True))
    asked = list(ask_easy_vqa.questions(40, images))
    named = Counter[int]()
    for question in asked:
        text, number = question.text, 1
        if images > 1:
            number = int(text[len("in image ")])
            text = text.removeprefix(f"in image {number} , ")
        assert len(question.images) == images
        assert (text, question.truth, question.images[number - 1]) in triples
        named[number] += 1
    assert named == {number: 40 // images for number in range(1, images + 1)}
    assert len({question.images[0] for question in asked}) > 30


def test_answers_stand_beside_the_truth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def generate(question: str, images: list[str]) -> SimpleNamespace:
        stats = SimpleNamespace(kv_bytes=2048, kv_bytes_uncompressed=8192)
        return SimpleNamespace(text="Yes ", stats=stats)

    def fake_open(path: str, **options: Any) -> SimpleNamespace:
        assert (path, options) == ("some/bundle", {"level": "light"})
        return SimpleNamespace(level="light", generate=generate)

    monkeypatch.setattr(ask_easy_vqa.runtime, "open", fake_open)
    assert ask_easy_vqa.main(["some/bundle", "--level", "light", "--count", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    truths = [q.truth for n in (1, 4) for q in ask_easy_vqa.questions(3, n)]
    assert [line.endswith("wrong") for line in lines[1:-1]] == [truth != "yes" for truth in truths]
    assert "2 of" in lines[1]
    assert lines[-1] == f"level light: {truths.count('yes')} of 6 right"
