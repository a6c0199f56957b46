"""Calibration samples: images with prompts. Visual rows have other ranges: text alone is for models of text alone."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from engines.bundle import sha256
from engines.errors import UserError, one_line
from engines.preprocessor import eight_bits

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint

FILE = "samples.jsonl"
SHOWN = 160  # characters of a prompt or a file's name in a message
KEYS = ("images", "prompt", "answer", "task")
EASY_VQA, EASY_VQA_SAMPLES = "easy-vqa", 256  # in place of a folder: the images and questions of that package
PYDOC, PYDOC_SAMPLES, PYDOC_LENGTH = "pydoc", 16, 1500  # Python's own documentation, and characters of a passage


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


def of(checkpoint: Path, given: str | Path | None = None, text_only: bool = False) -> list[Sample]:
    """A checkpoint's samples: those that are given, else those beside its weights; see `read`.

    A model of text alone has some in any case, and takes texts alone.
    """
    from export.checkpoint import takes_images  # which wants packages and releases that kvpress's environment has not

    where = given or checkpoint / "samples"
    if takes_images(checkpoint):
        return read(where, text_only)
    return read(where if given or (Path(where) / FILE).is_file() else PYDOC, text_only=True)


def read(folder: str | Path, text_only: bool = False) -> list[Sample]:
    """Read `samples.jsonl` of a folder: {"images": ["a.png", ...], "prompt": "...", "answer": "..."} a line.

    `answer` and `task` may be left out.

    Args:
        folder: or `easy-vqa`, or `pydoc`, which is text alone.
        text_only: whether samples without any image are taken too.

    Raises:
        UserError: no such file, a line that is not such an object, a missing image, no image at all, no sample.
    """
    if str(folder) == EASY_VQA:
        return easy_vqa()
    if str(folder) == PYDOC:
        return pydoc()
    path = Path(folder) / FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a folder with {FILE} and its images by --samples")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() breaks texts, too: at U+2028 or U+0085
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    samples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
            samples.append(_sample(path.parent, data))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f'{where}: not {{"images": [...], "prompt": "..."}} ({error})') from error
        if missing := [image for image in samples[-1].images if not os.path.isfile(image)]:
            raise UserError(f"{where}: image {shortened(str(missing[0]))} does not exist")
    if not samples:
        raise UserError(f"{path} holds no sample: write one a line")
    if not text_only and not any(sample.images for sample in samples):
        raise UserError(f"{path}: no sample has an image; keys calibrated on text alone do not fit images")
    return samples


def _sample(folder: Path, data: Any) -> Sample:
    if not isinstance(data, dict):
        raise TypeError("no object")
    if unknown := [key for key in data if key not in KEYS]:
        raise TypeError(f"unknown key {unknown[0]!r}; known keys: {', '.join(KEYS)}")
    names, texts = data["images"], [data["prompt"], data.get("answer", ""), data.get("task", "")]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise TypeError("images must be a list of file names")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("prompt, answer and task must be texts")
    return Sample([folder / name for name in names], *texts)


def shortened(text: str) -> str:
    """A text for a message of one line."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


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


def pydoc(count: int = PYDOC_SAMPLES) -> list[Sample]:
    """Passages of the language reference that every Python brings along: English prose of some hundred words each."""
    from pydoc_data.topics import topics

    long = [topic for topic in topics.values() if len(topic) > 2 * PYDOC_LENGTH]
    chosen = (long[len(long) * i // count] for i in range(count))
    asked = "Say in a few words what this text is about:"
    return [Sample([], f"{asked}\n\n{text[PYDOC_LENGTH : 2 * PYDOC_LENGTH]}", task=PYDOC) for text in chosen]


def split(samples: Sequence[Sample], seed: int = 0, share: float = 0.25) -> tuple[list[Sample], list[Sample]]:
    """The samples to calibrate on, and those held out, in their order: at least `share` of them, chosen by the seed.

    No image is on both sides, whatever its file is called: samples that share one go together. The choice depends on
    what is in the images and prompts alone, not on where they lie or in which order.

    Raises:
        UserError: nothing would be left on one side.
    """
    parts: list[tuple[set[str], list[int]]] = []  # images, or a prompt without any, and the samples that share them
    for number, sample in enumerate(samples):
        names, members = _shown(sample), [number]
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


def apart(calibration: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """The held-out samples that share no image with calibration, whatever its file is called; and warnings.

    Raises:
        UserError: none is left.
    """
    known = set[str]().union(*map(_shown, calibration))
    left = [sample for sample in held_out if not _shown(sample) & known]
    shared = f"{len(held_out) - len(left)} of {len(held_out)} samples of --held-out share an image with --samples"
    if not left:
        raise UserError(f"{shared}: give others, or leave --held-out away and some of --samples are held out")
    return left, [f"{shared}, and are left out"] * (len(left) < len(held_out))


def _shown(sample: Sample) -> set[str]:
    """What is in its images, or its prompt if it has none."""
    return {sha256(path) for path in sample.images} or {sample.prompt}


def model_inputs(checkpoint: Checkpoint, sample: Sample) -> dict[str, Any]:
    """The Hugging Face processor's tensors for one sample as a user message, batch 1; images have the first layout.

    Raises:
        UserError: an image is damaged, or the processor refuses the prompt.
    """
    images = [checkpoint.brought(opened(path)) for path in sample.images]
    try:
        return processed(checkpoint.processor, sample.prompt, images)
    except Exception as error:  # for example an image token in the prompt's text
        raise UserError(f"sample {shortened(sample.prompt)!r} makes no prompt: {one_line(error)}") from error


def processed(processor: Any, question: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """The Hugging Face processor's tensors for images and a question after them as a user message, batch 1."""
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return dict(processor(images=list(images) or None, text=text, return_tensors="pt"))


def opened(path: Path) -> Image.Image:
    """An image as RGB.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd tags and the like, about an image that is fine
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # more pixels than the runtime takes
            return eight_bits(Image.open(path)).convert("RGB")
    except Exception as error:  # a decoder fails in many ways, and each of them is this file's fault
        raise UserError(f"image {path} cannot be read: {one_line(error)}") from error
