"""One image's pixels -> the visual tokens that enter the language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engines.bundle import TensorSpec
from export.graphs.graph import Graph
from export.recipe import Recipe
from export.stages.perception.adaptive import coverage, entropy
from export.stages.perception.perception import Guided


class Vision(Graph):
    """One image's pixels -> its kept visual tokens and their places among the image's tokens.

    Takes the question too, `question` [1, Q, hidden_size] and `asked` [1, Q], if tokens are chosen by it. If perception
    is adaptive, also returns the kept tokens' `order` of choice, 0 the first, the `coverage` by the first 1, 2, ... of
    them, and the `entropy` of the image.
    """

    kind = "vision"

    def __init__(self, encoder: nn.Module, recipe: Recipe, height: int, width: int):
        super().__init__()
        self.encoder, self.perception = encoder, recipe.perception
        specs = [TensorSpec("pixel_values", "float32", [1, 3, height, width])]
        if isinstance(self.perception, Guided):
            with torch.no_grad():
                _, tokens, size = encoder(torch.zeros(specs[0].shape)).shape
            if self.perception.count(tokens) < tokens or self.perception.adaptive:
                asked = [1, self.perception.question_tokens]
                specs += [TensorSpec("question", "float32", [*asked, size]), TensorSpec("asked", "float32", asked)]
        self._takes(*specs)
        self.outputs = ["visual_tokens", "kept"]
        self.outputs += ["order", "coverage", "entropy"] if self.perception.adaptive else []

    def compute(self, pixel_values: Tensor, **question: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        features = self.encoder(pixel_values)  # [1, N, d]
        if self.perception.adaptive:
            chosen = self.perception.order(features, **question)  # [1, K]
            kept, order = chosen.sort(dim=1)
            known = {"order": order.int(), "coverage": coverage(features, chosen), "entropy": entropy(features)}
        else:
            kept, known = self.perception(features, **question), {}
        tokens = features
        if kept.shape[1] < features.shape[1]:
            tokens = features.gather(1, kept[..., None].expand(-1, -1, features.shape[2]))
        return {"visual_tokens": tokens, "kept": kept.int(), **known}
