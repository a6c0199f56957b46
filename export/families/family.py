"""What an adapter of a model family says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from engines.layout import Layout
from export.decoder import decoder_of
from export.graphs import Decoder
from export.mrope import mrope_of


@dataclass(frozen=True)
class Family:
    """How to take a Hugging Face model apart.

    Attributes:
        encoder: model, layout -> module from its `pixel_values`, float32, to visual tokens [1, N, hidden_size], and
            of Qwen3-VL what is added behind its decoder's first layers too, [taps, N, hidden_size]; None: no images.
        decoder: model -> its decoder, head and sizes.
    """

    encoder: Callable[[Any, Layout], nn.Module] | None
    decoder: Callable[[Any], Decoder]


def decoder(model: Any, **known: Any) -> Decoder:
    """As `decoder_of`, with what the vision encoder's configuration says of the decoder."""
    taps = getattr(model.config.vision_config, "deepstack_visual_indexes", ())
    return decoder_of(model, model.get_decoder(), mrope=mrope_of(model.config), deepstack=len(taps), **known)
