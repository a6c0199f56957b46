"""A bundle of a few hundred bytes, for tests of the folder and its manifest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import (
    WEIGHTS,
    Bucket,
    Embedding,
    Graph,
    Layout,
    Level,
    Manifest,
    Model,
    Plan,
    TensorSpec,
    View,
    seal,
    writing,
)

TABLE = np.arange(24, dtype=np.float32).reshape(6, 4)
LAYOUTS = [Layout("2x2", 2, 2, [1, 3, 2, 2], "<i>" * 9, 9)]
MODEL = Model("toy", 2, [2, 1], 4, 4, 6, 5, "<i>", LAYOUTS, None, [2, 3], Embedding(16, "float32", [6, 4]))


def specs(**shapes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]


def graphs() -> dict[str, Graph]:
    """What a bucket of 8 tokens with a window of 4 needs, with no store but its keys' and values' windows."""
    window = {"key_window": [1, 3, 4, 4], "value_window": [1, 3, 4, 4]}
    taken = {
        "vision": specs(pixel_values=[1, 3, 2, 2]),
        "prefill": specs(embeddings=[1, 8, 4], positions=[1, 8], kinds=[1, 8], segments=[1, 8]),
        "decode": specs(embedding=[1, 1, 4], position=[1, 1], **window),
        "decode_2": specs(embedding=[2, 1, 4], position=[2, 1], **{name: [2, 3, 4, 4] for name in window}),
        "extend": specs(embeddings=[1, 2, 4], positions=[1, 2], kinds=[1, 2], **window),
        "compact": specs(**window),
    }
    given = {
        "vision": specs(visual_tokens=[1, 3, 4], kept=[1, 3]),
        "prefill": specs(logits=[1, 6], **window),
        "decode": specs(logits=[1, 6]),
        "decode_2": specs(logits=[2, 6]),
        "extend": specs(logits=[1, 6], new_key=[1, 3, 2, 4], new_value=[1, 3, 2, 4]),
        "compact": specs(**{f"new_{name}": shape for name, shape in window.items()}),
    }
    kinds: dict[str, Any] = {name: name.removesuffix("_2") for name in taken}
    return {name: Graph(kinds[name], f"{name}.onnx", taken[name], given[name]) for name in taken}


def manifest(**changes: Any) -> Manifest:
    buckets = [
        Bucket(8, [4, 5], 4, 2, "prefill", "decode", "compact", None, "extend", 2, "decode_2", 2),
        Bucket(8, [4, 5], 4, 4, "prefill", "decode", ""),
    ]
    views = {"2x2": View("vision", 3)}
    levels = {"light": Level({"window": {"size": 4}, "bits": [8, None]}, [2, 1], 100, views, buckets)}
    plans = [Plan("decode", "decode.plan", "trt-rtx", "1.7", ["sm_86"])]
    return dataclasses.replace(
        Manifest(MODEL, levels, "light", graphs(), plans, {"ort": "built"}, {"onnx": "1"}), **changes
    )


def fill(folder: Path) -> None:
    for name in (*(graph.file for graph in graphs().values()), "decode.plan", "tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 3)
    (folder / WEIGHTS).write_bytes(bytes(16) + TABLE.tobytes() + b"more")


def write(out: Path, **changes: Any) -> Manifest:
    with writing(out) as folder:
        fill(folder)
        return seal(folder, manifest(**changes))
