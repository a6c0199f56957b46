"""Whether a compiled kernel computes what its operator states: random cases, the kernel beside the PyTorch operator.

The kernel is called through its C entry (engines/plugins/kernels.h), on memory of `device`: "cuda" for a library that
nvcc built, "cpu" for one of engines/plugins/host_library.py. The operator runs on the CPU.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.errors import UserError, one_line
from engines.plugins.abi import Rows
from export.operators import topk_gather

GUARD = 16  # numbers behind every output, which must stay as they were
POISON = 0x5A  # byte that copied rows start with
SCORES = ("any", "ties", "equal", "neighbours", "special", "padding")


@dataclass(frozen=True)
class TopKCase:
    """Sizes of one TopKGather, integers as wide as the numbers of its rows, and the kind of its scores (`SCORES`)."""

    batch: int
    kv_heads: int
    tokens: int
    k: int
    head_dim: int
    dtype: torch.dtype
    scores: str


def topk_case(rng: random.Random, number: int, tokens: int) -> TopKCase:
    """Short and long ones alike: as many below 70 tokens as above."""
    count = rng.randint(1, min(70, tokens)) if rng.random() < 0.5 else rng.randint(1, tokens)
    return TopKCase(
        batch=rng.randint(1, 2),
        kv_heads=rng.choice([1, 3]),
        tokens=count,
        k=rng.choice([1, count, rng.randint(1, count)]),
        head_dim=rng.choice([1, 7, 32, 64, 80, 96, 128, 256]),
        dtype=rng.choice([torch.int16, torch.int32, torch.int8]),
        scores=SCORES[number % len(SCORES)],
    )


def scores(kind: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random float32 scores: `neighbours` differ in their last bits, `special` are not numbers, or hardly."""

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if kind == "ties":
        return whole(-2, 3) * 0.1
    if kind == "equal":
        return torch.full(shape, 0.3)
    if kind == "neighbours":
        return (whole(0, 300) + 0x3F800000).to(torch.int32).view(torch.float32)
    if kind == "special":
        return torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1e-45, -1e-45, -1e4])[whole(0, 8)]
    score = torch.randn(shape, generator=generator)
    if kind == "padding":
        score[whole(0, 10) < 6] = -torch.inf
    return score


def any_bytes(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Whatever bytes, in integers: PyTorch copies those bit by bit, where it changes a NaN of float16."""
    size = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def stream(device: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if device == "cuda" else None)


def run_topk_gather(library: ctypes.CDLL, score: Tensor, tensors: Sequence[Tensor], k: int) -> list[Tensor]:
    """Key, value, positions, bias and the indices as the kernel gives them; all on the device of `score`."""
    batch, heads, tokens = score.shape
    kept = batch * heads * k
    widths = [x.shape[3:].numel() * x.itemsize for x in tensors]
    sizes = [kept * width + GUARD for width in (*widths, 8)]
    outputs = [torch.full((size,), POISON, dtype=torch.uint8, device=score.device) for size in sizes]
    outputs[-1][:-GUARD] = 0  # an index that a wrong kernel leaves out must not make it read elsewhere
    rows = [Rows(x.data_ptr(), y.data_ptr(), w) for x, y, w in zip(tensors, outputs[:-1], widths, strict=True)]
    error = library.unicache_topk_gather(
        ctypes.c_void_p(score.data_ptr()),
        (Rows * len(rows))(*rows),
        ctypes.c_void_p(outputs[-1].data_ptr()),
        *(batch * heads, tokens, k, stream(score.device.type)),
    )
    if error:
        raise UserError(f"it ended with CUDA error {error}")
    outputs = [x.cpu() for x in outputs]
    if any((x[-GUARD:] != POISON).any() for x in outputs):
        raise UserError("it wrote behind its output")
    shapes = [(batch, heads, k, *x.shape[3:]) for x in tensors] + [(batch, heads, k)]
    dtypes = [x.dtype for x in tensors] + [torch.int64]
    return [x[:-GUARD].view(t).reshape(s) for x, t, s in zip(outputs, dtypes, shapes, strict=True)]


def check_topk_gather(library: ctypes.CDLL, cases: int, seed: int, device: str, tokens: int = 5000) -> None:
    """Compare TopKGather with its operator, byte for byte.

    Args:
        tokens: the most that a case has.

    Raises:
        UserError: they differ; with the shape and what differs.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for number in range(cases):
        case = topk_case(rng, number, tokens)
        shape = (case.batch, case.kv_heads, case.tokens)
        score = scores(case.scores, shape, generator)
        key, value = (any_bytes((*shape, case.head_dim), case.dtype, generator) for _ in range(2))
        tensors = [key, value, any_bytes(shape, torch.int32, generator), any_bytes(shape, torch.int16, generator)]
        want = topk_gather(score, *tensors, case.k)
        try:
            got = run_topk_gather(library, score.to(device), [x.to(device) for x in tensors], case.k)
            names = ("key", "value", "positions", "bias", "index")
            for name, ours, theirs in zip(names, got, want, strict=True):
                if not torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
                    raise UserError(f"its {name} is not the operator's")
        except (UserError, RuntimeError) as error:  # RuntimeError: what CUDA tells later, through PyTorch
            raise UserError(f"the kernel of TopKGather is wrong: {one_line(error)} ({case}, seed {seed})") from error
