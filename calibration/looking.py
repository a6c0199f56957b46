"""What one sample adds to the attention map: its answer is read behind its prompt, and every layer is looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from calibration.attention_map import KINDS
from calibration.evaluate import Prompt, prompt_of
from calibration.observe import forward, masks
from calibration.samples import Sample, model_inputs, shortened
from calibration.sensitivity import read
from calibration.statistics import attention, cache, persistence, similarity
from engines.errors import UserError
from export.attention import mix_values
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.importance import Frequency
from export.stages.importance.frequency import among_best
from export.stages.importance.importance import Observation
from export.stages.protect import Protect
from export.stages.tokens import TEXT, VISUAL

HELD = 0.8  # share of a query's attention that a locality radius holds
TOP_PATCHES = 10

Sums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), both of the shape that the mean has


def answered(checkpoint: Checkpoint, sample: Sample) -> tuple[Prompt, int]:
    """The prompt with its answer behind it, and how many tokens the answer has."""
    prompt = prompt_of(checkpoint, model_inputs(checkpoint, sample))
    if sample.answer:
        ids = checkpoint.processor.tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
        rest = checkpoint.embedding[ids]
    else:
        rest = read(checkpoint, Recipe("whole"), prompt, later=False).rest[0]
    more, reach = len(rest), checkpoint.max_positions()
    if len(prompt) + more > reach:
        raise UserError(
            f"sample {shortened(sample.prompt)!r} has {len(prompt) + more} tokens, the model reads {reach}: shorten it"
        )
    return prompt.followed(rest), more


def read_sample(checkpoint: Checkpoint, sample: Sample, rows: int, rng: np.random.Generator) -> dict[str, Tensor]:
    """What one sample adds: sums and counts, float64, smallest and largest rows, and some rows as they are.

    Args:
        rows: of each kind that are kept, at most.
    """
    prompt, answer = answered(checkpoint, sample)
    kept = torch.zeros(len(prompt), dtype=torch.bool)
    for number in (TEXT, VISUAL):
        places = (prompt.kinds == number).nonzero()[:, 0].numpy()
        kept[rng.choice(places, min(rows, len(places)), replace=False)] = True
    look = Look(prompt.kinds, answer + 1, kept, masks(checkpoint.decoder, prompt, answer))
    forward(checkpoint.decoder, prompt, look)
    part = {"tokens": torch.tensor(len(prompt)), "steps": torch.tensor(answer + 1)}
    for name in look.sums[0]:
        layers = [layer[name] for layer in look.sums if name in layer]  # the last one has no next layer
        summed, counts = zip(*layers, strict=True)
        part |= {f"sum {name}": torch.stack(summed), f"count {name}": torch.stack(counts)}
    for name, (summed_up, count) in token_sums(*look.received(), prompt.kinds).items():
        part |= {f"sum model_{name}": summed_up[0], f"count model_{name}": count[0]}
    part |= {name: torch.stack([layer[name] for layer in look.rows]) for name in look.rows[0]}
    return {name: tensor.contiguous() for name, tensor in part.items()}


class Look:
    """Attention of a prompt whose every layer is looked at, the layers in their order.

    Attributes:
        sums: what a layer adds.
        rows: smallest and largest keys and values of a layer, and those that are kept.
    """

    def __init__(self, kinds: Tensor, steps: int, kept: Tensor, masks: Sequence[Tensor]):
        self.kinds, self.steps, self.kept, self.masks = kinds, steps, kept, masks
        self.sums: list[Sums] = []
        self.rows: list[dict[str, Tensor]] = []
        self.before: Tensor | None = None  # what the steps look at in the layer before
        self.active = self.mass = torch.zeros(len(kinds))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        kinds = self.kinds
        mask = self.masks[layer]
        seen = Observation(query, key, mask, mask == 0, kinds[None], scale)
        weights = seen.attention[0]  # [kv_heads, group, tokens, tokens]
        steps = weights[:, :, -self.steps :]
        best = among_best(steps, steps, Frequency.share)
        mixed = bool((kinds == TEXT).any() and (kinds == VISUAL).any())
        self.sums.append(
            attention_sums(weights.flatten(0, 1), kinds, self.steps)
            | token_sums(best.mean(dim=(1, 2)), steps.mean(dim=(1, 2)), kinds)
            | cache_sums(key[0], value[0], kinds)
            | {"alignment": by_kind(Protect().aligned(seen)[0], kinds, mixed)}
        )
        self.rows.append(rows_of("key", key[0], kinds, self.kept) | rows_of("value", value[0], kinds, self.kept))
        self.active, self.mass = self.active + best.mean(dim=(0, 1, 2)), self.mass + steps.mean(dim=(0, 1, 2))
        after = steps.flatten(0, 1)
        if self.before is not None:
            mean = similarity.adjacent_layers(*(heads.mean(dim=0, keepdim=True) for heads in (self.before, after)))
            alike = total(similarity.adjacent_layers(self.before, after))
            self.sums[-2] |= {"head_layer_similarity": alike, "layer_similarity": total(mean[0, 0])}
        self.before = after
        return mix_values(seen.attention, value)

    def received(self) -> tuple[Tensor, Tensor]:
        """Frequency and score of every token with all layers and heads as observations, [1, tokens] each."""
        return (self.active / len(self.sums))[None], (self.mass / len(self.sums))[None]


def total(figures: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum over the last axis of the figures that count, bool [last axis], and how many these are."""
    counted = torch.ones(figures.shape[-1], dtype=torch.bool) if counted is None else counted
    summed = torch.where(counted, figures.double(), 0.0).sum(dim=-1)
    return summed, torch.full_like(summed, int(counted.sum()))


