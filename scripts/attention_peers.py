"""What bench_attention.py compares: one step of decode attention, ours and others', each ready to be called.

All attend over the same number of tokens with the same heads. Each has several copies of its cache, more than the
processor's caches hold, and every call takes the next: in a model other layers' caches come between two calls. Each
brings what its own inputs should give, in double precision.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from engines.errors import UserError
from export.attention import full_attention
from export.onnx_functions import ATTENTION, DOMAIN, DOMAIN_VERSION
from export.operators import functions, quant_kv_attention

OURS = "ours"
CONTRIB = "com.microsoft"
PER_CHANNEL = "PER_CHANNEL"
IN_PLACE = {"past_k": "k_out", "past_v": "v_out"}
OPSET, OPSET_OF_ATTENTION, IR_VERSION = 20, 24, 11
GROUP = 32  # tokens of a key's scale and channels of a value's, of 4 bits; as the recipe `int4`
LIMIT, LIMIT_OF_BF16 = 1e-4, 2e-2  # how far a peer may be from the exact result, over that result's largest number

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """One step: a query a head, over `slots` tokens in the store and `window` behind them, which others hold in one."""

    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    window: int

    @property
    def tokens(self) -> int:
        return self.slots + self.window

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def rows(self, heads: int, tokens: int) -> tuple[int, int, int, int]:
        return 1, heads, tokens, self.head_dim


@dataclass
class Peer:
    """One way to compute it.

    Attributes:
        bits: of a number in its cache.
        kv_bytes: bytes of keys, values and scales that a call has to read.
        call: one step, on the next copy of the cache.
        result: what the last call gave.
        exact: what it should have given, in double precision.
    """

    bits: int
    kv_bytes: int
    call: Callable[[], object]
    result: Callable[[], list[np.ndarray]]
    exact: list[np.ndarray]
    limit: float = LIMIT

    def error(self) -> float:
        """How far a call's result is from what it should be, over its largest number; of all results the worst."""
        self.call()
        pairs = list(zip(self.result(), self.exact, strict=True))
        if any(ours.size != theirs.size for ours, theirs in pairs):
            return math.inf
        worst = [np.abs(ours.reshape(exact.shape) - exact).max() / np.abs(exact).max() for ours, exact in pairs]
        return math.inf if np.isnan(worst).any() else float(max(worst))


@dataclass
class Setting:
    """What all peers of one measurement share.

    Attributes:
        cold: bytes that the copies of a cache have together.
        library: ONNX Runtime's, with our kernels.
    """

    shape: Shape
    threads: int
    cold: int
    library: Path | None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def copies(self, kv_bytes: int) -> int:
        return 1 + math.ceil(self.cold / kv_bytes)

    def floats(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def codes(self, bits: int, heads: int, tokens: int) -> np.ndarray:
        size = (self.shape.head_dim * bits + 7) // 8
        return self.rng.integers(-128, 128, (1, heads, tokens, size), dtype=np.int8)

    def scales(self, bits: int, *shape: int) -> np.ndarray:
        """So that numbers are within 2 or so, as the floats are; numbers of float16, as the recipes have them."""
        return ((1 + self.rng.random(shape)) / 2 ** (bits - 1)).astype(np.float16)


class Session:
    """ONNX Runtime on one model, its inputs and outputs bound once: nothing is copied."""

    def __init__(self, model: onnx.ModelProto, setting: Setting, library: Path | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = setting.threads, 4
        # As in engines/ort.py; and of many sessions in one process those that wait would disturb the one that runs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if library is not None:
            options.register_custom_ops_library(str(library))
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.results: list[onnxruntime.OrtValue] = []

    def calls(self, given: Arrays, caches: Arrays, copies: int, in_place: dict[str, str], wanted: Sequence[str]):
        """A call that takes the next copy of the caches.

        Args:
            in_place: inputs whose memory an output is written to, and that output.
            wanted: outputs whose values are of interest.
        """
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        shared = {name: value(array) for name, array in given.items()}
        shapes = {x.name: x.shape for x in self.session.get_outputs()}
        outputs = {n: onnxruntime.OrtValue.ortvalue_from_shape_and_type(shapes[n], np.float32) for n in wanted}
        self.results = list(outputs.values())
        bindings, self.kept = [], []  # a binding does not keep what it binds
        for _ in range(copies):
            binding = self.session.io_binding()
            arrays = {name: array.copy() for name, array in caches.items()}
            own = {name: value(array) for name, array in arrays.items()}
            for name, each in (shared | own).items():
                binding.bind_ortvalue_input(name, each)
            for name, each in (outputs | {y: own[x] for x, y in in_place.items()}).items():
                binding.bind_ortvalue_output(name, each)
            bindings.append(binding)
            self.kept.append((arrays, own, shared))
        following = cycle(bindings).__next__
        return lambda: self.session.run_with_iobinding(following())

    def result(self) -> list[np.ndarray]:
        return [each.numpy() for each in self.results]


def info(arrays: Arrays) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in arrays.items()
    ]


def model(opsets: dict[str, int], nodes, inputs, outputs, initializers=(), bodies=()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "step", inputs, outputs, initializers)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, functions=bodies, opset_imports=imports, ir_version=IR_VERSION)


