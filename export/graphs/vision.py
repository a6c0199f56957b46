"""One image's pixels -> the visual tokens that enter the language model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engines.bundle import Layout, TensorSpec
from export.attention import LOWEST, attention_by, attention_logits, blocks_of, full_attention, visible
from export.graphs.graph import Graph, added
from export.graphs.state import Decoder
from export.recipe import Recipe
from export.stages.perception import Attention
from export.stages.perception.adaptive import coverage, entropy
from export.stages.perception.perception import Guided
from export.stages.tokens import TEXT, VISUAL


class Vision(Graph):
    """One image's pixels -> its kept visual tokens and their places among the image's tokens.

    Of an encoder with taps for DeepStack also those of the kept tokens, `deepstack` [taps, K, hidden_size].

    Takes the question too, `question` [1, Q, hidden_size] and `asked` [1, Q], if tokens are chosen by it. If perception
    is adaptive, also returns the kept tokens' `order` of choice, 0 the first, the `coverage` by the first 1, 2, ... of
    them, and the `entropy` of the image.
    """

    kind = "vision"

    def __init__(self, encoder: nn.Module, recipe: Recipe, layout: Layout, decoder: Decoder | None = None):
        """
        Args:
            decoder: needed by a perception that reads the attention of some of its `layers`, and for DeepStack.
        """
        super().__init__()
        self.encoder, self.perception = encoder, recipe.perception
        self.layers = self.perception.layers if isinstance(self.perception, Attention) else ()
        self.grid = layout.grid
        if self.layers:
            assert decoder is not None
            self.decoder, self.language_model = decoder, decoder.language_model
        specs = [TensorSpec("pixel_values", "float32", layout.pixel_values)]
        if isinstance(self.perception, Guided):
            with torch.no_grad():
                _, tokens, size = split(encoder(torch.zeros(specs[0].shape)))[0].shape
            if self.perception.count(tokens) < tokens or self.perception.adaptive:
                asked = [1, self.perception.question_tokens]
                specs += [TensorSpec("question", "float32", [*asked, size]), TensorSpec("asked", "float32", asked)]
        self._takes(*specs)
        self.outputs = ["visual_tokens", "kept", *(["deepstack"] if decoder and decoder.deepstack else [])]
        self.outputs += ["order", "coverage", "entropy"] if self.perception.adaptive else []

    def compute(self, pixel_values: Tensor, **question: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        features, deepstack = split(self.encoder(pixel_values))  # [1, N, d], [taps, N, d]
        if self.layers and question:
            question["attention"] = self.attention(features, **question, deepstack=deepstack)
        if self.perception.adaptive:
            chosen = self.perception.order(features, **question)  # [1, K]
            kept, order = chosen.sort(dim=1)
            known = {"order": order.int(), "coverage": coverage(features, chosen), "entropy": entropy(features)}
        else:
            kept, known = self.perception(features, **question), {}
        tokens = features
        if kept.shape[1] < features.shape[1]:
            tokens = features.gather(1, kept[..., None].expand(-1, -1, features.shape[2]))
            deepstack = deepstack.gather(1, kept[..., None].expand(len(deepstack), -1, features.shape[2]))
        return {"visual_tokens": tokens, "kept": kept.int(), "deepstack": deepstack, **known}

    def attention(self, features: Tensor, question: Tensor, asked: Tensor, deepstack: Tensor | None = None) -> Tensor:
        """What the question's last token attends to, mean over the chosen layers and their heads, [1, N].

        The decoder reads the image and then the question, nothing before them. What it does behind the last of the
        layers is no part of the graph, since nothing depends on it.
        """
        count, length = features.shape[1], question.shape[1]
        padding = length - asked.sum(dim=1, keepdim=True).long()
        order = torch.arange(count + length)
        positions = torch.where(order >= count, (order - padding).clamp(min=0), order)
        real = torch.cat([torch.ones(features.shape[:2]), asked], dim=1) > 0
        decoder, image, seen = self.decoder, torch.where(order < count, VISUAL, TEXT)[None], []
        turned = decoder.turned(positions)
        if decoder.mrope:
            ids = torch.from_numpy(decoder.mrope.position_ids(np.ones(count, bool), [self.grid]))[:, None].long()
            asks = ids.max() + 1 + (order[:length] - padding).clamp(min=0)
            turned = torch.cat([ids, asks.expand(3, -1, -1)], dim=2)
        blocks = blocks_of(decoder.block, image, image)
        windows = {decoder.sliding_window(layer) for layer in range(decoder.num_layers)}
        masks = {
            window: torch.where(visible(real, positions, window, decoder.block, blocks), 0.0, LOWEST)
            for window in windows
        }  # [1, N + Q, N + Q]

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            bias = masks[decoder.sliding_window(layer)]
            if layer in self.layers:
                logits = attention_logits(query[:, :, -1:], key, scale) + bias[:, None, None, -1:]
                seen.append(logits.softmax(dim=-1)[:, :, :, 0, :count].mean(dim=(1, 2)))
            return full_attention(query, key, value, bias, scale)

        taps = None if deepstack is None else pad(deepstack, (0, 0, 0, length))[:, None]
        with attention_by(attention), added(self.language_model, taps):
            self.language_model(
                inputs_embeds=torch.cat([features, question], dim=1),
                position_ids=turned,
                attention_mask=None,
                use_cache=False,
            )
        return torch.stack(seen).mean(dim=0)


def split(encoded: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What an encoder returns: visual tokens [1, N, hidden_size] and taps, of most encoders none, [taps, N, d]."""
    if isinstance(encoded, Tensor):
        return encoded, encoded[:0]
    return encoded
