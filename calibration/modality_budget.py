"""From the attention map to `[modality]`: what a modality says again and again is dropped first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibration.attention_map import KINDS, Array, AttentionMap
from calibration.samples import Sample, model_inputs
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.stages.modality import Density

LEAST = 1e-3  # what says the same in every token still has a density, and shares are quotients of them
DIGITS = 4


def densities(found: AttentionMap) -> Array:
    """Information density of text and visual tokens: 1 - mean cosine of two of them, of keys and values alike.

    Returns:
        Mean over the KV heads of each layer, [layers, kinds].

    Raises:
        UserError: the samples held no image, or only text of one token.
    """
    alike = (found.key_redundancy + found.value_redundancy).mean(axis=1) / 2
    if np.isnan(alike).any():
        kind = KINDS[int(np.isnan(alike).any(axis=0).argmax())]
        raise UserError(
            f"the attention map has no {kind} tokens to compare: measure it on samples with images and text"
        )
    return np.clip(1 - alike, LEAST, None)


def measured(found: AttentionMap, **knobs: Any) -> Density:
    """`[modality]` that shares out each layer's slots by the densities as they were measured.

    Args:
        knobs: of `Density`, such as its caps.
    """
    text, visual = np.round(densities(found).T.astype(float), DIGITS).tolist()
    return Density(visual_density=visual, text_density=text, **knobs)


def tokens(checkpoint: Checkpoint, samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Text and visual tokens of each sample's prompt, [samples, kinds]."""
    prompts = [model_inputs(checkpoint, sample)["input_ids"] == checkpoint.image_token_id for sample in samples]
    return np.array([[int((~visual).sum()), int(visual.sum())] for visual in prompts])


def kept(budget: Density, visual: float, text: float, keep: float) -> NDArray[np.float64]:
    """What is left of a prompt by a budget of measured densities, before rounding.

    Args:
        visual, text: tokens of the prompt.
        keep: share of them that every layer's store has room for.

    Returns:
        Share of the text and of the visual tokens that each layer keeps, [layers, kinds].
    """
    dense_v, dense_t = (torch.tensor(known) for known in (budget.visual_density, budget.text_density))
    v, t = torch.full_like(dense_v, visual), torch.full_like(dense_t, text)
    of_visual, of_text = budget.quotas(v, t, dense_v, dense_t, keep * (visual + text))
    return torch.stack([of_text / t, of_visual / v], dim=1).double().numpy()


def fragment(budget: Density) -> str:
    """The recipe's table."""
    lists = {"visual_density": budget.visual_density, "text_density": budget.text_density}
    default = Density()
    knobs = ("visual_cap", "text_cap", "many", "many_rate")
    lines = [f"{knob} = {getattr(budget, knob)}" for knob in knobs if getattr(budget, knob) != getattr(default, knob)]
    lines += [f"{name} = [{', '.join(f'{known:.{DIGITS}f}' for known in values)}]" for name, values in lists.items()]
    return "\n".join(["[modality]", 'method = "density"', *lines])
