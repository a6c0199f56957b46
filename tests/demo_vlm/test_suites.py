"""What a blind guess scores on the held-out suites."""

import numpy as np
import pytest

from demo_vlm import suites
from demo_vlm.data import EasyVqa


def test_blind_guess_is_the_most_frequent_training_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    train = [[("color ?", "red"), ("is it red ?", "no")], [("color ?", "red")], [("color ?", "blue")]]
    easy = EasyVqa(np.zeros((3, 64, 64, 3), np.uint8), train)
    monkeypatch.setattr(suites, "load_easy_vqa", {"train": easy}.__getitem__)
    suites.blind_answers.cache_clear()
    monkeypatch.setattr(suites, "BLIND_PAGES", 3)
    asked = [("in image 2 , color ?", "red"), ("color ?", "blue"), ("is it red ?", "no"), ("never seen ?", "no")]
    items = [suites.Item([], question, answer, "easy") for question, answer in asked]
    assert suites.blind_accuracy(items) == 0.5
    suites.blind_answers.cache_clear()


def test_pages_cannot_be_guessed() -> None:
    assert suites.blind_accuracy(suites.suites(["page1"])["page1"]) < 0.02
