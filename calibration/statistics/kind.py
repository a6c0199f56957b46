"""Whether a model understands or generates, by how its attention behaves while it answers."""

from __future__ import annotations

from typing import Literal

# An understanding model focuses; its neighbouring layers look at the same (cosine above 0.7, a generating model's 0.3
# to 0.4: halfway), and its next step looks at mostly the same as this one (a generating model's changes by 40 %).
FOCUSED, LAYERS, STEPS = 0.5, 0.55, 0.6


def kind(entropy: float, layers: float, steps: float) -> Literal["understanding", "generation"]:
    """What more than half of the signals say; else generation, the kind that is compressed with more care.

    Args:
        entropy: of the answering queries, over the highest possible. Here and below NaN says nothing.
        layers: cosine of adjacent layers' attention.
        steps: cosine of adjacent steps' attention.
    """
    signals = [(entropy, entropy < FOCUSED), (layers, layers > LAYERS), (steps, steps > STEPS)]
    told = [understands for figure, understands in signals if figure == figure]
    return "understanding" if 2 * sum(told) > len(told) else "generation"
