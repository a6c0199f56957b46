"""What becomes of an image inside the model: how patches are looked at, who keeps them, where they are cached."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibration.evaluate import Eager, Prompt
from calibration.looking import answered
from calibration.observe import forward, masks
from calibration.perceive import Perceive
from calibration.samples import Sample, model_inputs, opened
from export.attention import attention_logits, full_attention
from export.buckets import bucket_length
from export.checkpoint import Checkpoint
from export.pipeline import Prepared
from export.recipe import Recipe
from export.stages import perception
from export.stages.tokens import TEXT, VISUAL


@dataclass(frozen=True)
class Look:
    """One image of a prompt, as the model sees it.

    Attributes:
        sample: whose image it is, `number` of them, from 0.
        picture: its pixels behind the preprocessor, uint8 [height, width, 3].
        places: of its tokens in the prompt, [tokens].
        asking, answering: attention on its tokens by the question's tokens, and by the steps of the answer, mean over
            these, [layers, heads, tokens].
        prompt: without the answer.
    """

    sample: Sample
    number: int
    picture: NDArray[np.uint8]
    places: Tensor
    asking: NDArray[np.float32]
    answering: NDArray[np.float32]
    prompt: Prompt


def look(checkpoint: Checkpoint, sample: Sample) -> Look:
    """Read a sample and its answer, the model's own if it has none; of its images, the one most looked at."""
    prompt, more = answered(checkpoint, sample)
    visual = (prompt.kinds == VISUAL).nonzero()[:, 0].unflatten(0, (-1, checkpoint.image_tokens))
    steps = len(prompt) - more - 1  # the prompt's last token says the answer's first
    rows = torch.arange(int(visual.max()) + 1, len(prompt))
    asking, answering = rows < steps, rows >= steps
    asking = asking if asking.any() else answering  # a template may write nothing behind the images but the last token
    known, seen = masks(checkpoint.decoder, prompt, more), []

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        mask = known[layer]
        weights = (attention_logits(query[:, :, rows], key, scale)[0] + mask[0, rows]).softmax(dim=-1)
        by_rows = weights.flatten(0, 1)[:, :, visual]  # [heads, rows, images, tokens]
        seen.append(torch.stack([by_rows[:, own].mean(dim=1) for own in (asking, answering)]))
        return full_attention(query, key, value, mask, scale)

    forward(checkpoint.decoder, prompt, attention)
    by_layer = torch.stack(seen)  # [layers, 2, heads, images, tokens]
    number = int(by_layer[:, 1].sum(dim=(0, 1, 3)).argmax())
    picture = picture_of(checkpoint, sample, number)
    asked, said = by_layer[:, :, :, number].unbind(dim=1)
    whole = Prompt(**{f.name: getattr(prompt, f.name)[: steps + 1] for f in dataclasses.fields(Prompt)})
    return Look(sample, number, picture, visual[number], asked.numpy(), said.numpy(), whole)


def picture_of(checkpoint: Checkpoint, sample: Sample, number: int) -> NDArray[np.uint8]:
    """What the preprocessor makes of a sample's image: the pixels, or where those are cut to pieces what it cuts."""
    p, shape = checkpoint.preprocessor, checkpoint.layouts[0].pixel_values
    assert p  # there are layouts
    if len(shape) != 4 or shape[0] > 1:
        return np.asarray(checkpoint.brought(opened(sample.images[number])))
    pixels = model_inputs(checkpoint, sample)["pixel_values"][number]
    levels = pixels.double() * torch.tensor(p.std)[:, None, None] + torch.tensor(p.mean)[:, None, None]
    return (levels / p.rescale).round().clamp(0, 255).to(torch.uint8).movedim(0, -1).numpy()


def selectors() -> dict[str, type[perception.Methods]]:
    """Every method of `[perception]`, by name."""
    return {typing.get_args(typing.get_type_hints(m)["method"])[0]: m for m in typing.get_args(perception.Methods)}


def selected(checkpoint: Checkpoint, seen: Look, method: type[perception.Methods], keep: float) -> NDArray[np.bool_]:
    """Which of the image's tokens a selector keeps, the question known, [tokens]."""
    pruned = Perceive(checkpoint, Recipe("report", perception=method(keep=keep)))(seen.prompt)
    return torch.isin(seen.places, pruned.positions).numpy()


def cached(checkpoint: Checkpoint, seen: Look, recipe: Recipe, prepared: Prepared) -> NDArray[np.float64] | None:
    """The share of layers and KV heads that hold each of the image's tokens behind prefill, [tokens].

    None: the level keeps no positions, as one that drops nothing.

    Raises:
        UserError: the prompt does not fit the recipe.
    """
    images = int((seen.prompt.kinds == VISUAL).sum()) // checkpoint.image_tokens
    length = bucket_length(checkpoint, recipe, images, int((seen.prompt.kinds == TEXT).sum()))
    run = Eager(prepared.decoder, recipe, length, statistics=prepared.statistics)
    if not run.state.compacts:
        return None
    run.prefill([Perceive(checkpoint, recipe)(seen.prompt)])
    in_window = torch.isin(seen.places, run.tensors["window_positions"])
    shares = []
    for layer in range(prepared.decoder.num_layers):
        held = (run.tensors[f"store_positions.{layer}"][0, :, None] == seen.places[:, None]).any(dim=2)
        shares.append((held | in_window).double().mean(dim=0))
    return torch.stack(shares).mean(dim=0).numpy()


def choose(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Samples of every task in turn, those with the fewest images first, no image twice."""
    chosen: list[Sample] = []
    by_images = sorted((sample for sample in samples if sample.images), key=lambda sample: len(sample.images))
    while len(chosen) < most:
        tasks, known = [sample.task for sample in chosen], {path for sample in chosen for path in sample.images}
        free = [sample for sample in by_images if not known & {*sample.images}]
        if not free:
            break
        chosen.append(min(free, key=lambda sample: tasks.count(sample.task)))
    return chosen
