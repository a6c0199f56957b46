"""What every compression stage is: a dataclass of knobs that is also an exportable module without weights."""

from __future__ import annotations

import copy
from typing import ClassVar

from torch import nn


class Stage(nn.Module):
    """Base of the stages. A subclass is decorated with `@dataclass(eq=False)`; its fields are its knobs.

    Where a recipe may choose between several stages, each has a field `method: Literal["its-name"]`.
    `nn.Module` must be initialised before a dataclass sets its fields, hence `__new__`.

    Attributes:
        needs_kinds: whether it must tell text from visual tokens also in compaction.
        needs_segments: whether it must know which image or sentence a token of the prompt belongs to.
        needs_mass: whether it reads the attention that tokens have received.
    """

    needs_kinds: ClassVar[bool] = False
    needs_segments: ClassVar[bool] = False
    needs_mass: ClassVar[bool] = False

    def __new__(cls, *_args, **_kwargs):
        self = super().__new__(cls)
        nn.Module.__init__(self)
        return self

    def __init__(self) -> None:
        """Nothing to do: `__new__` has initialised the module."""


def twin(module: nn.Module) -> nn.Module:
    """A copy that can be changed, all weights shared with the original."""
    return copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
