"""Score a checkpoint on the held-out suites: greedy exact match, beside what a blind guess would score."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoProcessor, LlavaForConditionalGeneration

from demo_vlm.data import Context, load_easy_vqa
from demo_vlm.model import collate, exact_matches, forward
from demo_vlm.saving import load_checkpoint
from demo_vlm.suites import EASY1, NAMES, blind_accuracy, contexts, suites

PACKED_IMAGES = 8  # images in one packed batch


@dataclass(frozen=True)
class Score:
    """One suite's result: questions asked, share answered exactly, share a blind guess answers."""

    suite: str
    images: int
    questions: int
    accuracy: float
    blind: float


@dataclass(frozen=True)
class Duplicates:
    """easy-VQA test images whose pixels equal a training image's, as they are or mirrored, and how many there are."""

    plain: int
    mirrored: int
    images: int


@torch.no_grad()
def accuracy(model: LlavaForConditionalGeneration, data: list[Context], label: str = "") -> float:
    """Share of questions answered exactly by the packed forward pass."""
    size = max(1, PACKED_IMAGES // len(data[0].images))
    hits: list[bool] = []
    for i in tqdm(range(0, len(data), size), desc=label, leave=False, disable=not label):
        batch = collate(data[i : i + size])
        logits = forward(model, batch).logits
        hits += [hit for row in exact_matches(logits, batch) for hit in row]
    return float(np.mean(hits))


def duplicates() -> Duplicates:
    """Count test images that training has shown."""
    train, test = load_easy_vqa("train").pixels, load_easy_vqa("test").pixels
    shown = {image.tobytes() for image in train}
    mirrored = {image[:, ::-1].tobytes() for image in train}
    plain = sum(image.tobytes() in shown for image in test)
    return Duplicates(plain, sum(image.tobytes() in mirrored for image in test), len(test))


@torch.no_grad()
def generate_agrees(folder: Path, names: Iterable[str] = NAMES, prompts: int = 4) -> tuple[int, int]:
    """Ask `prompts` questions of every suite through AutoProcessor and generate(), and packed.

    Returns:
        How many verdicts are equal, how many questions were asked.
    """
    model, processor = load_checkpoint(folder), AutoProcessor.from_pretrained(folder)
    same = asked = 0
    for name in names:
        for context in spread(contexts(name), prompts):
            question = context.questions[0]
            content = [{"type": "image"} for _ in context.images] + [{"type": "text", "text": question.text}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            images = [Image.fromarray(pixels) for pixels in context.images]
            inputs = processor(images=images, text=text, return_tensors="pt")
            out = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
            exact = processor.decode(out, skip_special_tokens=True).strip() == question.answer
            batch = collate([Context(context.images, context.kinds, context.facts, [question])])
            logits = forward(model, batch).logits
            same += exact == exact_matches(logits, batch)[0][0]
            asked += 1
    return same, asked


def spread(items: list[Context], count: int) -> list[Context]:
    """`count` items at even distances."""
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


def evaluate(folder: Path, names: Iterable[str] = NAMES) -> list[Score]:
    """Score the checkpoint in `folder` on whole suites."""
    model = load_checkpoint(folder)
    scores = []
    for name in names:
        data, items = contexts(name), suites([name])[name]
        blind = blind_accuracy(items)
        scores.append(Score(name, len(data[0].images), len(items), accuracy(model, data, name), blind))
    return scores


def table(scores: list[Score]) -> str:
    """The scores as the model card shows them."""
    lines = ["| suite | images | questions | exact match | blind guess |", "| --- | ---: | ---: | ---: | ---: |"]
    for s in scores:
        lines.append(f"| {s.suite} | {s.images} | {s.questions:,} | {s.accuracy:.1%} | {s.blind:.1%} |")
    return "\n".join(lines)


__all__ = ["EASY1", "NAMES", "Score", "duplicates", "evaluate", "generate_agrees", "table"]
