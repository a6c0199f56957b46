"""Visual-token pruning by the question's attention, as FastV (arXiv 2403.06764), but before the decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.perception.perception import Guided, best

SPREAD = 0.5  # standard deviation of the centre's weight, in halves of the image's side


@dataclass(eq=False)
class Attention(Guided):
    """Keep the tokens that the question looks at most, times how salient their place is.

    With `layers`, attention is that of the question's last token in these layers of the decoder, the mean over them and
    their heads; the vision graph then runs the decoder as far as the last of them on the image and the question alone,
    and what it reads is raised to the power 1 / temperature. Without, it needs no decoder: the softmax over the visual
    tokens of their cosine similarity to a question token divided by the temperature, averaged over the question's
    tokens. Without a question attention is the same everywhere, and saliency decides alone. Saliency is
    (1 + centre * gaussian) * (1 + detail * energy): the Gaussian is 1 at the image's centre, and the energy is a
    token's mean squared difference from its neighbours in the grid, 1 for the token with most of it. A number of tokens
    that is no square is taken for one row.

    Attributes:
        temperature: the lower it is, the fewer tokens are looked at; None: 0.1 for similarity, 1 for the decoder.
        centre: weight of the centre of the image; 0 is off.
        detail: weight of tokens that differ from their neighbours; 0 is off.
        layers: of the decoder, from 0; two or three from the middle on see most. They cost as much as their share of a
            prefill of one image.
    """

    method: Literal["attention"] = "attention"
    temperature: float | None = None
    centre: float = 0.5
    detail: float = 0.5
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        sharp = self.temperature is None or 1e-3 <= self.temperature <= 1e3
        if not (sharp and 0 <= self.centre <= 1e3 and 0 <= self.detail <= 1e3):
            raise ValueError(
                "temperature must be from 0.001 to 1000, centre and detail from 0 to 1000, "
                f"got {self.temperature}, {self.centre} and {self.detail}"
            )
        if len({*self.layers}) < len(self.layers) or min(self.layers, default=0) < 0:
            raise ValueError(f"layers must be different numbers from 0, got {list(self.layers)}")

    def choose(
        self, features: Tensor, count: int, question: Tensor, asked: Tensor, attention: Tensor | None = None
    ) -> Tensor:
        features = features.float()
        if attention is None:
            similarity = normalize(question.float(), dim=2) @ normalize(features, dim=2).mT
            each = (similarity / (self.temperature or 0.1)).softmax(dim=2)  # [batch, question_tokens, tokens]
            looked_at = (each * asked[..., None]).sum(dim=1)  # the sum ranks the tokens as the mean does
        else:
            tiny = torch.finfo(torch.float32).tiny
            looked_at = (attention / attention.amax(dim=1, keepdim=True).clamp(min=tiny)) ** (
                1 / (self.temperature or 1)
            )
        looked_at = torch.where(asked.sum(dim=1, keepdim=True) == 0, 1.0, looked_at)  # nothing was asked
        return best(looked_at * self.saliency(features), count)

    def saliency(self, features: Tensor) -> Tensor:
        """Weight of every token, [batch, tokens], at least 1; features [batch, tokens, hidden_size]."""
        rows, columns = _grid(features.shape[1])
        energy = _energy(features, rows, columns)
        energy = energy / energy.amax(dim=1, keepdim=True).clamp(min=torch.finfo(energy.dtype).tiny)
        return (1 + self.centre * _gaussian(rows, columns)) * (1 + self.detail * energy)


def _grid(tokens: int) -> tuple[int, int]:
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else (1, tokens)


def _gaussian(rows: int, columns: int) -> Tensor:
    """[tokens], by the distance from the centre of the grid."""
    y, x = (torch.tensor([(2 * i + 1) / size - 1 for i in range(size)]) for size in (rows, columns))
    return torch.exp(-(y[:, None] ** 2 + x**2) / (2 * SPREAD**2)).flatten()


def _energy(features: Tensor, rows: int, columns: int) -> Tensor:
    """Mean squared difference of features [batch, tokens, hidden_size] from up to four neighbours, [batch, tokens]."""
    place = torch.arange(rows * columns).unflatten(0, (rows, columns))
    energy, number = torch.zeros(1), torch.zeros(rows * columns)
    for y, x in ((0, 1), (0, -1), (1, 0), (-1, 0)):
        # Beyond the edge a token is its own neighbour, with a difference of 0, and does not count.
        row, column = (torch.arange(rows) + y).clamp(0, rows - 1), (torch.arange(columns) + x).clamp(0, columns - 1)
        near = place[row][:, column].flatten()
        energy = energy + (features.index_select(1, near) - features).square().mean(dim=2)
        number = number + (near != place.flatten())
    return energy / number.clamp(min=1)
