"""Visual tokens merged inside the decoder, those most alike first: Token Merging, ToMe (arXiv 2210.09461)."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.shorten.shorten import Rows, Shorten, top
from export.stages.tokens import PADDING, VISUAL

FAR = 4.0  # taken from the cosine of tokens that are not of adjacent frames: below any that are
NEVER = -8.0  # in place of a cosine where there is no token to merge into
STAYS, FIRST_TO_GO = 1e4, -1e4  # scores above and below any cosine
SMALL = 1e-6  # of a token's count: it weighs something even if it was never looked at


@dataclass(eq=False)
class ToMe(Shorten):
    """Every round splits the visual tokens into two sets, finds each token of the first its nearest in the second, and
    merges as many of the nearest pairs as rows must go; of equally near ones the later.

    The merged token stays where its second one stood, at that position. Its hidden state is the weighted mean, and its
    bias log(n): in all later layers, and in the KV cache after them, attention counts it as the n tokens that it is.
    Tokens between the two see a little of what comes after them. What differs: the paper merges in every layer of a
    vision tower, by the keys; here all rounds are in one place of the decoder, by the hidden states.

    The two sets are every other visual token. A video's first round takes every other frame, the larger half first,
    and merges into the frames before and after as long as there is such a pair; with one image it is like any other.

    Attributes:
        layer: decoder layers that see the whole prompt; 0 merges the embeddings.
        rates: share of the bucket's rows that each round takes away, below 0.5, one or two rounds.
        queries: last rows of the prompt whose attention in the layer before weighs.
        weigh: in the mean, tokens weigh the attention that they received, or their number.
        video: whether images are frames.
    """

    method: Literal["tome"] = "tome"
    layer: int = 1
    rates: list[float] = field(default_factory=lambda: [0.25, 0.4])
    queries: int = 8
    weigh: Literal["attention", "count"] = "attention"
    video: bool = False

    def __post_init__(self) -> None:
        if not (1 <= len(self.rates) <= 2 and all(0 <= rate < 0.5 for rate in self.rates)):
            raise ValueError(f"rates must be one or two, each from 0 to below 0.5, got {self.rates}")
        if self.layer < 0 or self.queries < 1:
            raise ValueError(f"layer must be at least 0 and queries at least 1, got {self.layer} and {self.queries}")
        if self.layer == 0 and self.weigh == "attention":
            raise ValueError('before layer 1 there is no attention yet: weigh = "count", or a later layer')

    @property
    def needs_segments(self) -> bool:  # type: ignore[override]
        return self.video

    def lengths(self, rows: int) -> list[int]:
        left = [rows]
        for rate in self.rates:
            left.append(left[-1] - round(rate * left[-1]))
        return left[1:]

    def text(self, rows: int) -> int:
        # A round that takes away n rows needs n tokens in the first set, which is half of those that may be merged.
        left = [rows, *self.lengths(rows)]
        return min(2 * after - before for before, after in itertools.pairwise(left))

    def forward(self, rows: Rows) -> Rows:
        for number, count in enumerate(self.lengths(rows.index.shape[1])):
            rows = self._round(rows, count, self.video and number == 0)
        return rows

    def _round(self, rows: Rows, count: int, frames: bool) -> Rows:
        free = (rows.kinds == VISUAL) & ~rows.fixed
        source, far = _every_other_frame(free, rows.segments) if frames else (_odd(free), None)
        unit = normalize(rows.hidden.float(), dim=2)
        cosine = unit @ unit.mT if far is None else unit @ unit.mT - FAR * far
        cosine, target = torch.where((free & ~source)[:, None], cosine, NEVER).max(dim=2)  # [batch, rows]
        score = torch.where(source, -cosine, STAYS + rows.fixed.float())  # should too much go after all: no text
        index = top(torch.where(rows.kinds == PADDING, FIRST_TO_GO, score), count)

        kept = rows.take(index)
        gone = source & ((index[..., None] == torch.arange(source.shape[1])).float().sum(dim=1) == 0)
        into = (index[..., None] == target[:, None]) & gone[:, None]  # [batch, count, rows]
        moved = into * self._weight(rows)[:, None]
        part = moved / (moved.sum(dim=2) + self._weight(kept))[..., None]
        return dataclasses.replace(
            kept,
            hidden=kept.hidden * (1 - part.sum(dim=2, keepdim=True)) + part @ rows.hidden,
            bias=kept.bias + torch.log1p((into * rows.bias.exp()[:, None]).sum(dim=2) / kept.bias.exp().clamp(min=1)),
            attention=kept.attention + (into * rows.attention[:, None]).sum(dim=2),
        )

    def _weight(self, rows: Rows) -> Tensor:
        """What rows weigh in a mean, above 0, [batch, rows]; that of merged ones is the sum."""
        number = rows.bias.exp().clamp(min=SMALL)
        return number if self.weigh == "count" else rows.attention + SMALL * number


def _odd(free: Tensor) -> Tensor:
    """The first, third ... of the tokens `free`, bool [batch, rows]."""
    number = free.int().cumsum(dim=1)
    return free & (number - 2 * torch.div(number, 2, rounding_mode="trunc") == 1)


def _every_other_frame(free: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of odd and even frames, bool [batch, rows], or every other token if one of them is empty; and which
    pairs of tokens are not of adjacent frames, [batch, rows, rows], float32.
    """
    odd = frame - 2 * torch.div(frame, 2, rounding_mode="trunc") == 1
    first, second = free & odd, free & ~odd
    more, less = first.float().sum(dim=1, keepdim=True), second.float().sum(dim=1, keepdim=True)
    larger = (first & (more >= less)) | (second & (more < less))
    one = (more == 0) | (less == 0)
    return (_odd(free) & one) | (larger & ~one), ((frame[:, :, None] - frame[:, None]).abs() != 1).float()
