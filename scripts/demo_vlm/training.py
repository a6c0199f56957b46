"""The training loop: vision warm-up with throwaway heads, then the curriculum."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration

from demo_vlm.curriculum import BOTH, EASY, PAGE, Plan, draw
from demo_vlm.data import COLUMNS, DIGITS, ROWS, Context, QuestionAnswer, Source, training_source, validation_source
from demo_vlm.model import IGNORE, collate, exact_matches, forward, normalise, vision_features
from demo_vlm.optimizer import Optimizer
from demo_vlm.vocabulary import COLORS, IMAGE_TOKENS, SHAPES

SIDE = 8  # patches per row and per column
AUX_WEIGHT = 0.5
GUIDE_WEIGHT = 0.2  # of the guided attention, without which pages stayed at chance for 700 steps
MAX_IMAGES = 8
Report = Callable[[str], None]


def page_digits(facts: list[QuestionAnswer]) -> list[list[int]]:
    """The numbers of a page in reading order, [8, 3]."""
    return [[int(digit) for digit in answer.split()] for _, answer in facts]


def color_and_shape(facts: list[QuestionAnswer]) -> tuple[int, int]:
    """Indices of the easy-VQA shape's colour and form, IGNORE where no question of the image tells."""
    answers = [answer for _, answer in facts]
    color = next((list(COLORS).index(a) for a in answers if a in COLORS), IGNORE)
    return color, next((SHAPES.index(a) for a in answers if a in SHAPES), IGNORE)


def cells(features: Tensor) -> Tensor:
    """Patches of pages, [n, 64, width] -> the mean over every number's 2 x 4 patches, [n, 8, width]."""
    return features.reshape(-1, ROWS, 2, COLUMNS, 4, features.shape[-1]).mean((2, 4)).flatten(1, 2)


class VisionHeads(nn.Module):
    """Throwaway readers on top of the tower: a number's patches -> three digits, any patch -> colour and shape.

    The digits are read from the mean of their patches, the form in which attention will read them later.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.page = nn.Linear(width, 10 * DIGITS)
        self.easy = nn.Linear(width, len(COLORS) + len(SHAPES))

    def forward(self, features: Tensor, pages: int) -> tuple[Tensor, Tensor]:
        """Features [n, 64, width], pages first -> digit logits [pages * 24, 10], shape logits [n - pages, 64, 11]."""
        h = self.norm(features)
        return self.page(cells(h[:pages])).reshape(-1, 10), self.easy(h[pages:])


def color_shape_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [n, 64, 11] against labels [n, 2], every patch by itself, averaged over both parts."""
    target = labels[:, None].expand(-1, logits.shape[1], -1).flatten(0, 1)
    flat = logits.flatten(0, 1)
    k = len(COLORS)
    return (F.cross_entropy(flat[:, :k], target[:, 0]) + F.cross_entropy(flat[:, k:], target[:, 1])) / 2


class Clock:
    """Seconds a stage took, by the wall and by the processor, over all the runs that were needed. For reports only."""

    def __init__(self, wall: float = 0.0, processor: float = 0.0) -> None:
        self._wall = time.monotonic() - wall
        self._processor = time.process_time() - processor

    def read(self) -> tuple[float, float]:
        """Both so far."""
        return time.monotonic() - self._wall, time.process_time() - self._processor


class Stage:
    """A model, its throwaway head and their optimizer on one stream of data: what a step changes, and a file of it."""

    def __init__(self, name: str, model: nn.Module, head: nn.Module, source: Source, folder: Path | None) -> None:
        self.model, self.head, self.source = model, head, source
        named = [*model.named_parameters(), *(("head." + n, p) for n, p in head.named_parameters())]
        self.optimizer = Optimizer(named)
        self.step = 0
        self.clock = Clock()
        self.file = folder / f"{name}.pt" if folder else None
        if self.file and self.file.is_file():
            state = torch.load(self.file, weights_only=True)
            model.load_state_dict(state["model"])
            head.load_state_dict(state["head"])
            self.optimizer.load(state["optimizer"])
            self.source.rng.bit_generator.state = state["rng"]
            self.step = state["step"]
            self.clock = Clock(*state["seconds"])

    def save(self) -> None:
        """Write the state in one step, so that an interrupted run goes on from here and ends the same."""
        if self.file is None:
            return
        part = self.file.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state(),
            "rng": self.source.rng.bit_generator.state,
            "step": self.step,
            "seconds": self.clock.read(),
        }
        torch.save(state, part)
        part.replace(self.file)


