"""One small adapter a model family: where its vision encoder and its decoder are. Hugging Face's code does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from export.decoder import decoder_of
from export.graphs import Decoder
from export.mrope import mrope_of


@dataclass(frozen=True)
class Family:
    """How to take a Hugging Face model apart.

    Attributes:
        encoder: model -> module from pixels [1, 3, H, W] to visual tokens [1, N, hidden_size].
        decoder: model -> its decoder, head and sizes.
    """

    encoder: Callable[[Any], nn.Module]
    decoder: Callable[[Any], Decoder]


class _ImageFeatures(nn.Module):
    """Vision tower, feature selection and projector, as the model itself chains them."""

    def __init__(self, model: Any):
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


def _decoder(model: Any) -> Decoder:
    taps = getattr(model.config.vision_config, "deepstack_visual_indexes", ())
    return decoder_of(model, model.model.language_model, mrope=mrope_of(model.config), deepstack=len(taps))


FAMILIES: dict[str, Family] = {"llava": Family(_ImageFeatures, _decoder)}
