"""Encoders that are the model's own chain of vision tower, choice of features and projector, for one picture.

`features` does for one picture of a fixed size and for tiles that need no packing (InternVL, GOT-OCR2, Aya Vision,
PaliGemma, Gemma 3), `packed` for tiles whose padding is cut off (LLaVA-NeXT, LLaVA-OneVision), `llava` for CLIP's tower
and Pixtral's, `Mistral3` for Pixtral's with merged tokens, `Tiles` for Idefics3 and SmolVLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.layout import Layout
from export.families.parts import Constant, output_of, segmented, with_parts


class Features(nn.Module):
    """`get_image_features` of the model itself: pixels of one picture -> [1, N, hidden_size]."""

    def __init__(self, model: nn.Module, **constants: Any):
        super().__init__()
        self.model, self.constants = model, constants

    def forward(self, pixel_values: Tensor) -> Tensor:
        found = self.model.get_image_features(  # type: ignore[operator]
            pixel_values=pixel_values, return_dict=True, **self.constants
        ).pooler_output
        rows = found if isinstance(found, (list, tuple)) else [found]
        return torch.cat([each.flatten(0, -2) for each in rows])[None]


def features(model: Any, layout: Layout) -> nn.Module:
    return Features(model.model)


def packed(model: Any, layout: Layout) -> nn.Module:
    return Features(model.model, image_sizes=[(layout.height, layout.width)])


def pixtral(model: Any, layout: Layout) -> Any:
    """Pixtral's tower, which rotates by where a patch lies in the picture, for pictures of one size."""
    tower = model.model.vision_tower
    sides = (pixels // tower.patch_size for pixels in layout.pixel_values[-2:])
    places = torch.cartesian_prod(*(torch.arange(side, device=model.device) for side in sides))
    angles = tower.patch_positional_embedding(tower.patch_conv.weight, places)
    return with_parts(tower, patch_positional_embedding=Constant(*angles))


class Segmented(Features):
    """LLaVA with Pixtral, without the mask [patches, patches] that keeps pictures of a batch apart: there is one."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        with segmented(self.model.config.vision_config):  # type: ignore[union-attr]
            return super().forward(pixel_values)


class Mistral3(nn.Module):
    """Pixtral's tower, whose tokens the projector merges."""

    def __init__(self, model: Any, layout: Layout):
        super().__init__()
        self.tower, self.projector = pixtral(model, layout), model.model.multi_modal_projector
        self.sizes, layers = [tuple(layout.pixel_values[-2:])], model.config.vision_feature_layer
        self.layers = [layers] if isinstance(layers, int) else layers

    def forward(self, pixel_values: Tensor) -> Tensor:
        with segmented(self.tower.config):
            states = self.tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
        chosen = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return self.projector(chosen[0], self.sizes)[None]


def llava(model: Any, layout: Layout) -> nn.Module:
    if model.config.vision_config.model_type != "pixtral":
        return Features(model.model)
    return Segmented(with_parts(model.model, vision_tower=pixtral(model, layout)))


class Tiles(nn.Module):
    """Idefics3 and SmolVLM: tiles [T, 3, h, w], none of them padded, and their tokens one behind the other."""

    def __init__(self, model: Any, layout: Layout):
        super().__init__()
        tower, (count, _, height, width) = model.model.vision_model, layout.pixel_values
        side, place = tower.patch_size, tower.embeddings.position_embedding
        whole = torch.ones(1, height // side, width // side, dtype=torch.bool, device=model.device)
        blank = torch.zeros(1, 3, height, width, device=model.device)
        places = output_of(place, lambda: tower.embeddings(pixel_values=blank, patch_attention_mask=whole))
        self.embeddings = with_parts(tower.embeddings, position_embedding=Constant(places))
        self.register_buffer("whole", whole.expand(count, -1, -1), persistent=False)
        self.encoder, self.norm, self.connector = tower.encoder, tower.post_layernorm, model.model.connector

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.embeddings(pixel_values=pixel_values, patch_attention_mask=self.whole)
        hidden = self.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        return self.connector(self.norm(hidden)).flatten(0, 1)[None]
