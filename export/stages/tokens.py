"""Cached tokens of one layer: what every stage after the language model's attention works on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.tokens import ALIGNED as ALIGNED
from engines.tokens import FIRST as FIRST
from engines.tokens import PADDING as PADDING
from engines.tokens import TEXT as TEXT
from engines.tokens import VISUAL as VISUAL


@dataclass
class Tokens:
    """Cached tokens of one layer, float32 rows with what travels along.

    Attributes:
        key, value: [batch, kv_heads, tokens, head_dim]; keys after RoPE at original positions, centred.
        positions: original positions, [batch, kv_heads, tokens], int32; -1 where empty.
        kinds: PADDING, TEXT or VISUAL, [batch, kv_heads, tokens], int32. All TEXT in compaction unless a stage of the
            recipe `needs_kinds`, which then costs a byte a slot.
        bias: 0 a token, log(n) n merged, -inf empty, [batch, kv_heads, tokens], float32.
        mass: attention received, as the importance stage counts it, [batch, kv_heads, tokens], float32.
        center: what was subtracted from the keys, [kv_heads, 1, head_dim]; None if nothing was.
        marks: FIRST, ALIGNED, both or neither (0, if not given), [batch, kv_heads, tokens], int32.
    """

    key: Tensor
    value: Tensor
    positions: Tensor
    kinds: Tensor
    bias: Tensor
    mass: Tensor
    center: Tensor | None = None
    marks: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.marks is None:
            self.marks = torch.zeros_like(self.kinds)  # type: ignore[unreachable]

    @property
    def real(self) -> Tensor:
        """Which slots hold a token, bool [batch, kv_heads, tokens]."""
        return self.bias > EMPTY_BIAS

    @property
    def first(self) -> Tensor:
        """Which text tokens begin a sentence, bool [batch, kv_heads, tokens]."""
        return (self.marks == FIRST) | (self.marks == FIRST + ALIGNED)

    @property
    def aligned(self) -> Tensor:
        """Which tokens align text and image, bool [batch, kv_heads, tokens]."""
        return self.marks >= ALIGNED

    @property
    def plain_key(self) -> Tensor:
        """The keys as the model made them, not centred."""
        return self.key if self.center is None else self.key + self.center

    def __add__(self, later: Tokens) -> Tokens:
        """These tokens, then later ones."""
        rows, more = self._rows(), later._rows()
        return Tokens(**{name: torch.cat([rows[name], more[name]], dim=2) for name in rows}, center=self.center)

    def __getitem__(self, part: slice) -> Tokens:
        """Some consecutive tokens."""
        return Tokens(**{name: rows[:, :, part] for name, rows in self._rows().items()}, center=self.center)

    def take(self, index: Tensor) -> Tokens:
        """The tokens at these places, [batch, kv_heads, count], int64."""
        rows = index[..., None].expand(*index.shape, self.key.shape[-1])
        taken = {name: x.gather(2, rows if x.dim() == 4 else index) for name, x in self._rows().items()}
        return Tokens(**taken, center=self.center)

    def only(self, chosen: Tensor) -> Tokens:
        """The same, slots emptied that are not chosen, bool [batch, kv_heads, tokens]; their rows stay, for nobody."""
        return dataclasses.replace(
            self,
            positions=torch.where(chosen, self.positions, -1),
            kinds=torch.where(chosen, self.kinds, PADDING),
            bias=torch.where(chosen, self.bias, -torch.inf),
            mass=torch.where(chosen, self.mass, 0.0),
            marks=torch.where(chosen, self.marks, 0),
        )

    def padded(self, count: int) -> Tokens:
        """The same with at least `count` slots; new ones are empty."""
        more = count - self.key.shape[2]
        if more <= 0:
            return self
        return dataclasses.replace(
            self,
            key=pad(self.key, (0, 0, 0, more)),
            value=pad(self.value, (0, 0, 0, more)),
            positions=pad(self.positions, (0, more), value=-1),
            kinds=pad(self.kinds, (0, more), value=PADDING),
            bias=pad(self.bias, (0, more), value=-torch.inf),
            mass=pad(self.mass, (0, more)),
            marks=pad(self.marks, (0, more)),
        )

    def _rows(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "center"}


def first_marks(kinds: Tensor, segments: Tensor) -> Tensor:
    """`FIRST` where a sentence begins, else 0; kinds and segments [batch, tokens], int32, as `engines.tokens` says."""
    before, its = (pad(x[:, :-1], (1, 0)) for x in (kinds, segments))
    return FIRST * ((kinds == TEXT) & ((before != TEXT) | (its != segments))).int()


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Kinds and marks of a state's kinds, int32."""
    marks = torch.div(packed, FIRST, rounding_mode="trunc") * FIRST
    return packed - marks, marks


EMPTY_BIAS = -1e4  # a bias at or below it marks an empty slot; finite for float16 stores