def operator(setting: Setting, bits: int, library: Path | None) -> Peer:
    """QuantKVAttention, its output alone: our kernel, or, without its library, the body of standard operators."""
    shape, name = setting.shape, ATTENTION[bits, bits].name
    kv, slots, dim = shape.kv_heads, shape.slots, shape.head_dim
    groups = (1, 1) if bits == 8 else (math.ceil(slots / GROUP), math.ceil(dim / GROUP))
    caches = {
        "key_store": setting.codes(bits, kv, slots),
        "key_scale": setting.scales(bits, 1, kv, groups[0], dim),
        "value_store": setting.codes(bits, kv, slots),
        "value_scale": setting.scales(bits, 1, kv, slots, groups[1]),
        "store_bias": np.zeros((1, kv, slots), np.float32),
        "key_window": setting.floats(*shape.rows(kv, shape.window)),
        "value_window": setting.floats(*shape.rows(kv, shape.window)),
    }
    given = {
        "query": setting.floats(*shape.rows(shape.heads, 1)),
        "window_bias": np.zeros((1, 1, shape.window), np.float32),
    }
    inputs = [str(x.name) for x in ATTENTION[bits, bits].function_ir.inputs]
    outputs = [str(x.name) for x in ATTENTION[bits, bits].function_ir.outputs]
    # No masses, as in graphs where no node reads them.
    attributes: dict[str, Any] = {"scale": shape.scale, "key_bits": bits, "value_bits": bits, "masses": 0}
    node = helper.make_node(name, inputs, outputs, domain=DOMAIN, **attributes)
    bodies = [ir.serde.serialize_function(body) for body in functions(1, (bits, bits))[name]]
    opsets = {"": OPSET, DOMAIN: DOMAIN_VERSION}
    results = info({outputs[0]: given["query"]})
    session = Session(model(opsets, [node], info(given | caches), results, bodies=bodies), setting, library)
    kv_bytes = sum(x.nbytes for x in caches.values())
    call = session.calls(given, caches, setting.copies(kv_bytes), {}, outputs[:1])
    exact = [torch.from_numpy((given | caches)[name]) for name in inputs]
    exact = [x if x.dtype == torch.int8 else x.double() for x in exact]
    stated = quant_kv_attention(*exact, shape.scale, bits, bits)[0].numpy()
    return Peer(bits, kv_bytes, call, session.result, [stated])


