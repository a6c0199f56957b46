"""More bits for the tokens that attention looks at most: MiKV (arXiv 2402.18096), ZipCache (arXiv 2405.14256)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from export.stages.quantize.blocks import Blocks
from export.stages.quantize.blockwise import Blockwise, at_least_two
from export.stages.quantize.quantize import Specs
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Mixed(Blockwise):
    """The slots that received most attention have 8 bits, as in `int8`, the others 4, as in `int4`.

    The wide slots come first; within both parts tokens keep their order. Decode does not depend on it; compaction puts
    the tokens back in the order of their positions before any other stage sees them. An importance measure must count
    attention.

    Attributes:
        share: of the slots that are wide, rounded; both kinds have one at least where there are two slots.
        group: of the narrow slots: tokens of a key's scale, channels of a value's.
    """

    needs_mass: ClassVar[bool] = True

    share: float = 0.25
    group: int = 32
    method: Literal["mixed"] = "mixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_two("group", self.group)
        if not 0 < self.share < 1:
            raise ValueError(f"share must be in (0, 1), got {self.share}")

    by_operator, by_row = False, False

    @property
    def keys(self) -> Blocks:
        return Blocks(8, tokens=None, channels=1)

    @property
    def values(self) -> Blocks:
        return Blocks(8, tokens=1, channels=None, scales=self.scales)

    @property
    def narrow(self) -> dict[str, Blocks]:
        keys = Blocks(4, tokens=self.group, channels=1, scales=self.scales)
        return {"narrow_key": keys, "narrow_value": Blocks(4, tokens=1, channels=self.group, scales=self.scales)}

    def wide(self, slots: int) -> int:
        """How many of the slots have 8 bits."""
        return min(max(round(self.share * slots), 1), max(slots - 1, 1))

    def specs(self, heads: list[int], slots: int, head_dim: int) -> Specs:
        wide = self.wide(slots)
        specs = super().specs(heads, wide, head_dim)
        for name, blocks in self.narrow.items() if slots > wide else ():
            specs |= blocks.specs(name, heads, slots - wide, head_dim)
        return specs

    def arrange(self, kept: Tokens) -> Tokens:
        slots = kept.bias.shape[2]
        first = _best(torch.where(kept.real, kept.mass, -1.0), kept, self.wide(slots))
        if slots == 1:
            return kept
        others = (first[..., None] != torch.arange(slots)).float().amin(dim=2)
        return kept.take(torch.cat([first, _best(others, kept, slots - first.shape[2])], dim=2))

    def rearrange(self, slots: Tokens) -> Tokens:
        order = torch.arange(slots.bias.shape[2])
        mine, its = slots.positions[..., None], slots.positions[..., None, :]
        rank = ((its < mine) | ((its == mine) & (order < order[:, None]))).sum(dim=3)  # PyTorch's sort has no ONNX
        return slots.take(((rank[..., None, :] == order[:, None]) * order).sum(dim=3))

    def quantize(self, kept: Tokens) -> dict[str, Tensor]:
        slots = kept.bias.shape[2]
        wide = self.wide(slots)
        store, rest = super().quantize(kept[:wide]), self.rotated(kept[wide:])
        for (name, blocks), rows in zip(self.narrow.items(), rest, strict=True) if slots > wide else ():
            store |= blocks.quantize(name, rows, kept.real[:, :, wide:])
        return store

    def read(self, store: dict[str, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        key, value = super().read(store, head_dim)
        if "narrow_key_store" not in store:
            return key, value
        more = [blocks.restore(name, store, head_dim) for name, blocks in self.narrow.items()]
        return torch.cat([key, more[0]], dim=2), torch.cat([value, more[1]], dim=2)


def _best(score: Tensor, tokens: Tokens, count: int) -> Tensor:
    """Indices of the largest scores, ascending, [batch, kv_heads, count], int64; of equal ones the lowest."""
    return torch.ops.unicache.topk_gather(score, tokens.key, tokens.value, tokens.positions, tokens.bias, count)[-1]
