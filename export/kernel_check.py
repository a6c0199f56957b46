"""Whether a compiled kernel computes what its operator states: random cases, the kernel beside the PyTorch operator.

The kernel is called through its C entry (engines/plugins/kernels.h), on memory of `device`: "cuda" for a library that
nvcc built, "cpu" for one of engines/plugins/host_library.py, or for `cpu_kernels`. The operator runs on the CPU.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engines.errors import UserError, one_line
from engines.plugins.abi import FLOAT16, FLOAT32, Attention, Rows, Store
from export.operators import quant_kv_attention, topk_gather
from export.packing import packed_size

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
ALL = 1 << 30  # tokens or channels that share a scale: every one
LIMITS = {torch.float32: 2e-5, torch.float16: 1.5e-3}  # an error over 1 + the exact number
ROUNDED = 2e-4  # where the kernel rounds queries and weights to 16 bits, however exact the inputs are
# Where a query may look at nothing, its logits are around -1e4, and float32 holds them in steps of 1e-3.
BLIND_LIMIT = 1e-2
TYPES = {torch.float32: FLOAT32, torch.float16: FLOAT16}
OUTPUTS = ("output", "store_mass", "window_mass")
GUARD = 16  # numbers behind every output, which must stay as they were
LARGEST = 1 << 24  # numbers of a tensor at most: a small device has to hold them several times
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
    batch, kv_heads = rng.randint(1, 2), rng.choice([1, 3])
    return TopKCase(
        batch=batch,
        kv_heads=kv_heads,
        tokens=count,
        k=rng.choice([1, count, rng.randint(1, count)]),
        head_dim=min(rng.choice([1, 7, *HEAD_DIMS]), LARGEST // (batch * kv_heads * count)),
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


@dataclass(frozen=True)
class AttentionCase:
    """Sizes and types of one QuantKVAttention.

    Attributes:
        key_each, value_each: how many tokens and channels share a scale, at most.
        shared: the batch has the scales in common.
        filled: share of the slots that hold a token; the others are empty.
        seen: every query sees the window's last token; else it may see none.
        steep: the bias rises by so much over the slots: the largest logits come last, and what was summed shrinks.
    """

    slots: int
    batch: int = 1
    kv_heads: int = 4
    group: int = 4
    queries: int = 1
    window: int = 64
    head_dim: int = 64
    bits: tuple[int, int] = (8, 8)
    key_each: tuple[int, int] = (ALL, 1)
    value_each: tuple[int, int] = (1, ALL)
    dtype: torch.dtype = torch.float16
    scale_dtype: torch.dtype = torch.float16
    bias_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.float32)  # of store and window
    shared: bool = False
    filled: float = 1.0
    seen: bool = True
    steep: float = 0.0
    masses: bool = True


def attention_case(rng: random.Random, number: int, slots: int) -> AttentionCase:
    """One of every usual head_dim and an odd one, then again; empty stores and windows among them."""
    key_each = rng.choice([1, 3, 16, 32, 48, 144, ALL]), rng.choice([1, 7, 32, ALL])
    full = slots // key_each[0] * key_each[0] or slots  # whole blocks of tokens
    count = rng.choice([0, 1, rng.randint(1, min(70, slots)), rng.randint(1, slots), slots, full, full])
    least = 1 if count == 0 else 0
    any_dim = rng.randint(1, HEAD_DIMS[-1])

    def floats() -> torch.dtype:
        return rng.choice(list(TYPES))

    return AttentionCase(
        slots=count,
        batch=rng.randint(1, 2),
        kv_heads=rng.randint(1, 3),
        group=rng.choice([1, 2, 3, 4, 7, 8]),
        queries=rng.choice([1, 1, rng.randint(2, 8)]),
        window=rng.choice([least, 1, rng.randint(least, 70), 64]),
        head_dim=[*HEAD_DIMS, any_dim][number % (len(HEAD_DIMS) + 1)],
        bits=(rng.choice([8, 4]), rng.choice([8, 4])),
        key_each=key_each,
        value_each=(rng.choice([1, 3, 32, ALL]), rng.choice([1, 7, 32, ALL])),
        dtype=floats(),
        scale_dtype=floats(),
        bias_dtypes=(floats(), floats()),
        shared=rng.random() < 0.3,
        filled=rng.choice([1.0, 1.0, 0.5, 0.0]),
        seen=rng.random() < 0.9,
        steep=rng.choice([0.0, 0.0, 60.0, -60.0]),
        masses=rng.random() < 0.8,
    )


def attention_inputs(case: AttentionCase, generator: torch.Generator) -> list[Tensor]:
    """Random tensors in the operator's order."""

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    def store(bits: int, each: tuple[int, int]) -> list[Tensor]:
        size = (case.batch, case.kv_heads, case.slots, packed_size(case.head_dim, bits))
        blocks = max(1, math.ceil(case.slots / each[0])), math.ceil(case.head_dim / each[1])
        scale = torch.rand(1 if case.shared else case.batch, case.kv_heads, *blocks, generator=generator) + 0.1
        return [
            torch.randint(-128, 128, size, generator=generator, dtype=torch.int8),
            (scale / 2 ** (bits - 1)).to(case.scale_dtype),
        ]

    slots, window = (case.batch, case.kv_heads, case.slots), (case.batch, case.queries, case.window)
    merged = torch.randint(1, 5, slots, generator=generator).log() + torch.linspace(0, case.steep, case.slots)
    merged[torch.rand(slots, generator=generator) >= case.filled] = -torch.inf
    hidden = torch.rand(window, generator=generator) < 0.3
    if case.seen:
        hidden[..., -1:] = False
    rows = (case.batch, case.kv_heads, case.window, case.head_dim)
    return [
        floats(case.batch, case.kv_heads * case.group, case.queries, case.head_dim),
        *store(case.bits[0], case.key_each),
        *store(case.bits[1], case.value_each),
        merged.to(case.bias_dtypes[0]),
        *(floats(*rows) for _ in "kv"),
        torch.zeros(window).masked_fill(hidden, -torch.inf).to(case.bias_dtypes[1]),
    ]


