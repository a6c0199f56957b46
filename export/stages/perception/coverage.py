"""Visual-token pruning by coverage of the question and of the image: MMTok (arXiv 2508.18264)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.perception.perception import TAKEN, Guided


@dataclass(eq=False)
class Coverage(Guided):
    """Keep the tokens S that together cover the question's tokens and the image's best: greedy facility location of

        f(S) = mean over question tokens t of max_{s in S} p(s|t) + alpha * mean over tokens v of max_{s in S} p(s|v)

    where p(.|x) is the softmax over all visual tokens of the cosine similarity to x, divided by a temperature. Without
    a question the second term decides alone. What differs: the paper compares visual tokens as the vision tower gives
    them; here they are the projected ones in both terms, which every model family has.

    Attributes:
        text_temperature: of the similarity to the question's tokens, tau_t.
        visual_temperature: of the similarity between visual tokens, tau_v.
        alpha: weight of the visual term.
    """

    method: Literal["coverage"] = "coverage"
    text_temperature: float = 0.02
    visual_temperature: float = 0.2
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs = (self.text_temperature, self.visual_temperature, self.alpha)
        if not all(1e-3 <= knob <= 1e3 for knob in knobs):  # float32 resolves no more
            raise ValueError(f"text_temperature, visual_temperature and alpha must be from 0.001 to 1000, got {knobs}")

    def choose(self, features: Tensor, count: int, question: Tensor, asked: Tensor) -> Tensor:
        visual, text = normalize(features.float(), dim=2), normalize(question.float(), dim=2)
        on_text = (text @ visual.mT / self.text_temperature).softmax(dim=2)  # [batch, question_tokens, tokens]
        on_visual = (visual @ visual.mT / self.visual_temperature).softmax(dim=2)  # [batch, tokens, tokens]
        weight = asked / asked.sum(dim=1, keepdim=True).clamp(min=1)
        each = torch.cat([on_text * weight[..., None], on_visual * (self.alpha / visual.shape[1])], dim=1)
        kept, taken, covered = [], torch.zeros_like(each[:, 0]), torch.zeros_like(each[:, :, :1])
        for _ in range(count):
            gain = (each - covered).clamp(min=0).sum(dim=1)  # [batch, tokens]
            kept.append((gain + taken).argmax(dim=1, keepdim=True))
            taken = taken.scatter(1, kept[-1], TAKEN)
            covered = torch.maximum(covered, each.gather(2, kept[-1][:, None].expand(-1, each.shape[1], 1)))
        return torch.cat(kept, dim=1)