def by_kind(figures: Tensor, kinds: Tensor, counts: bool = True) -> tuple[Tensor, Tensor]:
    """`total` over the tokens of each kind, [..., tokens] -> [..., kinds]."""
    each = [total(figures, (kinds == number) & counts) for number in (TEXT, VISUAL)]
    return torch.stack([s for s, _ in each], dim=-1), torch.stack([n for _, n in each], dim=-1)


def attention_sums(weights: Tensor, kinds: Tensor, steps: int) -> Sums:
    """What a layer's queries look at, by query head.

    Args:
        weights: [heads, tokens, tokens].
        kinds: TEXT or VISUAL, [tokens].
        steps: of the queries, the last so many answer.
    """
    order, visual = torch.arange(len(kinds)), kinds == VISUAL
    sees_visual = visual.cumsum(dim=0) > 0
    sees_both = sees_visual & ((~visual).cumsum(dim=0) > 0)
    asks = ~visual & sees_visual
    answering = weights[:, -steps:]
    share = [
        [total(attention.mass(weights, kinds == seen), (kinds == own) & sees_both) for seen in (TEXT, VISUAL)]
        for own in (TEXT, VISUAL)
    ]
    sums = {
        "sink_strength": total(attention.mass(weights, order < Protect.sinks), order >= Protect.sinks),
        "locality_radius": total(attention.locality_radius(weights, HELD)),
        "coverage": total(attention.coverage(answering, HELD)),
        "entropy": total(attention.entropy(weights)),
        "answer_entropy": total(attention.entropy(answering) / (order[-steps:] + 1).clamp(min=2).log()),
        "modality_share": (
            torch.stack([torch.stack([pair[0] for pair in row], dim=-1) for row in share], dim=-2),
            torch.stack([torch.stack([pair[1] for pair in row], dim=-1) for row in share], dim=-2),
        ),
        "step_similarity": total(similarity.adjacent_steps(answering)),
    }
    best = total(attention.top_mass(weights, visual, TOP_PATCHES), asks)[0]
    return sums | {"top_patch_share": (best, total(attention.mass(weights, visual), asks)[0])}


def token_sums(frequency: Tensor, score: Tensor, kinds: Tensor) -> Sums:
    """What the tokens of a prompt receive, [kv_heads, tokens] each."""
    together = persistence.correlation(frequency, score)
    return {
        "frequency": by_kind(frequency, kinds),
        "score": by_kind(score, kinds),
        "anchors": by_kind(persistence.anchors(frequency), kinds),
        "transients": by_kind(persistence.transients(frequency), kinds),
        "frequency_score_correlation": (together.nan_to_num(), (~together.isnan()).double()),
    }


def cache_sums(key: Tensor, value: Tensor, kinds: Tensor) -> Sums:
    """What is cached of a prompt, [kv_heads, tokens, head_dim] each."""
    sums: Sums = {"value_norm": by_kind(value.norm(dim=-1), kinds)}
    sums["value_norm_square"] = by_kind(value.double().square().sum(dim=-1), kinds)
    for name, rows in (("key", key), ("value", value)):
        sums[f"{name}_similarity"] = total(similarity.heads(rows))
        parts = [rows[:, kinds == number] for number in (TEXT, VISUAL)]
        pairs = torch.tensor([float(part.shape[1] > 1) for part in parts]).double()
        cosines = torch.stack([cache.redundancy(part) for part in parts], dim=-1).double()
        sums[f"{name}_redundancy"] = (cosines * pairs, pairs.expand_as(cosines))
        for power in (1, 2):
            summed, count = by_kind(rows.double().mT ** power, kinds)  # [kv_heads, head_dim, kinds]
            sums[f"{name}_power{power}"] = (summed.mT, count.mT)
    return sums


def rows_of(what: str, rows: Tensor, kinds: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Smallest and largest number of every channel, by kind, and the rows that are kept; nothing of a kind not there.

    Args:
        rows: [kv_heads, tokens, head_dim].
        kept: bool [tokens].
    """
    found = {}
    for name, number in zip(KINDS, (TEXT, VISUAL), strict=True):
        if (its := kinds == number).any():
            found[f"min {what} {name}"] = rows[:, its].amin(dim=1)
            found[f"max {what} {name}"] = rows[:, its].amax(dim=1)
            found[f"rows {what} {name}"] = rows[:, its & kept]
    return found
