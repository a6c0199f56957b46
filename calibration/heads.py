"""How alike the KV heads of each layer are, and what a layer's output loses where some of them become one.

Heads that are alike may still be told apart by their queries, and heads that are not may matter to none: what counts is
how far the layer's attention output moves. The samples tell it of every step of merging, each layer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from calibration.observe import observe, run
from calibration.samples import Sample
from export.attention import full_attention
from export.checkpoint import Checkpoint
from export.stages.heads import HeadMoments, Heads, attentions
from export.stages.importance.importance import unit


def head_moments(
    checkpoint: Checkpoint, samples: Sequence[Sample], progress: Callable[[], None] = lambda: None
) -> list[HeadMoments]:
    """Run the samples through the decoder and compare the keys and values of the same tokens, one result a layer.

    Args:
        progress: called once a sample.
    """
    total: dict[int, tuple[Tensor, Tensor]] = {}

    def see(layer: int, key: Tensor, value: Tensor) -> None:
        key, value = unit(key), unit(value)
        pairs = torch.complex(*key.chunk(2, dim=-1))  # [kv_heads, tokens, head_dim / 2]
        moments = torch.einsum("itd,jtd->ijd", pairs.conj(), pairs), torch.einsum("itd,jte->ijde", value, value)
        known = total.get(layer)
        total[layer] = moments if known is None else (known[0] + moments[0], known[1] + moments[1])

    tokens = observe(checkpoint, samples, see, progress)
    layers = range(checkpoint.decoder.num_layers)
    return [HeadMoments(total[layer][0] / tokens, total[layer][1] / tokens) for layer in layers]


@dataclass(frozen=True)
class Merged:
    """A layer some of whose KV heads are one.

    Attributes:
        similarity: of the least alike heads that are one; 1 where there are none.
        groups: its heads, those that are one together.
        error: E |o - o'|^2 / E |o|^2 of the attention's output o, behind o_proj, over all tokens of the samples.
    """

    similarity: float
    groups: list[list[int]]
    error: float


def predict(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    heads: Heads,
    moments: Sequence[HeadMoments],
    progress: Callable[[], None] = lambda: None,
) -> list[list[Merged]]:
    """What each step of merging costs each layer, from no heads merged on, the most alike first.

    Layers are tried one by one: what a layer is given does not change by what is merged in those before it.

    Args:
        heads: how they are aligned, and how many become one at most; its thresholds are not looked at.
        moments: of the checkpoint's decoder, from `head_moments`.
        progress: called once a sample.

    Raises:
        UserError: the heads of this model cannot be merged.
    """
    layers, model = range(checkpoint.decoder.num_layers), checkpoint.decoder.language_model
    heads.check(model, moments)
    steps = [list(heads.merges(known.similarity(heads.align))) for known in moments]
    outputs = [attention.o_proj for attention in attentions(model, len(layers))]
    errors, sizes = [torch.zeros(len(layer), dtype=torch.float64) for layer in steps], [0.0 for _ in layers]

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor) -> Tensor:
        heads_of = (key.shape[1], -1)
        plain = full_attention(query, key, value, bias, scale)
        sizes[layer] += _power(outputs[layer](_rows(plain)))
        queries, told = query.unflatten(1, heads_of), plain.unflatten(1, heads_of)  # [1, kv_heads, group, tokens, ...]
        moved, before = torch.zeros_like(told), [[head] for head in range(key.shape[1])]
        for step, (_, groups) in enumerate(steps[layer]):
            (group,) = (group for group in groups if group not in before)  # one a step: the rest stays as it was
            keys, values = pool(moments[layer], group, heads.align, key[0], value[0])
            its = full_attention(queries[:, group].flatten(1, 2), keys[None], values[None], bias, scale)
            moved[:, group] = its.unflatten(1, (len(group), -1)) - told[:, group]
            errors[layer][step] += _power(linear(_rows(moved.flatten(1, 2)), outputs[layer].weight))
            before = groups
        return plain

    run(checkpoint, samples, attention, progress)
    return [
        [Merged(1.0, [[head] for head in range(len(moments[layer].keys))], 0.0)]
        + [
            Merged(similarity, groups, error / sizes[layer])
            for (similarity, groups), error in zip(steps[layer], errors[layer].tolist(), strict=True)
        ]
        for layer in layers
    ]


def pool(known: HeadMoments, group: Sequence[int], align: bool, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What the queries of each head of a group see in place of its keys and values: the mean, turned back to the head.

    Args:
        key, value: of all heads, [kv_heads, tokens, head_dim].

    Returns:
        [heads of the group, tokens, head_dim] each.
    """
    if not align:
        keys, values = (rows[group].mean(dim=0).expand(len(group), -1, -1) for rows in (key, value))
        return keys, values
    one = torch.eye(key.shape[-1])
    turns = [(one, one), *(known.turns(head, group[0]) for head in group[1:])]
    turned = []
    for rows, turn in zip((key, value), (torch.stack(both) for both in zip(*turns, strict=True)), strict=True):
        turned.append((rows[group] @ turn.mT).mean(dim=0) @ turn)
    return turned[0], turned[1]


def choose(steps: Sequence[Merged], limit: float) -> tuple[Merged, float]:
    """The fewest heads of a layer whose error is at most the limit, and the threshold that makes them.

    The threshold lies halfway between the last heads that are merged and the next: other samples move both a little.
    """
    alike = [1.01, *(step.similarity for step in steps[1:]), -2.0]  # no two heads are as the first or the last
    for number in reversed(range(len(steps))):
        threshold = round((alike[number] + alike[number + 1]) / 2, 4)
        if steps[number].error <= limit and alike[number + 1] < threshold <= alike[number]:
            return steps[number], threshold
    raise ValueError(f"the limit must be at least 0, got {limit}")


def _rows(output: Tensor) -> Tensor:
    """Heads side by side, as o_proj takes them: [1, heads, tokens, head_dim] -> [1, tokens, heads * head_dim]."""
    return output.transpose(1, 2).flatten(2)


def _power(rows: Tensor) -> float:
    return float(rows.double().square().sum())