@dataclass
class AttentionCall:
    """The kernel with its arguments, to be called as often as one likes.

    Attributes:
        inputs: on the device where the kernel runs, in the operator's order.
        guarded: outputs as `OUTPUTS`, each with numbers behind it; all start as NaN.
    """

    library: ctypes.CDLL
    case: AttentionCase
    inputs: Sequence[Tensor]
    guarded: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case, inputs = self.case, self.inputs
        device = inputs[0].device
        self.sizes = [inputs[0].shape, inputs[5].shape, inputs[6].shape[:3]]
        self.guarded = [
            torch.full((size.numel() + GUARD,), torch.nan, dtype=case.dtype, device=device) for size in self.sizes
        ]

        def store(codes: Tensor, scale: Tensor, bits: int) -> Store:
            shape = scale.shape
            return Store(codes.data_ptr(), scale.data_ptr(), TYPES[scale.dtype], bits, shape[0], shape[2], shape[3])

        outputs = [x.data_ptr() for x in self.guarded] if case.masses else [self.guarded[0].data_ptr(), None, None]
        self.arguments = Attention(
            *(case.batch, case.kv_heads, case.group, case.queries, case.slots, case.window, case.head_dim),
            *(TYPES[dtype] for dtype in (case.dtype, *case.bias_dtypes)),
            self.scale,
            inputs[0].data_ptr(),
            store(inputs[1], inputs[2], case.bits[0]),
            store(inputs[3], inputs[4], case.bits[1]),
            *(x.data_ptr() for x in inputs[5:]),
            *outputs,
        )
        size = self.library.unicache_quant_kv_attention_workspace
        size.restype = ctypes.c_size_t
        self.workspace = torch.full((size(ctypes.byref(self.arguments)),), 255, dtype=torch.uint8, device=device)

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5

    def __call__(self) -> None:
        error = self.library.unicache_quant_kv_attention(
            ctypes.byref(self.arguments),
            ctypes.c_void_p(self.workspace.data_ptr()),
            stream(self.workspace.device.type),
        )
        if error:
            raise UserError(f"it ended with error {error}")

    def error(self, exact: Sequence[Tensor]) -> float:
        """The largest error of the outputs, over 1 + the exact number; the masses' only where they are wanted."""
        worst = 0.0
        for name, size, guarded, theirs in zip(OUTPUTS, self.sizes, self.guarded, exact, strict=True):
            numbers = guarded.cpu().double()
            if not numbers[-GUARD:].isnan().all():
                raise UserError(f"it wrote behind its {name}")
            if name == "output" or self.case.masses:
                ours = numbers[:-GUARD].reshape(size)
                if not ours.isfinite().all():
                    raise UserError(f"its {name} is not finite")
                worst = max([worst, *((ours - theirs).abs() / (1 + theirs.abs())).flatten().tolist()])
            elif not numbers.isnan().all():
                raise UserError(f"it wrote a {name} that was not wanted")
        return worst


