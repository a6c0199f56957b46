"""LLaVA 1.5: CLIP's features, one a patch, through a projector; the size is fixed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engines.layout import Layout
from export.decoder import decoder_of
from export.families.family import Family
from export.graphs import Decoder
from export.mrope import mrope_of


class ImageFeatures(nn.Module):
    """Vision tower, feature selection and projector, as the model itself chains them."""

    def __init__(self, model: Any, layout: Layout):
        super().__init__()
        self.model = model.model

    def forward(self, pixel_values: Tensor) -> Tensor:
        config = self.model.config
        features = self.model.get_image_features(
            pixel_values=pixel_values,
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            return_dict=True,
        )
        return features.pooler_output[0][None]


def decoder(model: Any) -> Decoder:
    taps = getattr(model.config.vision_config, "deepstack_visual_indexes", ())
    return decoder_of(model, model.model.language_model, mrope=mrope_of(model.config), deepstack=len(taps))


LLAVA = Family(ImageFeatures, decoder)
