"""The held-out suites, the same questions on every machine: easy-VQA's test images, and pages no other seed draws.

easy1          every question of easy-VQA's test split, one image a prompt
page1          one page of numbers
easyN, pageN   four or eight images of one task, "in image 3 , ..."
mixedN         both tasks in one prompt

from demo_vlm.suites import suites
for item in suites(["page4"], limit=50)["page4"]:
    item.images, item.question, item.answer, item.kind
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from demo_vlm.data import Context, Kind, Pixels, Question, Source, load_easy_vqa
from engines.errors import UserError

BLIND_SEED = 90_001
BLIND_PAGES = 1000
BOTH: dict[Kind, float] = {"easy": 1, "page": 1}


@dataclass(frozen=True)
class Suite:
    """What a drawn suite consists of: `contexts` prompts of `images` images, `questions` about each."""

    images: int
    mix: dict[Kind, float]
    questions: int
    contexts: int
    seed: int


EASY1 = "easy1"
DRAWN: dict[str, Suite] = {
    "page1": Suite(1, {"page": 1}, questions=8, contexts=150, seed=70_001),
    "easy4": Suite(4, {"easy": 1}, questions=16, contexts=100, seed=70_002),
    "page4": Suite(4, {"page": 1}, questions=16, contexts=60, seed=70_003),
    "mixed4": Suite(4, BOTH, questions=16, contexts=60, seed=70_004),
    "easy8": Suite(8, {"easy": 1}, questions=24, contexts=50, seed=70_005),
    "page8": Suite(8, {"page": 1}, questions=24, contexts=40, seed=70_006),
    "mixed8": Suite(8, BOTH, questions=24, contexts=40, seed=70_007),
}
NAMES = (EASY1, *DRAWN)


@dataclass(frozen=True)
class Item:
    """One prompt with its answer.

    Attributes:
        images: uint8 [64, 64, 3] each, in prompt order.
        question: the text after the images.
        answer: exact words expected, digits apart ("0 9 7").
        kind: the task of the image asked about, "easy" or "page".
    """

    images: list[Pixels]
    question: str
    answer: str
    kind: Kind


def contexts(name: str) -> list[Context]:
    """A suite with its questions grouped by the images they share (what a packed forward pass wants)."""
    test = load_easy_vqa("test")
    if name == EASY1:
        return [
            Context([pixels], ["easy"], [pairs], [Question(q, a, "easy") for q, a in pairs])
            for pixels, pairs in zip(test.pixels, test.questions, strict=True)
        ]
    if name not in DRAWN:
        raise UserError(f"unknown suite {name!r}: choose from {', '.join(NAMES)}")
    suite = DRAWN[name]
    source = Source(test, suite.seed)
    return [source.context(suite.images, suite.mix, suite.questions) for _ in range(suite.contexts)]


def suites(names: Iterable[str] = NAMES, limit: int | None = None) -> dict[str, list[Item]]:
    """Suites as flat lists of prompts.

    Args:
        names: which suites.
        limit: keep this many prompts of each, spread evenly over the suite, so over its contexts; all by default.
    """
    out = {}
    for name in names:
        items = [Item(c.images, q.text, q.answer, q.kind) for c in contexts(name) for q in c.questions]
        if limit is not None and limit < len(items):
            items = [items[i * len(items) // limit] for i in range(limit)]
        out[name] = items
    return out


def bare(question: str) -> str:
    """The question without "in image k , "."""
    return re.sub(r"^in image \d , ", "", question)


@lru_cache(maxsize=1)
def blind_answers() -> dict[str, str]:
    """For every question the answer that training gives most often, whatever the image shows."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    train = load_easy_vqa("train")
    pages = Source(train, BLIND_SEED)
    for pairs in [*train.questions, *(pages.image("page")[1] for _ in range(BLIND_PAGES))]:
        for question, answer in pairs:
            counts[question][answer] += 1
    return {question: counter.most_common(1)[0][0] for question, counter in counts.items()}


def blind_accuracy(items: Sequence[Item]) -> float:
    """Share of the questions answered rightly when nobody looks at the images."""
    guess = blind_answers()
    return sum(guess.get(bare(item.question)) == item.answer for item in items) / len(items)


def fingerprint(name: str) -> str:
    """SHA-256 over a suite's pixels, questions and answers: it changes when the suite does."""
    digest = hashlib.sha256()
    for item in suites([name])[name]:
        for pixels in item.images:
            digest.update(pixels.tobytes())
        digest.update(f"{item.question}\0{item.answer}\0{item.kind}\0".encode())
    return digest.hexdigest()