def check_attention(
    library: ctypes.CDLL, cases: int, seed: int, device: str, slots: int = 300, rounds: bool = False
) -> float:
    """Compare QuantKVAttention with its operator in double precision.

    Args:
        slots: the most that a case has.
        rounds: whether the kernel rounds queries and weights to 16 bits.

    Returns:
        The largest error there was, as a share of what is allowed.

    Raises:
        UserError: they differ; with the shape, and by how much.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    largest = 0.0
    for number in range(cases):
        case = attention_case(rng, number, slots)
        inputs = attention_inputs(case, generator)
        call = AttentionCall(library, case, [x.to(device) for x in inputs])
        exact = [x if x.dtype == torch.int8 else x.double() for x in inputs]
        limit = max(LIMITS[case.dtype], ROUNDED) if rounds else LIMITS[case.dtype]
        if blind(inputs):
            limit = max(limit, BLIND_LIMIT)
        try:
            call()
            error = call.error(quant_kv_attention(*exact, call.scale, *case.bits))
            if error > limit:
                raise UserError(f"it is {error:.1e} from the operator's result, {limit:.1e} is allowed")
        except (UserError, RuntimeError) as wrong:
            raise UserError(
                f"the kernel of QuantKVAttention is wrong: {one_line(wrong)} ({case}, seed {seed})"
            ) from wrong
        largest = max(largest, error / limit)
    return largest


def blind(inputs: Sequence[Tensor]) -> bool:
    """Whether some query may look at nothing."""
    sees_store = inputs[5].isfinite().any(dim=2)  # [batch, kv_heads]
    sees_window = inputs[8].isfinite().any(dim=2)  # [batch, queries]
    return not (sees_store[:, :, None] | sees_window[:, None]).all()


def cpu_kernels(library: ctypes.CDLL, path: str) -> Any:
    """The kernels for ONNX Runtime, on one of their instruction paths, with the entries of the CUDA kernels."""

    def topk_gather(score: Any, rows: Any, index: Any, heads: int, tokens: int, k: int, _stream: Any) -> int:
        sizes = map(ctypes.c_int64, (heads, tokens, k))
        return library.unicache_cpu_topk_gather(score, rows, index, *sizes, None)

    def attention(arguments: Any, _workspace: Any, _stream: Any) -> int:
        return library.unicache_cpu_quant_kv_attention(arguments, path.encode(), None)

    return SimpleNamespace(
        unicache_topk_gather=topk_gather,
        unicache_quant_kv_attention=attention,
        unicache_quant_kv_attention_workspace=lambda arguments: 0,
    )


def stream(device: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if device == "cuda" else None)


@dataclass
class TopKCall:
    """The kernel with its arguments, all on one device, to be called as often as one likes.

    Attributes:
        tensors: key, value, positions and bias.
        guarded: bytes of the outputs, the indices last, each with more behind it.
    """

    library: ctypes.CDLL
    score: Tensor
    tensors: Sequence[Tensor]
    k: int
    guarded: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        widths = [x.shape[3:].numel() * x.itemsize for x in self.tensors]
        sizes = [self.score.shape[:2].numel() * self.k * width + GUARD for width in (*widths, 8)]
        self.guarded = [torch.full((n,), POISON, dtype=torch.uint8, device=self.score.device) for n in sizes]
        self.guarded[-1][:-GUARD] = 0  # an index that a wrong kernel leaves out must not make it read elsewhere
        places = [(x.data_ptr(), y.data_ptr()) for x, y in zip(self.tensors, self.guarded[:-1], strict=True)]
        self.rows = (Rows * len(widths))(*(Rows(*place, width) for place, width in zip(places, widths, strict=True)))

    def __call__(self) -> None:
        batch, heads, tokens = self.score.shape
        error = self.library.unicache_topk_gather(
            ctypes.c_void_p(self.score.data_ptr()),
            self.rows,
            ctypes.c_void_p(self.guarded[-1].data_ptr()),
            *(batch * heads, tokens, self.k, stream(self.score.device.type)),
        )
        if error:
            raise UserError(f"it ended with error {error}")

    def results(self) -> list[Tensor]:
        """Key, value, positions, bias and the indices, on the host."""
        written = [x.cpu() for x in self.guarded]
        if any((x[-GUARD:] != POISON).any() for x in written):
            raise UserError("it wrote behind its output")
        kinds = [(x.dtype, x.shape[3:]) for x in self.tensors] + [(torch.int64, torch.Size())]
        kept = (*self.score.shape[:2], self.k)
        return [x[:-GUARD].view(dtype).reshape(*kept, *row) for x, (dtype, row) in zip(written, kinds, strict=True)]


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
            call = TopKCall(library, score.to(device), [x.to(device) for x in tensors], case.k)
            call()
            names = ("key", "value", "positions", "bias", "index")
            for name, ours, theirs in zip(names, call.results(), want, strict=True):
                if not torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
                    raise UserError(f"its {name} is not the operator's")
        except (UserError, RuntimeError) as error:  # RuntimeError: what CUDA tells later, through PyTorch
            raise UserError(f"the kernel of TopKGather is wrong: {one_line(error)} ({case}, seed {seed})") from error
