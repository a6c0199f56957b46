"""The KV state of one request: what the graphs returned, by name, and the slot that is written next."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engines.bundle import Bucket
from engines.cuda import Array

if TYPE_CHECKING:
    from runtime.generate import Stats

REPLACES = "new_"  # an ONNX graph cannot return a tensor under an input's name: `new_X` replaces X


class State:
    """Store + window of every layer, of one size from the first token to the last.

    Attributes:
        arrays: name -> array; stores have one array a layer (`key_store.0`), windows one for the heads of all
            layers (`key_window`). They lie where the graphs take them: numpy arrays, or such in GPU memory.
        count: window slots in use; the next token is written into the one behind them.
        compactions: how often the window was compacted into the store.
    """

    def __init__(self, outputs: Mapping[str, Array], bucket: Bucket) -> None:
        """Take over what prefill returned; the last `recent` tokens of the prompt fill the window's first slots."""
        self.arrays: MutableMapping[str, Array]
        self.arrays = {name: array for name, array in outputs.items() if name != "logits"}
        self.window, self.recent = bucket.window, bucket.recent
        self.count, self.compactions = self.recent, 0

    def copy(self) -> State:
        """One that goes its own way. Stores are shared: nobody writes into them, a compaction puts others in place."""
        twin = copy.copy(self)
        twin.arrays = {name: a.copy() if "window" in name else a for name, a in self.arrays.items()}
        return twin

    @property
    def full(self) -> bool:
        return self.count == self.window

    @property
    def nbytes(self) -> int:
        """All that is allocated for the cache, however much of it is filled."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def own_bytes(self) -> int:
        """What `copy` allocates."""
        return sum(array.nbytes for name, array in self.arrays.items() if "window" in name)

    def holders(self, positions: np.ndarray, total: int) -> np.ndarray | None:
        """Of each position of a prompt of `total` tokens the share of all layers' KV heads that hold it, [total].

        None where it cannot be told: a level that never compacts has no positions, and its store may have dropped some.

        Args:
            positions: of the tokens that the model saw, [T].
        """
        stores = [name.removeprefix("store_bias") for name in self.arrays if name.startswith("store_bias")]
        biases = [np.asarray(self.arrays[f"store_bias{layer}"][0]) for layer in stores]
        if "window_positions" not in self.arrays:
            if min(bias.shape[1] for bias in biases) + self.count < len(positions):
                return None
            return np.bincount(positions, minlength=total).astype(np.float64)
        heads = sum(map(len, biases))
        window = np.asarray(self.arrays["window_positions"])[np.asarray(self.arrays["window_bias"]) > -np.inf]
        held = heads * np.bincount(window, minlength=total)
        for layer, bias in zip(stores, biases, strict=True):
            stored = np.asarray(self.arrays[f"store_positions{layer}"][0])
            held += np.bincount(stored[bias > -np.inf], minlength=total)
        return held / heads

    def feeds(self, names: list[str]) -> dict[str, Array]:
        """The state's tensors among a graph's inputs."""
        return {name: self.arrays[name] for name in names if name in self.arrays}

    @property
    def free(self) -> int:
        """Window slots that are left."""
        return self.window - self.count

    def write(self, outputs: Mapping[str, Array], positions: np.ndarray, kinds: np.ndarray) -> None:
        """Take over what decode or extend returned, and write the new tokens' rows into the next window slots.

        Args:
            outputs: `new_key`, `new_value` [B, H, T, D], the KV heads of all layers side by side; with compaction also
                `new_mass` [B, H, T] and the masses of store and window, which replace those of the state.
            positions: of the tokens, counted in the prompt before pruning, [n]; they are the last n rows.
            kinds: of the tokens, `FIRST` added where one begins a sentence, [n].
        """
        self._replace(outputs)
        rows, arrays = len(positions), self.arrays
        slots = slice(self.count, self.count + rows)
        arrays["key_window"][:, :, slots] = outputs["new_key"][:, :, -rows:]
        arrays["value_window"][:, :, slots] = outputs["new_value"][:, :, -rows:]
        if "new_mass" in outputs:
            arrays["window_mass"][..., slots] = outputs["new_mass"][..., -rows:]
        arrays["window_bias"][:, slots] = 0
        if "window_positions" in arrays:
            arrays["window_positions"][:, slots] = positions
        if "window_kinds" in arrays:
            arrays["window_kinds"][:, slots] = kinds
        self.count += rows

    def compacted(self, outputs: Mapping[str, Array]) -> None:
        """Take over what compact returned: the window keeps its last `recent` tokens."""
        self._replace(outputs)
        self.count = self.recent
        self.compactions += 1

    def _replace(self, outputs: Mapping[str, Array]) -> None:
        for name, array in outputs.items():
            replaced = name.removeprefix(REPLACES)
            if replaced in self.arrays:
                self.arrays[replaced] = array


@dataclass(eq=False)
class Context:
    """What the model has read of a request or in a session.

    Attributes:
        state: its keys and values, compressed, of this bucket's shapes.
        logits: of the token that comes next, [1, V].
        position: of the token that comes next, counted in the prompt before pruning.
        begins: whether it begins a sentence, as an answer does.
        shift: what its position id in RoPE is more than its position.
        whole: False while more is being read: if that broke off, the state is good for nothing.
    """

    state: State
    bucket: Bucket
    logits: np.ndarray
    position: int
    begins: bool = True
    shift: int = 0
    whole: bool = True

    def copy(self) -> Context:
        """One that goes its own way."""
        return replace(self, state=self.state.copy())


@dataclass
class Read:
    """A token that the model reads next, of a request that is answered: alone, unless somebody does it before.

    Attributes:
        embedding: of the token, [d].
        position: counted in the prompt before pruning.
        kind: `FIRST` added where it begins a sentence.
        stats: of the request.
        alone: it must not share a batch: its state stays behind in a session.
        done: whether the token was read.
    """

    context: Context
    embedding: np.ndarray
    position: int
    kind: int
    stats: Stats
    alone: bool = False
    done: bool = False