def grouped_query(setting: Setting, bits: int) -> Peer:
    """ONNX Runtime's GroupQueryAttention: its cache holds all tokens but the new one, which it adds."""
    shape = setting.shape
    kv, dim, tokens, quantized = shape.kv_heads, shape.head_dim, shape.tokens, bits < 32
    given = {
        "q": setting.floats(1, 1, shape.heads * dim),
        "k": setting.floats(1, 1, kv * dim),
        "v": setting.floats(1, 1, kv * dim),
        "last": np.array([tokens - 1], np.int32),
        "total": np.array(tokens, np.int32),
    }
    codes = [setting.codes(bits, kv, tokens) if quantized else setting.floats(*shape.rows(kv, tokens)) for _ in "kv"]
    if bits == 4:
        codes = [x.view(np.uint8) for x in codes]
    inputs = ["q", "k", "v", "past_k", "past_v", "last", "total"]
    attributes: dict[str, Any] = {"num_heads": shape.heads, "kv_num_heads": kv}
    scales: list[np.ndarray] = []
    if quantized:
        scales = [setting.scales(bits, 1, kv, 1, dim).astype(np.float32) for _ in "kv"]
        inputs += [*[""] * 5, "k_scale", "v_scale"]
        attributes |= {"k_quant_type": PER_CHANNEL, "v_quant_type": PER_CHANNEL, "kv_cache_bit_width": bits}
    node = helper.make_node("GroupQueryAttention", inputs, ["o", "k_out", "v_out"], domain=CONTRIB, **attributes)
    caches = {"past_k": codes[0], "past_v": codes[1]}
    outputs = info({"o": given["q"], "k_out": codes[0], "v_out": codes[1]})
    initializers = [numpy_helper.from_array(x, name) for name, x in zip(inputs[-2:], scales, strict=False)]
    opsets = {"": OPSET, CONTRIB: 1}
    session = Session(model(opsets, [node], info(given | caches), outputs, initializers), setting)
    kv_bytes = sum(x.nbytes for x in (*codes, *scales))
    call = session.calls(given, caches, setting.copies(kv_bytes), IN_PLACE, ["o"])

    def rows(which: int) -> np.ndarray:
        """Keys or values as they are after the call: the new row is quantized too."""
        stored, new = codes[which], given["kv"[which]].reshape(kv, dim)
        if bits == 4:  # two a byte, neighbours, plus 8
            stored = np.stack([stored & 15, stored >> 4], axis=-1).reshape(shape.rows(kv, tokens)) - 8.0
        exact = stored.astype(np.float64)
        if not quantized:
            exact[0, :, -1] = new
            return exact
        most, scale = 2 ** (bits - 1), scales[which]
        exact[0, :, -1] = np.clip(np.rint(new / scale[0, :, 0]), -most, most - 1)
        return exact * scale

    return Peer(bits, kv_bytes, call, session.result, attention(shape, given["q"], rows(0), rows(1)))


def attention24(setting: Setting) -> Peer:
    """ONNX's own Attention, of opset 24, over a cache that TensorScatter adds the new token to."""
    shape = setting.shape
    kv, tokens = shape.kv_heads, shape.tokens
    given = {
        "q": setting.floats(*shape.rows(shape.heads, 1)),
        "k": setting.floats(*shape.rows(kv, 1)),
        "v": setting.floats(*shape.rows(kv, 1)),
        "where": np.array([tokens - 1]),
        "count": np.array([tokens]),
    }
    caches = {f"past_{n}": setting.floats(*shape.rows(kv, tokens)) for n in "kv"}
    nodes = [helper.make_node("TensorScatter", [f"past_{n}", n, "where"], [f"{n}_out"], axis=2) for n in "kv"]
    nodes.append(helper.make_node("Attention", ["q", "k_out", "v_out", "", "", "", "count"], ["o"]))
    outputs = info({"o": given["q"], "k_out": caches["past_k"], "v_out": caches["past_v"]})
    session = Session(model({"": OPSET_OF_ATTENTION}, nodes, info(given | caches), outputs), setting)
    kv_bytes = sum(x.nbytes for x in caches.values())
    call = session.calls(given, caches, setting.copies(kv_bytes), IN_PLACE, ["o"])
    rows = [np.concatenate([caches[f"past_{n}"][:, :, :-1], given[n]], axis=2) for n in "kv"]
    return Peer(32, kv_bytes, call, session.result, attention(shape, given["q"], *rows))


