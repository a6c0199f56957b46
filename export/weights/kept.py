"""What graphs store of the model's weights, made once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import onnx_ir as ir
from torch import nn

Store = Callable[[ir.TensorProtocol], ir.ExternalTensor]


def identity(tensor: ir.TensorProtocol) -> Hashable:
    """Where a parameter lies and how it is read, the same in every graph; None of anything else.

    Of nothing else, since its place may be another's once it is gone.
    """
    raw = getattr(tensor, "raw", None)
    return (raw.data_ptr(), raw.dtype, *raw.shape, *raw.stride()) if isinstance(raw, nn.Parameter) else None


class Kept:
    """Remembers what was made of a parameter, for as long as the model is not changed."""

    def __init__(self, store: Store | None = None) -> None:
        """
        Args:
            store: writes a tensor to a file, where all graphs read it; None: it stays in memory.
        """
        self._store = store
        self._made: dict[Hashable, list[ir.ExternalTensor] | None] = {}
        self._alive: list[ir.TensorProtocol] = []  # parameters, so that nothing else gets their places

    def of(
        self, tensor: ir.TensorProtocol, what: Hashable, make: Callable[[], Sequence[ir.TensorProtocol] | None]
    ) -> Sequence[ir.TensorProtocol] | None:
        """What `make` gives for a constant; None where it gives none.

        Args:
            what: tells apart what different callers make of one constant.
        """
        if (key := identity(tensor)) is None or self._store is None:
            made = make()
            return made if made is None or self._store is None else [self._store(each) for each in made]
        if (key, what) not in self._made:
            made = make()
            self._made[key, what] = None if made is None else [self._store(each) for each in made]
            self._alive.append(tensor)
        known = self._made[key, what]
        return None if known is None else [_again(each) for each in known]


def _again(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    """The same bytes, for another graph to name."""
    where = tensor.location, tensor.offset, tensor.length, tensor.dtype
    return ir.ExternalTensor(*where, shape=tensor.shape, name=tensor.name or "", base_dir=tensor.base_dir)