def warm_up_vision(tower: Any, source: Source, plan: Plan, report: Report, folder: Path | None) -> None:
    """Teach the tower to read: digits from their cell's patches; colour and shape from every patch of the image."""
    heads = VisionHeads(tower.config.hidden_size)
    stage = Stage("vision", tower, heads, source, folder)
    pages = plan.warmup_images // 2
    seen: list[tuple[float, ...]] = []
    for step in tqdm(range(stage.step, plan.warmup_steps), desc="vision", unit="step"):
        drawn = [source.image("page") for _ in range(pages)]
        drawn += [source.image("easy") for _ in range(plan.warmup_images - pages)]
        digits = torch.tensor([page_digits(facts) for _, facts in drawn[:pages]]).flatten()
        shapes = torch.tensor([color_and_shape(facts) for _, facts in drawn[pages:]])
        read, named = heads(vision_features(tower, normalise([pixels for pixels, _ in drawn])), pages)
        (F.cross_entropy(read, digits) + color_shape_loss(named, shapes)).backward()
        stage.optimizer.step(plan.warmup_rate.at(step, plan.warmup_steps))
        stage.step = step + 1
        known = shapes[:, 0] != IGNORE
        colors = named[known, :, : len(COLORS)].argmax(-1) == shapes[known, :1]
        known = shapes[:, 1] != IGNORE
        forms = named[known, :, len(COLORS) :].argmax(-1) == shapes[known, 1:]
        seen.append(tuple(float(x.float().mean()) for x in (read.argmax(-1) == digits, colors, forms)))
        if stage.step % 50 == 0 or stage.step == plan.warmup_steps:
            digit, color, form = np.mean(seen[-25:], 0)
            report(
                f"vision step {stage.step}/{plan.warmup_steps}: "
                f"digits read {digit:.3f}, colours {color:.3f}, forms {form:.3f}"
            )
            stage.save()