def sdpa(setting: Setting, dtype: torch.dtype, grouped: bool) -> Peer:
    """PyTorch's scaled_dot_product_attention; `grouped`: the query heads of a KV head as its queries."""
    shape = setting.shape
    kv = shape.kv_heads
    query = torch.from_numpy(setting.floats(*shape.rows(shape.heads, 1))).to(dtype)
    cache = [torch.from_numpy(setting.floats(*shape.rows(kv, shape.tokens))).to(dtype) for _ in "kv"]
    kv_bytes = sum(x.nbytes for x in cache)
    following = cycle([[x.clone() for x in cache] for _ in range(setting.copies(kv_bytes))]).__next__
    asked = query.reshape(1, kv, -1, shape.head_dim) if grouped else query
    done: list[Tensor] = []

    @torch.inference_mode()
    def call() -> None:
        key, value = following()
        done[:] = [torch.nn.functional.scaled_dot_product_attention(asked, key, value, enable_gqa=not grouped)]

    exact = attention(shape, *(x.double().numpy() for x in (query, *cache)))
    limit = LIMIT if dtype == torch.float32 else LIMIT_OF_BF16
    return Peer(8 * dtype.itemsize, kv_bytes, call, lambda: [done[0].float().numpy()], exact, limit)


def attention(shape: Shape, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """The exact result, [1, heads, 1, head_dim]."""
    q, k, v = (torch.from_numpy(x.astype(np.float64)) for x in (query.reshape(shape.rows(shape.heads, 1)), key, value))
    return [full_attention(q, k, v, torch.zeros(1, 1, shape.tokens, dtype=torch.double), shape.scale).numpy()]


class Reader:
    """The floor: one read of memory that no cache of the processor holds, by C's memcmp, and nothing else done.

    memcmp of a buffer's two equal halves reads every byte once, in vectors, and runs outside Python's lock, so that
    threads read side by side. No reader of C with AVX-512 loads was found to be faster.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.part = size // threads // 2
        self.bytes = 2 * self.part * threads
        self.buffer = np.ones(self.bytes, np.int8)
        self.starts = [self.buffer.ctypes.data + 2 * self.part * i for i in range(threads)]
        self.pool = ThreadPoolExecutor(threads)
        self.compare = ctypes.CDLL(None).memcmp
        self.compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def __call__(self) -> None:
        ends = list(self.pool.map(lambda start: self.compare(start, start + self.part, self.part), self.starts))
        if any(ends):
            raise UserError(
                "the memory that was read for the floor changed under way: this machine's memory is damaged"
            )


def peers(setting: Setting) -> dict[str, Callable[[], Peer]]:
    """All that is compared, in the order of the table, and what makes it ready."""
    ours: dict[str, Callable[[], Peer]] = {
        f"{OURS} int{bits}": partial(operator, setting, bits, setting.library) for bits in (8, 4)
    }
    return (ours if setting.library is not None else {}) | {
        **{f"inlined body int{bits}": partial(operator, setting, bits, None) for bits in (8, 4)},
        **{f"GroupQueryAttention int{bits}": partial(grouped_query, setting, bits) for bits in (8, 4)},
        "GroupQueryAttention fp32": partial(grouped_query, setting, 32),
        "Attention-24 fp32": partial(attention24, setting),
        "torch SDPA fp32": partial(sdpa, setting, torch.float32, False),
        "torch SDPA fp32, grouped": partial(sdpa, setting, torch.float32, True),
        "torch SDPA bf16, grouped": partial(sdpa, setting, torch.bfloat16, True),
    }
