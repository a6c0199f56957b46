"""The two tasks: easy-VQA's coloured shapes and a page of numbers, and prompts that mix up to eight such images.

NumPy and Pillow only, so that tests and accuracy scripts can use it without torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from demo_vlm.vocabulary import IMAGE_SIZE
from engines.errors import UserError

Pixels = NDArray[np.uint8]
Kind = Literal["easy", "page"]
QuestionAnswer = tuple[str, str]

ROWS, COLUMNS, DIGITS = 4, 2, 3
VALIDATION_IMAGES = 100  # the last easy-VQA training images, never trained on, watched during the run


@dataclass(frozen=True)
class Question:
    """One question about a context's images.

    Attributes:
        text: the question as the user types it ("in image 3 , what color is the shape?").
        answer: the words the model must produce, digits apart ("0 9 7").
        kind: the task of the image that is asked about.
    """

    text: str
    answer: str
    kind: Kind


@dataclass(frozen=True)
class Context:
    """Images of one prompt and independent questions about them.

    Attributes:
        images: uint8 [64, 64, 3] each, in prompt order.
        kinds: the task of each image.
        facts: every (question, answer) of each image by itself, asked or not: what the auxiliary losses read.
        questions: what is asked.
    """

    images: list[Pixels]
    kinds: list[Kind]
    facts: list[list[QuestionAnswer]]
    questions: list[Question]


@dataclass(frozen=True)
class EasyVqa:
    """A split of easy-VQA 1.0: images uint8 [n, 64, 64, 3] and per image its (question, answer) pairs."""

    pixels: Pixels
    questions: list[list[QuestionAnswer]]

    def take(self, part: slice) -> "EasyVqa":
        """A part of the images with their questions."""
        return EasyVqa(self.pixels[part], self.questions[part])


@lru_cache(maxsize=2)
def load_easy_vqa(split: Literal["train", "test"]) -> EasyVqa:
    """Read a split from the installed `easy_vqa` package (its wheel ships the images)."""
    spec = util.find_spec("easy_vqa")
    if spec is None or spec.origin is None:
        raise UserError("easy-VQA is not installed, its images are the training data: pip install easy-vqa")
    folder = Path(os.path.dirname(spec.origin)) / "data" / split
    rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    count = 1 + max(image for _, _, image in rows)
    pixels = np.stack([np.asarray(Image.open(folder / "images" / f"{i}.png").convert("RGB")) for i in range(count)])
    questions: list[list[QuestionAnswer]] = [[] for _ in range(count)]
    for question, answer, image in rows:
        questions[image].append((question, answer))
    return EasyVqa(pixels, questions)


@lru_cache(maxsize=1)
def _digit_masks() -> NDArray[np.float32]:
    """Ink of the ten digits in three sizes, [3, 10, 14, 10], 0..1."""
    masks = []
    for size in (12, 13, 14):
        font = ImageFont.load_default(size)
        for digit in "0123456789":
            image = Image.new("L", (10, 14), 0)
            ImageDraw.Draw(image).text((1, 12), digit, font=font, fill=255, anchor="ls")
            masks.append(np.asarray(image, np.float32) / 255)
    return np.stack(masks).reshape(3, 10, 14, 10).astype(np.float32)


def make_page(rng: np.random.Generator) -> tuple[Pixels, list[QuestionAnswer]]:
    """Draw a page of 4 x 2 three-digit numbers, dark ink on light paper, and the eight questions about it."""
    paper = rng.integers(215, 256, 3).astype(np.float32)
    ink = rng.integers(0, 90, 3).astype(np.float32)
    mask = np.zeros((IMAGE_SIZE + 2, IMAGE_SIZE + 4), np.float32)  # the last row and column may run off the page
    numbers = rng.integers(0, 10, (ROWS, COLUMNS, DIGITS))
    glyphs = _digit_masks()
    for row in range(ROWS):
        for column in range(COLUMNS):
            size = rng.integers(3)
            y, x = row * 16 + rng.integers(0, 3), column * 32 + rng.integers(0, 7)
            for j in range(DIGITS):
                cell = mask[y : y + 14, x + 8 * j : x + 8 * j + 10]
                np.maximum(cell, glyphs[size, numbers[row, column, j]], out=cell)
    mask = mask[:IMAGE_SIZE, :IMAGE_SIZE, None]
    image = paper * (1 - mask) + ink * mask + rng.normal(0, 2, (IMAGE_SIZE, IMAGE_SIZE, 1))
    questions = [
        (f"what is the number in row {r + 1} column {c + 1} ?", " ".join(map(str, numbers[r, c])))
        for r in range(ROWS)
        for c in range(COLUMNS)
    ]
    return np.clip(image, 0, 255).astype(np.uint8), questions


class Source:
    """An endless, seeded stream of contexts.

    Args:
        easy: the easy-VQA images to draw from.
        seed: the same seed gives the same contexts, call by call.
        mirror: flip half of the easy-VQA images left to right (their questions do not mind).
    """

    def __init__(self, easy: EasyVqa, seed: int, mirror: bool = False) -> None:
        self.easy = easy
        self.rng = np.random.default_rng(seed)
        self.mirror = mirror

    def image(self, kind: Kind) -> tuple[Pixels, list[QuestionAnswer]]:
        """One image of a kind, uint8 [64, 64, 3], with all its questions."""
        if kind == "page":
            return make_page(self.rng)
        i = int(self.rng.integers(len(self.easy.pixels)))
        pixels = self.easy.pixels[i]
        if self.mirror and self.rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        return pixels, self.easy.questions[i]

    def context(self, images: int, mix: Mapping[Kind, float], questions: int) -> Context:
        """Draw `images` images, each of a kind drawn by the weights in `mix`, and up to `questions` questions.

        With more than one image every question names its image: "in image 3 , ...".
        """
        kinds: Sequence[Kind] = list(mix)
        weights = np.array([mix[kind] for kind in kinds], np.float64)
        context = Context([], [], [], [])
        pool = []
        per_image = -(-questions // images)
        for k in range(images):
            kind = kinds[int(self.rng.choice(len(kinds), p=weights / weights.sum()))]
            picture, pairs = self.image(kind)
            context.images.append(picture)
            context.kinds.append(kind)
            context.facts.append(pairs)
            for j in self.rng.permutation(len(pairs))[:per_image]:
                text, answer = pairs[int(j)]
                pool.append(Question(f"in image {k + 1} , {text}" if images > 1 else text, answer, kind))
        order = self.rng.permutation(len(pool))[:questions]
        context.questions.extend(pool[int(j)] for j in order)
        return context


def training_source(seed: int) -> Source:
    """The stream that training reads: easy-VQA training images but for the validation ones, mirrored at random."""
    return Source(load_easy_vqa("train").take(slice(None, -VALIDATION_IMAGES)), seed, mirror=True)


def validation_source(seed: int) -> Source:
    """The stream watched during training: the training images held back, fresh pages."""
    return Source(load_easy_vqa("train").take(slice(-VALIDATION_IMAGES, None)), seed)
