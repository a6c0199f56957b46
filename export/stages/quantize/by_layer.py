"""A precision for each layer: which one it bears differs (KVTuner, arXiv 2502.04420)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engines.errors import UserError
from export.stages.quantize.floats import Float16, Float32
from export.stages.quantize.int4 import Int4
from export.stages.quantize.int8 import Int8
from export.stages.quantize.k8v4 import K8V4
from export.stages.quantize.kivi import Kivi
from export.stages.quantize.mixed import Mixed
from export.stages.quantize.per_head import PerHead
from export.stages.quantize.per_token import PerToken
from export.stages.quantize.quantize import Quantize
from export.stages.quantize.turboquant import TurboQuant

Uniform = Int8 | PerHead | PerToken | K8V4 | Mixed | Int4 | Kivi | TurboQuant | Float16 | Float32


@dataclass(eq=False)
class ByLayer(Quantize):
    """Every layer has a method of its own; `python -m calibration precision` finds the narrowest that each bears.

    Attributes:
        layers: of each layer, by name or with its knobs.
    """

    layers: list[Uniform] = field(kw_only=True)
    method: Literal["by-layer"] = "by-layer"

    @property
    def needs_mass(self) -> bool:  # type: ignore[override]
        return any(layer.needs_mass for layer in self.layers)

    @property
    def calibrated(self) -> bool:
        return any(layer.calibrated for layer in self.layers)

    @property
    def needs_rows(self) -> bool:
        return any(layer.needs_rows for layer in self.layers)

    def by_layer(self, layers: int) -> Sequence[Quantize]:
        """Those listed. A graph holds one body of `QuantKVAttention`, and a body is of one pair of bits: the pair that
        most layers have goes by the operator, and the stores of the others are restored.
        """
        if len(self.layers) != layers:
            raise UserError(f"quantize.layers has {len(self.layers)} methods, the model {layers} layers: give one each")
        pairs = Counter(pair for layer in self.layers if (pair := layer.operator_bits))
        most = max(pairs, key=pairs.__getitem__, default=None)
        return [layer if layer.operator_bits in (most, None) else _restored(layer) for layer in self.layers]


def _restored(layer: Quantize) -> Quantize:
    """The same without the operator."""
    layer = copy.deepcopy(layer)
    layer.by_operator = False
    return layer