class BindingHead(nn.Module):
    """Training only: every visual token must know its image's number, its patch row and column, and what is shown.

    It puts image number, place and content where the later layers' attention can use them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.where = nn.Linear(width, MAX_IMAGES + 2 * SIDE)
        self.what = nn.Linear(width, len(COLORS) + len(SHAPES))
        self.page = nn.Linear(width, 10 * DIGITS)

    def forward(self, seen: Tensor, contexts: list[Context]) -> Tensor:
        """Hidden states of the visual tokens [B * images, 64, width] -> loss."""
        images = len(contexts[0].images)
        number = (torch.arange(len(seen)) % images)[:, None].expand(-1, IMAGE_TOKENS).flatten()
        patch = torch.arange(IMAGE_TOKENS).repeat(len(seen))
        z = self.where(seen).flatten(0, 1)
        loss = F.cross_entropy(z[:, :MAX_IMAGES], number)
        loss = loss + F.cross_entropy(z[:, MAX_IMAGES : MAX_IMAGES + SIDE], patch // SIDE)
        loss = loss + F.cross_entropy(z[:, MAX_IMAGES + SIDE :], patch % SIDE)
        shown = [pair for c in contexts for pair in zip(c.kinds, c.facts, strict=True)]
        easy = [i for i, (kind, _) in enumerate(shown) if kind == "easy"]
        labels = torch.tensor([color_and_shape(shown[i][1]) for i in easy])
        if easy and bool((labels != IGNORE).any(0).all()):
            loss = loss + color_shape_loss(self.what(seen[easy]), labels)
        pages = [i for i, (kind, _) in enumerate(shown) if kind == "page"]
        if pages:
            digits = torch.tensor([page_digits(shown[i][1]) for i in pages]).flatten()
            loss = loss + F.cross_entropy(self.page(cells(seen[pages])).reshape(-1, 10), digits)
        return loss / 4


@dataclass
class Watch:
    """Validation during the run: training images held back and fresh pages."""

    sets: dict[str, list[Context]]

    @classmethod
    def draw(cls) -> "Watch":
        source = validation_source(999)
        return cls(
            {
                "easy1": [source.context(1, EASY, 8) for _ in range(16)],
                "page1": [source.context(1, PAGE, 8) for _ in range(10)],
                "easy2": [source.context(2, EASY, 12) for _ in range(10)],
                "easy4": [source.context(4, EASY, 16) for _ in range(10)],
                "page4": [source.context(4, PAGE, 12) for _ in range(6)],
                "mixed8": [source.context(8, BOTH, 16) for _ in range(4)],
            }
        )

    def measure(self, model: LlavaForConditionalGeneration, largest: int) -> str:
        """Exact match per set with at most `largest` images, as text."""
        parts = []
        for name, contexts in self.sets.items():
            if len(contexts[0].images) <= largest:
                parts.append(f"{name} {accuracy(model, contexts):.3f}")
        return ", ".join(parts)


@torch.no_grad()
def accuracy(model: LlavaForConditionalGeneration, contexts: list[Context], batch: int = 10) -> float:
    """Share of questions answered exactly, by the packed forward pass."""
    hits: list[bool] = []
    for i in range(0, len(contexts), batch):
        packed = collate(contexts[i : i + batch])
        logits = forward(model, packed).logits
        hits += [ok for row in exact_matches(logits, packed) for ok in row]
    return float(np.mean(hits))


def train(
    model: LlavaForConditionalGeneration,
    seed: int,
    plan: Plan,
    report: Report,
    folder: Path | None = None,
    watch: Watch | None = None,
    every: int = 50,
) -> list[float]:
    """Run the plan on `model`, in place.

    Args:
        model: a fresh model.
        seed: of the training data and of the throwaway heads.
        plan: how many steps of what.
        report: gets a line every `every` steps.
        folder: where the state is kept at the same steps; a state found there is gone on from.
        watch: what is measured at the same steps; the usual sets by default.
        every: steps between two reports.

    Returns:
        The answer loss of every step after the vision warm-up.
    """
    torch.manual_seed(seed)
    warm_up_vision(model.model.vision_tower, training_source(seed), plan, report, folder)
    torch.manual_seed(seed)
    head = BindingHead(model.lm_head.in_features)
    stage = Stage("model", model, head, training_source(seed + 1), folder)
    watch = watch or Watch.draw()
    losses: list[float] = []
    aux: list[tuple[float, float]] = []
    bar = tqdm(range(stage.step, plan.steps), desc="model", unit="step")
    for step in bar:
        images = plan.images(step, stage.source.rng)
        contexts = draw(stage.source, images)
        out = forward(model, collate(contexts), train_vision=images == 1)
        loss = F.cross_entropy(out.logits, out.labels)
        binding = head(out.seen, contexts)
        looking = -out.looked.clamp_min(1e-6).log().mean()
        (loss + AUX_WEIGHT * binding + GUIDE_WEIGHT * looking).backward()
        stage.optimizer.step(plan.rate.at(step, plan.steps))
        stage.step = step + 1
        losses.append(float(loss.detach()))
        aux.append((float(binding.detach()), float(looking.detach())))
        bar.set_postfix(loss=f"{losses[-1]:.3f}", images=images)
        if stage.step % every == 0 or stage.step == plan.steps:
            wall, processor = stage.clock.read()
            report(
                f"step {stage.step}/{plan.steps}: loss {np.mean(losses[-50:]):.4f}, "
                f"binding, looking {np.mean(aux[-50:], 0).round(3)}, "
                f"{wall:.0f} s ({processor:.0f} s of processor) | {watch.measure(model, plan.largest(step))}"
            )
            stage.save()
    return losses
