"""How alike KV heads are, and how to turn them onto each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadMoments:
    """How alike the KV heads of a layer are: means over the tokens of the samples, rows scaled to length one.

    Attributes:
        keys: conj(z_i) z_j of heads i and j, complex64 [kv_heads, kv_heads, head_dim / 2]; z are the pairs of numbers
            of a key, (x_d, x_(d + head_dim / 2)), that RoPE turns together.
        values: outer products of the values v_i and v_j, float32 [kv_heads, kv_heads, head_dim, head_dim].
    """

    keys: Tensor
    values: Tensor

    def similarity(self, aligned: bool) -> Tensor:
        """Mean cosine of each two heads, the lower of keys' and values', [kv_heads, kv_heads].

        Args:
            aligned: each two heads turned onto each other as well as can be (`turns`).
        """
        if aligned:
            return torch.minimum(self.keys.abs().sum(dim=-1), torch.linalg.svdvals(self.values).sum(dim=-1))
        return torch.minimum(self.keys.sum(dim=-1).real, self.values.diagonal(dim1=-2, dim2=-1).sum(dim=-1))

    def turns(self, head: int, onto: int) -> tuple[Tensor, Tensor]:
        """Rotations [head_dim, head_dim] that bring a head's keys and values closest to another's.

        Keys may only be turned within the pairs that RoPE turns, values by any orthogonal matrix (Procrustes).
        """
        turn = self.keys[onto, head].conj()
        turn = torch.where(turn.abs() > 0, turn / turn.abs(), 1.0)
        real, imaginary = torch.diag(turn.real), torch.diag(turn.imag)
        key = torch.cat([torch.cat([real, -imaginary], dim=1), torch.cat([imaginary, real], dim=1)])
        left, _, right = torch.linalg.svd(self.values[onto, head])
        return key, left @ right
