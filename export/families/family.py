"""What an adapter of a model family says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from engines.layout import Layout
from export.graphs import Decoder


@dataclass(frozen=True)
class Family:
    """How to take a Hugging Face model apart.

    Attributes:
        encoder: model, layout -> module from its `pixel_values`, float32, to visual tokens [1, N, hidden_size].
        decoder: model -> its decoder, head and sizes.
    """

    encoder: Callable[[Any, Layout], nn.Module]
    decoder: Callable[[Any], Decoder]
