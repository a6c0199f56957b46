"""The tasks draw what they say, the same at every call, and the suites stay as they are."""

import numpy as np
import pytest

from demo_vlm.data import Source, load_easy_vqa, make_page, training_source
from demo_vlm.suites import BOTH, DRAWN, EASY1, Suite, contexts, fingerprint, suites
from engines.errors import UserError

# Images, questions and answers of the suites, to notice a change that would make old figures incomparable.
FINGERPRINTS = {
    "page1": "a1966ada2e7d3304",
    "easy4": "75f2ee3c2d2a6d2d",
    "page4": "fe4b8321ab7f4454",
    "mixed4": "045f65933df57b7d",
    "easy8": "7dc8855eafd202ed",
    "page8": "4ccebd267462f88b",
    "mixed8": "cbd4226214d80276",
}


def test_page_answers_are_the_drawn_numbers() -> None:
    """The same seed draws the numbers again: the questions must name row, column and digits of that draw."""
    _, questions = make_page(np.random.default_rng(3))
    rng = np.random.default_rng(3)
    rng.integers(215, 256, 3)
    rng.integers(0, 90, 3)
    numbers = rng.integers(0, 10, (4, 2, 3))
    assert len(questions) == 8
    for text, answer in questions:
        row, column = (int(word) for word in text.split() if word.isdigit())
        assert answer == " ".join(map(str, numbers[row - 1, column - 1]))


def test_page_shows_ink_in_every_cell() -> None:
    page, _ = make_page(np.random.default_rng(4))
    cells = page.reshape(4, 16, 2, 32, 3).astype(int)
    assert page.shape == (64, 64, 3)
    assert page.dtype == np.uint8
    assert (cells.max((1, 3, 4)) - cells.min((1, 3, 4)) > 100).all()


def test_same_seed_same_contexts() -> None:
    first, second, other = (training_source(seed).context(4, BOTH, 8) for seed in (5, 5, 6))
    assert first.questions == second.questions
    assert all(np.array_equal(a, b) for a, b in zip(first.images, second.images, strict=True))
    assert first.questions != other.questions


def test_questions_are_about_the_image_they_name() -> None:
    context = Source(load_easy_vqa("train"), 7).context(4, {"easy": 1, "page": 1}, 16)
    for question in context.questions:
        start, text = question.text.split(" , ", 1)
        image = int(start.removeprefix("in image ")) - 1
        assert question.kind == context.kinds[image]
        assert (text, question.answer) in context.facts[image]


def test_single_image_questions_name_no_image() -> None:
    context = Source(load_easy_vqa("train"), 8).context(1, {"page": 1}, 8)
    assert not any(question.text.startswith("in image") for question in context.questions)


def test_easy1_is_the_whole_test_split() -> None:
    items = suites([EASY1])[EASY1]
    assert len(items) == 9673
    assert len({item.images[0].tobytes() for item in items}) <= 1000


@pytest.mark.parametrize("name", DRAWN)
def test_suite_is_fixed(name: str) -> None:
    assert fingerprint(name)[:16] == FINGERPRINTS[name]


def test_suites_use_seeds_of_their_own() -> None:
    assert len({suite.seed for suite in DRAWN.values()}) == len(DRAWN)
    assert all(isinstance(suite, Suite) and suite.seed > 1000 for suite in DRAWN.values())  # training's are small


def test_limit_spreads_over_the_contexts() -> None:
    picked = suites(["page4"], limit=60)["page4"]
    assert len(picked) == 60
    assert len({item.images[0].tobytes() for item in picked}) == 60


def test_unknown_suite_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="choose from easy1"):
        contexts("page5")
