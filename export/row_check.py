"""Whether the compiled RowMatMul computes a product: random cases, beside PyTorch in double precision."""

from __future__ import annotations

import ctypes
import random

import torch

from engines.errors import UserError
from export.kernel_check import GUARD

LIMIT = 2e-6  # an error over the sum of the factors' sizes; float32 itself is off by 6e-8 of each
SIZES = (0, 1, 3, 16, 33, 64, 257, 576)
WIDE = (1, 4096, 9001)  # rows of the matrix that are cut into blocks


def check_row_matmul(library: ctypes.CDLL, path: str, cases: int, seed: int) -> None:
    """Compare it on one instruction path.

    Raises:
        UserError: it differs; with the sizes, and by how much.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(cases):
        rows, transposed = rng.randint(1, 9), rng.random() < 0.5
        inputs, outputs = rng.choice(
            [(rng.choice(SIZES), rng.choice(SIZES)), (rng.choice(SIZES[:-2]), rng.choice(WIDE))]
        )
        case = f"{rows} rows of {inputs}, {outputs} outputs{', transposed' * transposed}, seed {seed}"
        if wrong := _wrong(library, path, (rows, inputs, outputs), transposed, generator):
            raise UserError(f"the kernel of RowMatMul is wrong: {wrong} ({case})")


def _wrong(
    library: ctypes.CDLL, path: str, sizes: tuple[int, int, int], transposed: bool, generator: torch.Generator
) -> str:
    rows, inputs, outputs = sizes
    x = torch.randn(rows, inputs, generator=generator)
    w = torch.randn((outputs, inputs) if transposed else (inputs, outputs), generator=generator)
    guarded = torch.full((rows * outputs + GUARD,), torch.nan)
    places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, w, guarded))
    if error := library.unicache_cpu_row_matmul(
        *places, *map(ctypes.c_int64, sizes), int(transposed), path.encode(), None
    ):
        return f"it ended with error {error}"
    if not guarded[rows * outputs :].isnan().all():
        return "it wrote behind its output"
    matrix = (w.T if transposed else w).double()
    ours, want = guarded[: rows * outputs].view(rows, outputs), x.double() @ matrix
    apart = (ours - want).abs() / (1 + x.double().abs() @ matrix.abs())
    worst = float(apart.nan_to_num(torch.inf).max()) if apart.numel() else 0.0
    return f"it is {worst:.1e} from the product, {LIMIT:.1e} is allowed" if worst > LIMIT else ""
