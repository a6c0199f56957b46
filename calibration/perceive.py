"""The prompt as it enters the language model by a recipe: perception has left some of its visual tokens out."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from calibration.evaluate import Prompt
from export.checkpoint import Checkpoint
from export.graphs import Vision
from export.recipe import Recipe
from export.stages.perception.perception import Guided
from export.stages.tokens import VISUAL


class Perceive:
    """Prunes prompts as a recipe's vision graph prunes their images.

    Where the runtime decides how many tokens an image keeps, it is the fewest that it may choose: the worst case.

    Attributes:
        count: visual tokens that an image keeps.
    """

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, later: bool = False):
        """
        Args:
            later: whether the question is not known yet.
        """
        self.later = later
        self.tokens, self.stage = checkpoint.image_tokens, recipe.perception
        fewest = [self.stage.counts(self.tokens)[0]]
        if self.stage.quota is not None:
            fewest.append(self.stage.count(self.tokens, self.stage.quota))
        self.count = min(fewest)
        if checkpoint.layouts:
            self.vision = Vision(checkpoint.encoder, recipe, checkpoint.layouts[0], checkpoint.decoder)

    def __call__(self, prompt: Prompt) -> Prompt:
        visual = prompt.kinds == VISUAL
        if self.count == self.tokens or not visual.any():
            return prompt
        features, order = self.order(prompt)
        kept = torch.zeros(features.shape[:2], dtype=torch.bool).scatter(1, order[:, : self.count], True)
        rows = (~visual).masked_scatter(visual, kept)
        return Prompt(**{f.name: getattr(prompt, f.name)[rows] for f in dataclasses.fields(Prompt)})

    def order(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """The visual tokens of a prompt with images, [images, N, hidden_size], and which of them come first."""
        visual = prompt.kinds == VISUAL
        features = prompt.embeddings[visual].unflatten(0, (-1, self.tokens))
        guidance = {}
        if isinstance(self.stage, Guided):
            asked = prompt.embeddings[int(visual.nonzero()[-1]) + 1 :][-self.stage.question_tokens :]
            question = asked.expand(len(features), -1, -1)
            guidance = {"question": question, "asked": torch.full(question.shape[:2], float(not self.later))}
        with torch.no_grad():
            if self.vision.layers and guidance:
                guidance["attention"] = self.vision.attention(features, **guidance)
            return features, self.stage.order(features, **guidance)
