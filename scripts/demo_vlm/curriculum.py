"""What is trained at which step. Everything counts steps, nothing reads a clock: a seed repeats the run.

First the vision tower alone learns to read digits, colours and shapes (throwaway heads), then the whole model answers
questions about one image, then two, four and eight. Several images in a prompt are learned on prompts of one task
mostly: there only the image's number tells which image is meant.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from demo_vlm.data import Context, Kind, Source

EASY: Mapping[Kind, float] = {"easy": 1}
PAGE: Mapping[Kind, float] = {"page": 1}
BOTH: Mapping[Kind, float] = {"easy": 1, "page": 1}
TASKS: tuple[tuple[Mapping[Kind, float], float], ...] = ((EASY, 0.45), (PAGE, 0.30), (BOTH, 0.25))


@dataclass(frozen=True)
class Shape:
    """Size of a batch: `contexts` prompts with `questions` questions each."""

    contexts: int
    questions: int


SHAPES = {
    1: Shape(10, 8),
    2: Shape(5, 10),
    3: Shape(4, 12),
    4: Shape(3, 14),
    6: Shape(2, 16),
    8: Shape(2, 18),
}


@dataclass(frozen=True)
class Phase:
    """`steps` batches whose number of images is drawn by the weights in `images`."""

    steps: int
    images: Mapping[int, float]


@dataclass(frozen=True)
class Rate:
    """Rate by step: a linear rise, a plateau, a linear fall to `floor` of the peak in the last `fall` steps."""

    fall: int
    peak: float = 2e-3
    rise: int = 40
    floor: float = 0.02

    def at(self, step: int, steps: int) -> float:
        """The rate of `step` (from 0) in a run of `steps`."""
        left = (steps - step) / self.fall
        return self.peak * min(1.0, (step + 1) / self.rise) * min(1.0, max(self.floor, left))


@dataclass(frozen=True)
class Plan:
    """A whole run.

    Attributes:
        warmup_steps, warmup_images: batches of single images for the vision tower, and their size.
        warmup_rate: the tower's learning rate there.
        phases: the curriculum after it.
        rate: learning rate of the curriculum.
    """

    warmup_steps: int
    warmup_images: int
    warmup_rate: Rate
    phases: tuple[Phase, ...]
    rate: Rate

    @property
    def steps(self) -> int:
        """Steps after the vision warm-up."""
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        """The phase that `step` belongs to."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise ValueError(f"step {step} lies beyond the plan's {self.steps}")

    def largest(self, step: int) -> int:
        """The most images a prompt has in the phase of `step`."""
        return max(self.phase(step).images)

    def images(self, step: int, rng: np.random.Generator) -> int:
        """Draw the number of images per prompt of batch `step`."""
        images = self.phase(step).images
        weights = np.array(list(images.values()), np.float64)
        return int(rng.choice(list(images), p=weights / weights.sum()))


PLAN = Plan(
    warmup_steps=700,
    warmup_images=32,
    warmup_rate=Rate(fall=250),
    phases=(
        Phase(400, {1: 1}),
        Phase(200, {1: 0.5, 2: 0.5}),
        Phase(1000, {1: 0.3, 2: 0.15, 4: 0.55}),
        Phase(400, {1: 0.25, 4: 0.5, 8: 0.25}),
    ),
    rate=Rate(fall=1100),
)


def draw(source: Source, images: int) -> list[Context]:
    """One batch of contexts with `images` images each."""
    shape = SHAPES[images]
    weights = np.array([weight for _, weight in TASKS])
    tasks = source.rng.choice(len(TASKS), size=shape.contexts, p=weights / weights.sum())
    return [source.context(images, TASKS[int(t)][0], shape.questions) for t in tasks]
