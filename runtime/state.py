"""The KV state of one request: what the graphs returned, by name, and the slot that is written next."""

from __future__ import annotations

import numpy as np

from engines.bundle import Bucket
from engines.tokens import TEXT

REPLACES = "new_"  # an ONNX graph cannot return a tensor under an input's name: `new_X` replaces X


class State:
    """Store + window of every layer, of one size from the first token to the last.

    Attributes:
        arrays: name -> array; stores have one array a layer (`key_store.0`), windows one for the heads of all
            layers (`key_window`).
        count: window slots in use; the next token is written into this one.
        compactions: how often the window was compacted into the store.
    """

    def __init__(self, outputs: dict[str, np.ndarray], bucket: Bucket) -> None:
        """Take over what prefill returned; the last `recent` tokens of the prompt fill the window's first slots."""
        self.arrays = {name: array for name, array in outputs.items() if name != "logits"}
        self.window, self.recent = bucket.window, bucket.recent
        self.count, self.compactions = self.recent, 0

    @property
    def full(self) -> bool:
        return self.count == self.window

    @property
    def nbytes(self) -> int:
        """All that is allocated for the cache, however much of it is filled."""
        return sum(array.nbytes for array in self.arrays.values())

    def feeds(self, names: list[str]) -> dict[str, np.ndarray]:
        """The state's tensors among a graph's inputs."""
        return {name: self.arrays[name] for name in names if name in self.arrays}

    def write(self, outputs: dict[str, np.ndarray], position: int, kind: int = TEXT) -> None:
        """Take over what decode returned, and write the new token's rows into the next window slot.

        Args:
            outputs: `new_key`, `new_value` [B, H, 1, D], the KV heads of all layers side by side; with compaction also
                `new_mass` [B, H, 1] and the masses of store and window, which replace those of the state.
            position: of the token, counted in the prompt before pruning.
            kind: of the token, `FIRST` added where it begins a sentence.
        """
        self._replace(outputs)
        slot, arrays = self.count, self.arrays
        arrays["key_window"][:, :, slot] = outputs["new_key"][:, :, 0]
        arrays["value_window"][:, :, slot] = outputs["new_value"][:, :, 0]
        if "new_mass" in outputs:
            arrays["window_mass"][..., slot] = outputs["new_mass"][..., 0]
        arrays["window_bias"][:, slot] = 0
        if "window_positions" in arrays:
            arrays["window_positions"][:, slot] = position
        if "window_kinds" in arrays:
            arrays["window_kinds"][:, slot] = kind
        self.count += 1

    def compacted(self, outputs: dict[str, np.ndarray]) -> None:
        """Take over what compact returned: the window keeps its last `recent` tokens."""
        self._replace(outputs)
        self.count = self.recent
        self.compactions += 1

    def _replace(self, outputs: dict[str, np.ndarray]) -> None:
        for name, array in outputs.items():
            replaced = name.removeprefix(REPLACES)
            if replaced in self.arrays:
                self.arrays[replaced] = array
