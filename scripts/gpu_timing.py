"""How long the kernels take on a GPU: beside PyTorch, the bandwidth of a copy, and what the roofline predicts.

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

from engines.errors import UserError
from engines.plugins import roofline
from engines.plugins.roofline import Device
from export.kernel_check import ALL, AttentionCall, AttentionCase, TopKCall, attention_inputs

RUNS = 20
COLD = 4  # times the GPU's cache: what the copies of a call's data have together
COPIED = 1 << 28  # bytes that are copied to measure the bandwidth
KEPT = 4  # TopKGather keeps one of so many tokens

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """A kernel at one size; seconds are medians.

    Attributes:
        moved: bytes that a call has to read and write.
        seconds, peer_seconds: of ours, and of PyTorch's way.
        of_copy: share of the bandwidth of a copy that it reaches.
        predicted: the floor that engines/plugins/roofline.py gives at the bandwidth of a copy.
    """

    kernel: str
    bits: int
    tokens: int
    moved: int
    seconds: float
    peer_seconds: float
    of_copy: float
    predicted: float


@dataclass(frozen=True)
class Bench:
    """Where it is timed: on `device`, "cuda" or "cpu", which is the GPU of the roofline."""

    device: str
    gpu: Device
    runs: int = RUNS

    def timing(
        self, kernel: str, bits: int, tokens: int, moved: int, floor: float, ways: Sequence[Sequence[Call]]
    ) -> Timing:
        ours, theirs = measure(ways, self.runs, self.device)
        return Timing(kernel, bits, tokens, moved, ours, theirs, moved / ours / self.gpu.bandwidth, floor)


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


def this_gpu(runs: int) -> Device:
    """The GPU at hand as the roofline takes it, with the bandwidth that a copy reaches."""
    properties = torch.cuda.get_device_properties(0)
    kilohertz, clock_rate = ctypes.c_int(), 13  # CU_DEVICE_ATTRIBUTE_CLOCK_RATE: the highest
    if error := ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(kilohertz), clock_rate, 0):
        raise UserError(f"the driver does not tell the GPU's clock: CUDA error {error}")
    cores, bandwidth = properties.multi_processor_count, copy_bandwidth(runs, "cuda")
    return Device(properties.name, bandwidth, cores, 1e3 * kilohertz.value, "measured")


def attention(library: ctypes.CDLL, slots: int, bits: int, like: AttentionCase, bench: Bench) -> Timing:
    """QuantKVAttention, keys with a scale a channel and values one a token, beside SDPA over as many float16 tokens.

    Args:
        like: the heads, head_dim and window.
    """
    device = bench.device
    case = replace(like, slots=slots, bits=(bits, bits), key_each=(ALL, 1), value_each=(1, ALL))
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

    sizes = (case.window, case.batch, case.kv_heads, case.group, case.queries, case.head_dim)
    floor = roofline.attention(slots, bits, *sizes).floor(bench.gpu)
    return bench.timing("QuantKVAttention", bits, slots, moved, floor, [ours, [sdpa(*cache) for cache in caches]])


def topk_gather(library: ctypes.CDLL, tokens: int, like: AttentionCase, bench: Bench) -> Timing:
    """TopKGather of float16 rows, beside torch.topk, a sort of the indices and gathers."""
    device = bench.device
    shape, k = (like.batch, like.kv_heads, tokens), max(1, tokens // KEPT)
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(shape, generator=generator)
    rows = [torch.randn(*shape, like.head_dim, generator=generator).half() for _ in "kv"]
    tensors = [*rows, torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.float16)]
    call = TopKCall(library, score.to(device), [x.to(device) for x in tensors], k)
    written = sum(x.nbytes for x in call.guarded)
    moved = score.nbytes + 2 * written  # rows that are kept are read and written
    ours = [call] + [
        TopKCall(library, call.score.clone(), [x.clone() for x in call.tensors], k)
        for _ in range(copies(moved, device))
    ]

    def theirs(one: TopKCall) -> Call:
        def call() -> None:
            index = one.score.topk(k).indices.sort().values
            expanded = index[..., None].expand(*index.shape, like.head_dim)
            for tensor in one.tensors:
                tensor.gather(2, expanded if tensor.dim() == 4 else index)

        return call

    work = roofline.topk_gather(tokens, k, like.batch, like.kv_heads, rows[0].itemsize * like.head_dim)
    floor = work.floor(bench.gpu) + roofline.select_latency(tokens, bench.gpu)  # one kernel after the other
    return bench.timing("TopKGather", 16, tokens, moved, floor, [ours, [theirs(one) for one in ours]])
