"""The interface of shortening: between two decoder layers a prompt of S rows becomes one of S' < S."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

import export.operators  # noqa: F401  registers torch.ops.unicache
from export.stages.stage import Stage


@dataclass
class Rows:
    """A prompt's rows between two decoder layers, left-padded.

    Attributes:
        hidden: hidden states, [batch, rows, hidden_size], float32.
        index: of each row among the prompt's, ascending, [batch, rows], int64.
        kinds: PADDING, TEXT or VISUAL, [batch, rows], int32.
        bias: 0 a token, log(n) n merged, -inf padding, [batch, rows], float32.
        attention: what a row received in the layer before from the last `queries` rows, summed over them, mean over
            the heads, [batch, rows], float32; 0 where `queries` is 0.
        segments: number of a visual token's image, [batch, rows], int32; 0 unless the stage `needs_segments`.
        fixed: rows that must stay as they are: text, and the window's; bool [batch, rows].
    """

    hidden: Tensor
    index: Tensor
    kinds: Tensor
    bias: Tensor
    attention: Tensor
    segments: Tensor
    fixed: Tensor

    def take(self, index: Tensor) -> Rows:
        """The rows at these places, [batch, count], int64."""
        return Rows(**{f.name: take(getattr(self, f.name), index) for f in fields(self)})


class Shorten(Stage):
    """Base of the methods. A subclass implements `forward`, and `lengths` and `text` where it works otherwise.

    The bucket says how many rows go on, not the prompt: padding goes first, then visual tokens until the rest fits.
    A prompt of at most that many tokens loses none. Text is never dropped or merged, so a prompt must not have more
    of it than fits: `text` is the limit, which the runtime applies before anything runs.

    Attributes:
        layer: decoder layers that see the whole prompt; the prompt is shortened before the next one.
        queries: last rows of the prompt whose attention in the layer before is asked for; 0 for none.
    """

    layer: int
    queries: int

    def lengths(self, rows: int) -> list[int]:
        """Rows that are left of a bucket's `rows` after each round; the last number is S'."""
        return []

    def text(self, rows: int) -> int:
        """Fixed rows that a full bucket of `rows` may have, at most."""
        return [rows, *self.lengths(rows)][-1]

    def forward(self, rows: Rows) -> Rows:
        """The S' rows that go on to the later layers, in their order."""
        raise NotImplementedError


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows of [batch, rows, ...] at `index` [batch, count]."""
    for size in tensor.shape[2:]:
        index = index[..., None].expand(*index.shape, size)
    return tensor.gather(1, index)


def top(score: Tensor, count: int) -> Tensor:
    """The `count` highest of `score` [batch, rows], of equal ones the first: ascending indices [batch, count]."""
    mine = score[:, None]
    row, place = mine[..., None], mine.int()  # what is gathered does not matter, only where it lay
    return torch.ops.unicache.topk_gather(mine, row, row, place, mine, count)[-1][:, 0]
