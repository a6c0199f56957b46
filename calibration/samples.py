"""Calibration samples: images with prompts. Never text alone: visual rows have other ranges than text rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from engines.bundle import sha256
from engines.errors import UserError, one_line

FILE = "samples.jsonl"
EASY_VQA, EASY_VQA_SAMPLES = "easy-vqa", 256  # in place of a folder: the images and questions of that package


@dataclass(frozen=True)
class Sample:
    """One prompt about some images.

    Attributes:
        images: files, in the order of the prompt.
        prompt: the question.
        answer: what the model should say; empty if unknown.
        task: what is asked for, by whatever name: accuracy is told by it.
    """

    images: list[Path]
    prompt: str
    answer: str = ""
    task: str = ""


def read(folder: str | Path, text_only: bool = False) -> list[Sample]:
    """Read `samples.jsonl` of a folder: {"images": ["a.png", ...], "prompt": "...", "answer": "..."} a line.

    `answer` and `task` may be left out.

    Args:
        folder: or `easy-vqa`.
        text_only: whether samples without any image are taken too.

    Raises:
        UserError: no such file, a line that is not such an object, a missing image, no image at all, no sample.
    """
    if str(folder) == EASY_VQA:
        return easy_vqa()
    path = Path(folder) / FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a folder with {FILE} and its images by --samples")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    samples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
            images = [path.parent / name for name in data["images"]]
            sample = Sample(images, data["prompt"], data.get("answer", ""), data.get("task", ""))
            if not all(isinstance(text, str) for text in (sample.prompt, sample.answer, sample.task)):
                raise TypeError("prompt, answer and task must be texts")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{where}: not {{"images": [...], "prompt": "..."}} ({error})') from error
        if missing := [image for image in images if not image.is_file()]:
            raise UserError(f"{where}: image {missing[0]} does not exist")
        samples.append(sample)
    if not samples:
        raise UserError(f"{path} holds no sample: write one a line")
    if not text_only and not any(sample.images for sample in samples):
        raise UserError(f"{path}: no sample has an image; keys calibrated on text alone do not fit images")
    return samples


def easy_vqa(count: int = EASY_VQA_SAMPLES) -> list[Sample]:
    """Questions spread evenly over easy-VQA's training split; its test split is for measuring accuracy."""
    try:
        import easy_vqa as data
    except ImportError:
        raise UserError("easy-VQA is not installed: pip install easy-vqa") from None
    questions, answers, images = data.get_train_questions()
    paths = data.get_train_image_paths()
    chosen = range(0, len(questions), len(questions) // count)[:count]
    return [Sample([Path(paths[images[i]])], questions[i], answers[i], EASY_VQA) for i in chosen]


def split(samples: Sequence[Sample], seed: int = 0, share: float = 0.25) -> tuple[list[Sample], list[Sample]]:
    """The samples to calibrate on, and those held out, in their order: at least `share` of them, chosen by the seed.

    No image is on both sides, whatever its file is called: samples that share one go together. The choice depends on
    what is in the images and prompts alone, not on where they lie or in which order.

    Raises:
        UserError: nothing would be left on one side.
    """
    parts: list[tuple[set[str], list[int]]] = []  # images, or a prompt without any, and the samples that share them
    for number, sample in enumerate(samples):
        names, members = {sha256(path) for path in sample.images} or {sample.prompt}, [number]
        for part in [part for part in parts if part[0] & names]:
            parts.remove(part)
            names, members = names | part[0], part[1] + members
        parts.append((names, members))
    held: set[int] = set()
    for _, members in sorted(parts, key=lambda part: hashlib.sha256(repr((seed, sorted(part[0]))).encode()).digest()):
        if len(held) < share * len(samples):
            held |= set(members)
    if not 0 < len(held) < len(samples):
        raise UserError(
            f"{len(samples)} samples are too few to hold some out, with images that no other sample has: give more"
        )
    return [s for i, s in enumerate(samples) if i not in held], [s for i, s in enumerate(samples) if i in held]


def model_inputs(processor: Any, sample: Sample) -> dict[str, Any]:
    """The Hugging Face processor's tensors for one sample as a user message, batch 1.

    Raises:
        UserError: an image is damaged, or the processor refuses the prompt.
    """
    images = [_image(path) for path in sample.images]
    try:
        return processed(processor, sample.prompt, images)
    except Exception as error:  # for example an image token in the prompt's text
        raise UserError(f"sample {sample.prompt!r} makes no prompt: {one_line(error)}") from error


def processed(processor: Any, question: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """The Hugging Face processor's tensors for images and a question after them as a user message, batch 1."""
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return dict(processor(images=list(images) or None, text=text, return_tensors="pt"))


def _image(path: Path) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's PNG reader raises SyntaxError
        raise UserError(f"image {path} cannot be read: {one_line(error)}") from error
