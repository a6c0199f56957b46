"""The toy's graphs: real attention over store + window in a few ONNX nodes, random weights.

A token's row is its embedding + what its position adds + what its kind adds; at the level that compacts, a token of the
prompt also has what its segment adds, and the window holds kinds. Every layer attends from that row (layers do not feed
each other), and the logits are a sum over layers. The second layer's two query heads share one KV head. The store keeps
the *last* C tokens before the window.
"""

from __future__ import annotations

import numpy as np

from engines.bundle import Bucket, Layout
from tests.runtime.onnx_builder import Builder

LAYERS, HEADS, HEAD_DIM, HIDDEN, VOCABULARY, POSITIONS = 2, 2, 4, 8, 32, 120
KV_HEADS = [2, 1]  # of each layer


def drawn(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


WEIGHTS = {
    "embedding": drawn(VOCABULARY, HIDDEN, seed=1),
    "position": drawn(POSITIONS, HIDDEN, seed=2),
    "kind": drawn(3, HIDDEN, seed=3),
    "segment": drawn(POSITIONS, HIDDEN, seed=10),
    "vision": drawn(3, HIDDEN, seed=4, scale=3.0),
    "query": drawn(LAYERS, HIDDEN, HIDDEN, seed=5, scale=0.4),
    "key": drawn(LAYERS, HIDDEN, HIDDEN, seed=6, scale=0.4),
    "value": drawn(LAYERS, HIDDEN, HIDDEN, seed=7),
    "output": drawn(LAYERS, HIDDEN, VOCABULARY, seed=8),
    "skip": drawn(HIDDEN, VOCABULARY, seed=9, scale=0.5),
}


def _state(bucket: Bucket, batch: int = 1) -> dict[str, tuple[str, list[int]]]:
    """name -> dtype and shape of every state tensor."""
    specs: dict[str, tuple[str, list[int]]] = {}
    for layer, slots in enumerate(bucket.capacities):
        heads = KV_HEADS[layer]
        specs |= {
            f"key_store.{layer}": ("float32", [1, heads, slots, HEAD_DIM]),
            f"value_store.{layer}": ("float32", [1, heads, slots, HEAD_DIM]),
            f"store_bias.{layer}": ("float16", [1, heads, slots]),
            f"store_positions.{layer}": ("int32", [1, heads, slots]),
        }
        if bucket.compact:
            specs[f"store_mass.{layer}"] = ("float32", [1, heads, slots])
    specs |= {
        "key_window": ("float32", [1, sum(KV_HEADS), bucket.window, HEAD_DIM]),
        "value_window": ("float32", [1, sum(KV_HEADS), bucket.window, HEAD_DIM]),
    }
    if bucket.compact:
        specs["window_mass"] = ("float32", [1, sum(KV_HEADS), bucket.window])
    specs["window_bias"] = ("float32", [1, bucket.window])
    specs["window_positions"] = ("int32", [1, bucket.window])
    if bucket.compact:
        specs["window_kinds"] = ("int8", [1, bucket.window])
    return {name: (dtype, [batch, *shape[1:]]) for name, (dtype, shape) in specs.items()}


def _rows(g: Builder, embeddings: str, positions: str, kinds: str | None) -> str:
    kind = g.const(WEIGHTS["kind"])
    added = g("Gather", kind, kinds) if kinds else g("Gather", kind, g.const([[1]]))
    return g("Add", g("Add", embeddings, g("Gather", g.const(WEIGHTS["position"]), positions)), added)


def _heads(g: Builder, rows: str, weight: np.ndarray, length: int, heads: int = HEADS) -> str:
    split = g.reshape(g("MatMul", rows, g.const(weight[:, : heads * HEAD_DIM])), -1, length, heads, HEAD_DIM)
    return g("Transpose", split, perm=[0, 2, 1, 3])


def _of_layer(g: Builder, window: str, layer: int) -> str:
    """A layer's part of a window tensor, in which the KV heads of all layers lie side by side."""
    first = sum(KV_HEADS[:layer])
    return g.cut(window, first, first + KV_HEADS[layer], 1)


def _attend(
    g: Builder, query: str, keys: str, values: str, bias: str, layer: int, rows: int = 1, real: str | None = None
) -> tuple[str, str]:
    """[1, H, rows, D] over [1, Hkv, T, D] -> output [1, rows, H * D], and what the T received, [1, Hkv, T].

    The bias is [1, Hkv or 1, T], or of every row, [1, Hkv or 1, rows, T]; rows count where `real` [1, 1, rows, 1] is 1.
    """
    scores = g("Mul", g("MatMul", query, g("Transpose", keys, perm=[0, 1, 3, 2])), g.const(HEAD_DIM**-0.5))
    p = g("Softmax", g("Add", scores, bias if real else g("Unsqueeze", bias, g.const([2]))), axis=-1)
    mixed = g.reshape(g("Transpose", g("MatMul", p, values), perm=[0, 2, 1, 3]), -1, rows, HIDDEN)
    received = g("ReduceSum", g("Mul", p, real) if real else p, g.const([2]), keepdims=0)
    return mixed, received if KV_HEADS[layer] > 1 else g("ReduceMean", received, g.const([1]), keepdims=1)


def _logits(g: Builder, last: str, mixed: list[str]) -> str:
    total = g("MatMul", last, g.const(WEIGHTS["skip"]))
    for layer, value in enumerate(mixed):
        total = g("Add", total, g("MatMul", value, g.const(WEIGHTS["output"][layer])))
    return g.reshape(total, -1, VOCABULARY)


def _tell(
    g: Builder, new: dict[str, list[str]], masses: list[str], width: int, batch: int = 1, tokens: int = 1
) -> Builder:
    """New rows of all layers, and what the window's and they received, where that is counted."""
    heads = sum(KV_HEADS)
    for name, values in new.items():
        g.output(f"new_{name}", g("Concat", *values, axis=1), "float32", batch, heads, tokens, HEAD_DIM)
    if masses:
        everyone = g("Concat", *masses, axis=1)
        total = g("Add", "window_mass", g.cut(everyone, 0, width, 2))
        g.output("new_window_mass", total, "float32", batch, heads, width)
        g.output("new_mass", g.cut(everyone, width, width + tokens, 2), "float32", batch, heads, tokens)
    return g


def vision(layout: Layout, kept: int, adaptive: bool = False) -> Builder:
    """Means of 4 x 4 patches -> rows; the brightest `kept` of them, in their order.

    Adaptive: what the first of them cover is their share of all patches' sigmoid(brightness), and the entropy is the
    sigmoid of the mean brightness; the runtime does not know what they mean.
    """
    g, rows, columns = Builder(), layout.height // 4, layout.width // 4
    pixels = g.reshape(g.input("pixel_values", "float32", *layout.pixel_values), 1, 3, rows, 4, columns, 4)
    means = g("ReduceMean", pixels, g.const([3, 5]), keepdims=0)
    patches = g("Transpose", g.reshape(means, 1, 3, layout.tokens), perm=[0, 2, 1])
    brightness = g("ReduceSum", patches, g.const([2]), keepdims=0)
    bright, best = g.top(brightness, kept, largest=1)
    ascending, rank = g.top(g.cast(best, "float32"), kept, largest=0)
    index = g.cast(ascending, "int64")
    made = g("MatMul", g("Gather", g("Squeeze", patches, g.const([0])), index), g.const(WEIGHTS["vision"]))
    g.output("visual_tokens", made, "float32", 1, kept, HIDDEN)
    g.output("kept", g.cast(index, "int32"), "int32", 1, kept)
    if adaptive:
        total = g("ReduceSum", g("Sigmoid", brightness), g.const([1]), keepdims=1)
        covered = g("Div", g("CumSum", g("Sigmoid", bright), g.const(1)), total)
        g.output("order", g.cast(rank, "int32"), "int32", 1, kept)
        g.output("coverage", covered, "float32", 1, kept)
        g.output("entropy", g("Sigmoid", g("ReduceMean", brightness, g.const([1]), keepdims=0)), "float32", 1)
    return g


def prefill(bucket: Bucket) -> Builder:
    g, length, recent = Builder(), bucket.length, bucket.recent
    state, edge, free = _state(bucket), bucket.length - bucket.recent, bucket.window - bucket.recent
    embeddings = g.input("embeddings", "float32", 1, length, HIDDEN)
    positions = g.input("positions", "int32", 1, length)
    kinds = g.input("kinds", "int32", 1, length)
    rows = _rows(g, embeddings, positions, kinds)
    if bucket.compact:
        segments = g.input("segments", "int32", 1, length)
        rows = g("Add", rows, g("Gather", g.const(WEIGHTS["segment"]), segments))
    last = g.cut(rows, length - 1, length, 1)
    empty = g("Equal", g.cast(kinds, "int64"), g.const([0]))
    bias = g("Where", empty, g.const([-np.inf]), g.const([0.0]))
    places = g("Where", empty, g.cast(g.const([-1]), "int32"), positions)

    made: dict[str, str] = {}
    mixed: list[str] = []
    masses: list[str] = []
    windows: dict[str, list[str]] = {"key": [], "value": []}
    for layer, slots in enumerate(bucket.capacities):
        heads = KV_HEADS[layer]
        keys, values = (_heads(g, rows, WEIGHTS[name][layer], length, heads) for name in ("key", "value"))
        query = _heads(g, last, WEIGHTS["query"][layer], 1)
        out, p = _attend(g, query, keys, values, g("Unsqueeze", bias, g.const([1])), layer)
        mixed.append(out)
        both = g.const([1, KV_HEADS[layer], 1])
        made |= {
            f"key_store.{layer}": g.cut(keys, edge - slots, edge, 2),
            f"value_store.{layer}": g.cut(values, edge - slots, edge, 2),
            f"store_bias.{layer}": g.cast(
                g("Tile", g.reshape(g.cut(bias, edge - slots, edge, 1), 1, 1, slots), both), "float16"
            ),
            f"store_positions.{layer}": g("Tile", g.reshape(g.cut(places, edge - slots, edge, 1), 1, 1, slots), both),
            f"store_mass.{layer}": g.cut(p, edge - slots, edge, 2),
        }
        for name, value in (("key", keys), ("value", values)):
            windows[name].append(g.append(g.cut(value, edge, length, 2), [1, heads, free, HEAD_DIM], 2, 0))
        masses.append(g.append(g.cut(p, edge, length, 2), [1, heads, free], 2, 0))
    made |= {
        "key_window": g("Concat", *windows["key"], axis=1),
        "value_window": g("Concat", *windows["value"], axis=1),
        "window_mass": g("Concat", *masses, axis=1),
        "window_bias": g.append(g.cut(bias, edge, length, 1), [1, free], 1, -np.inf),
        "window_positions": g.append(g.cut(places, edge, length, 1), [1, free], 1, -1, "int32"),
        "window_kinds": g.append(g.cast(g.cut(kinds, edge, length, 1), "int8"), [1, free], 1, 0, "int8"),
    }
    for name, value in made.items():
        if name in state:
            g.output(name, value, state[name][0], *state[name][1])
    g.output("logits", _logits(g, last, mixed), "float32", 1, VOCABULARY)
    assert recent > 0
    return g


def decode(bucket: Bucket, batch: int = 1) -> Builder:
    g, state, width = Builder(), _state(bucket, batch), bucket.window
    embedding = g.input("embedding", "float32", batch, 1, HIDDEN)
    position = g.input("position", "int32", batch, 1)
    for name, (dtype, shape) in state.items():
        if "positions" not in name and "kinds" not in name:
            g.input(name, dtype, *shape)
    row = _rows(g, embedding, position, None)
    window_bias = g.append(g.reshape("window_bias", batch, 1, width), [batch, 1, 1], 2, 0)
    mixed: list[str] = []
    masses: list[str] = []
    new: dict[str, list[str]] = {"key": [], "value": []}
    for layer, slots in enumerate(bucket.capacities):
        rows, heads = {}, KV_HEADS[layer]
        for name in ("key", "value"):
            own = _heads(g, row, WEIGHTS[name][layer], 1, heads)
            new[name].append(own)
            window = _of_layer(g, f"{name}_window", layer)
            rows[name] = g("Concat", f"{name}_store.{layer}", window, own, axis=2)
        both = g("Tile", window_bias, g.const([1, heads, 1]))
        bias = g("Concat", g.cast(f"store_bias.{layer}", "float32"), both, axis=2)
        out, p = _attend(g, _heads(g, row, WEIGHTS["query"][layer], 1), rows["key"], rows["value"], bias, layer)
        mixed.append(out)
        if bucket.compact:
            total = g("Add", f"store_mass.{layer}", g.cut(p, 0, slots, 2))
            g.output(f"new_store_mass.{layer}", total, "float32", batch, heads, slots)
            masses.append(g.cut(p, slots, slots + width + 1, 2))
    g.output("logits", _logits(g, row, mixed), "float32", batch, VOCABULARY)
    return _tell(g, new, masses, width, batch)


def extend(bucket: Bucket) -> Builder:
    """As `decode`, for a left-padded chunk of tokens that see those of them before themselves."""
    g, state, width, chunk = Builder(), _state(bucket), bucket.window, bucket.chunk
    embeddings = g.input("embeddings", "float32", 1, chunk, HIDDEN)
    positions = g.input("positions", "int32", 1, chunk)
    kinds = g.input("kinds", "int32", 1, chunk)
    for name, (dtype, shape) in state.items():
        if "positions" not in name and "kinds" not in name:
            g.input(name, dtype, *shape)
    row = _rows(g, embeddings, positions, None)
    last = g.cut(row, chunk - 1, chunk, 1)
    padding = g("Equal", g.cast(kinds, "int64"), g.const([0]))
    real = g.reshape(g("Where", padding, g.const([0.0]), g.const([1.0])), 1, 1, chunk, 1)
    among = g(
        "Add", g("Where", padding, g.const([-1e9]), g.const([0.0])), g.const(np.triu(np.full((chunk,) * 2, -1e9), 1))
    )
    mixed: list[str] = []
    masses: list[str] = []
    new: dict[str, list[str]] = {"key": [], "value": []}
    for layer, slots in enumerate(bucket.capacities):
        rows, heads = {}, KV_HEADS[layer]
        for name in ("key", "value"):
            own = _heads(g, row, WEIGHTS[name][layer], chunk, heads)
            new[name].append(own)
            rows[name] = g("Concat", f"{name}_store.{layer}", _of_layer(g, f"{name}_window", layer), own, axis=2)
        parts = [
            g("Unsqueeze", g.cast(f"store_bias.{layer}", "float32"), g.const([2])),
            g.reshape("window_bias", 1, 1, 1, width),
            g.reshape(among, 1, 1, chunk, chunk),
        ]
        sizes = (slots, width, chunk)
        each = [g("Expand", p, g.const([1, heads, chunk, size])) for p, size in zip(parts, sizes, strict=True)]
        query = _heads(g, row, WEIGHTS["query"][layer], chunk)
        bias = g("Concat", *each, axis=3)
        out, received = _attend(g, query, rows["key"], rows["value"], bias, layer, chunk, real)
        mixed.append(g.cut(out, chunk - 1, chunk, 1))
        total = g("Add", f"store_mass.{layer}", g.cut(received, 0, slots, 2))
        g.output(f"new_store_mass.{layer}", total, "float32", 1, heads, slots)
        masses.append(g.cut(received, slots, slots + width + chunk, 2))
    g.output("logits", _logits(g, last, mixed), "float32", 1, VOCABULARY)
    return _tell(g, new, masses, width, tokens=chunk)


def compact(bucket: Bucket) -> Builder:
    """Store and the window's oldest tokens -> the last C of them; the window moves its last r to the front."""
    g, state, width = Builder(), _state(bucket), bucket.window
    old = width - bucket.recent
    for name, (dtype, shape) in state.items():
        g.input(name, dtype, *shape)
    for layer, slots in enumerate(bucket.capacities):
        both = g.const([1, KV_HEADS[layer], 1])
        leaving = {
            "key_store": _of_layer(g, "key_window", layer),
            "value_store": _of_layer(g, "value_window", layer),
            "store_bias": g.cast(g("Tile", g.reshape("window_bias", 1, 1, width), both), "float16"),
            "store_positions": g("Tile", g.reshape("window_positions", 1, 1, width), both),
            "store_mass": _of_layer(g, "window_mass", layer),
        }
        for name, window in leaving.items():
            everything = g("Concat", f"{name}.{layer}", g.cut(window, 0, old, 2), axis=2)
            dtype, shape = state[f"{name}.{layer}"]
            g.output(f"new_{name}.{layer}", g.cut(everything, old, slots + old, 2), dtype, *shape)
    fills = {"window_bias": (1, -np.inf), "window_positions": (1, -1), "window_kinds": (1, 0), "window_mass": (2, 0)}
    for name, (axis, fill) in (fills | {"key_window": (2, 0), "value_window": (2, 0)}).items():
        dtype, shape = state[name]
        empty = [*shape[:axis], old, *shape[axis + 1 :]]
        g.output(f"new_{name}", g.append(g.cut(name, old, width, axis), empty, axis, fill, dtype), dtype, *shape)
    return g
