"""How long the kernels take on a GPU, beside PyTorch and beside the measured bandwidth of its memory.

A kernel's calls, each on a copy of its data that the GPU's cache does not hold, are captured in a CUDA graph, so that
launching them costs nothing; events before and after the graph give the time. On "cpu", where tests let the build for
the host stand in, the calls just run.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from export.kernel_check import ALL, AttentionCall, AttentionCase, TopKCall, attention_inputs

RUNS = 20
COLD = 4  # times the GPU's cache: what the copies of a call's data have together
COPIED = 1 << 28  # bytes that are copied to measure the bandwidth
GROUP = 32  # tokens of a key's scale and channels of a value's, of 4 bits; as the recipe `int4`
KEPT = 4  # TopKGather keeps one of so many tokens

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """A kernel at one size; seconds are medians.

    Attributes:
        moved: bytes that a call has to read and write.
        seconds, peer_seconds: of ours, and of PyTorch's way.
        of_copy: share of the bandwidth of a copy that it reaches.
        predicted: seconds to move as many bytes at the bandwidth of a copy.
    """

    kernel: str
    bits: int
    tokens: int
    moved: int
    seconds: float
    peer_seconds: float
    of_copy: float
    predicted: float


def measure(ways: Sequence[Sequence[Call]], runs: int, device: str) -> list[float]:
    """Seconds a call, one number a way: the median of runs in which the ways take turns."""
    runners = [clock(calls, device) for calls in ways]
    times = [[runner() for runner in runners] for _ in range(runs)]
    return [
        statistics.median(column) / len(calls) for column, calls in zip(zip(*times, strict=True), ways, strict=True)
    ]


def clock(calls: Sequence[Call], device: str) -> Callable[[], float]:
    """What runs all the calls and returns the seconds that took."""
    for call in calls:  # the warm-up
        call()
    if device == "cpu":

        def on_host() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return time.perf_counter() - start

        return on_host
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def on_device() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3  # of milliseconds

    return on_device


def copies(moved: int, device: str) -> int:
    cache = 0 if device == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size
    return 1 + math.ceil(COLD * cache / moved)


def copy_bandwidth(runs: int, device: str, size: int = COPIED) -> float:
    """Bytes a second that a copy reads and writes."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / measure([[lambda: target.copy_(source)]], runs, device)[0]


def timing(kernel: str, bits: int, tokens: int, moved: int, seconds: Sequence[float], bandwidth: float) -> Timing:
    ours, peer = seconds
    return Timing(kernel, bits, tokens, moved, ours, peer, moved / ours / bandwidth, moved / bandwidth)


def attention(
    library: ctypes.CDLL, slots: int, bits: int, like: AttentionCase, bandwidth: float, runs: int, device: str
) -> Timing:
    """QuantKVAttention with the scales of the recipe int8 or int4, beside SDPA over as many tokens in float16.

    Args:
        like: the heads, head_dim and window.
    """
    each = ((ALL, 1), (1, ALL)) if bits == 8 else ((GROUP, 1), (1, GROUP))
    case = replace(like, slots=slots, bits=(bits, bits), key_each=each[0], value_each=each[1])
    inputs = attention_inputs(case, torch.Generator().manual_seed(0))
    call = AttentionCall(library, case, [x.to(device) for x in inputs])
    moved = sum(x.nbytes for x in (*call.inputs, *call.guarded))
    ours = [call] + [
        AttentionCall(library, case, [x.clone() for x in call.inputs]) for _ in range(copies(moved, device))
    ]

    query = call.inputs[0]
    shape = (case.batch, case.kv_heads, slots + case.window, case.head_dim)
    key, value = (torch.randn(shape, device=device).to(query.dtype) for _ in "kv")
    caches = [(key.clone(), value.clone()) for _ in range(copies(key.nbytes + value.nbytes, device))]

    def sdpa(key: torch.Tensor, value: torch.Tensor) -> Call:
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    seconds = measure([ours, [sdpa(*cache) for cache in caches]], runs, device)
    return timing("QuantKVAttention", bits, slots, moved, seconds, bandwidth)


def topk_gather(
    library: ctypes.CDLL, tokens: int, like: AttentionCase, bandwidth: float, runs: int, device: str
) -> Timing:
    """TopKGather of float16 rows, beside torch.topk, a sort of the indices and gathers."""
    shape, k = (like.batch, like.kv_heads, tokens), max(1, tokens // KEPT)
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(shape, generator=generator)
    rows = [torch.randn(*shape, like.head_dim, generator=generator).half() for _ in "kv"]
    tensors = [*rows, torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.float16)]
    call = TopKCall(library, score.to(device), [x.to(device) for x in tensors], k)
    written = sum(x.nbytes for x in call.guarded)
    moved = score.nbytes + 2 * written  # rows that are kept are read and written
    count = copies(moved, device)
    ours = [call] + [TopKCall(library, call.score, [x.clone() for x in call.tensors], k) for _ in range(count)]

    def theirs(one: TopKCall) -> Call:
        def call() -> None:
            index = one.score.topk(k).indices.sort().values
            expanded = index[..., None].expand(*index.shape, like.head_dim)
            for tensor in one.tensors:
                tensor.gather(2, expanded if tensor.dim() == 4 else index)

        return call

    seconds = measure([ours, [theirs(one) for one in ours]], runs, device)
    return timing("TopKGather", 16, tokens, moved, seconds, bandwidth)
