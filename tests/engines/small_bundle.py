"""A bundle of a few hundred bytes, for tests of the folder and its manifest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import WEIGHTS, Bucket, Embedding, Graph, Level, Manifest, Model, Plan, TensorSpec, seal, writing

TABLE = np.arange(24, dtype=np.float32).reshape(6, 4)
MODEL = Model("toy", 2, 2, 2, 4, 4, 6, 100, 5, 9, None, [2, 3], Embedding(16, "float32", [6, 4]))


def manifest(**changes: Any) -> Manifest:
    graphs = {
        kind: Graph(kind, f"{kind}.onnx", [TensorSpec("x", "float32", [1, 2])], [TensorSpec("y", "int8", [3])])
        for kind in ("vision", "prefill", "decode", "compact")
    }
    buckets = [
        Bucket(8, [4, 5], 4, 2, "prefill", "decode", "compact"),
        Bucket(9, [4, 5], 4, 4, "prefill", "decode", ""),
    ]
    levels = {"light": Level({"window": {"size": 4}, "bits": [8, None]}, 3, "vision", buckets)}
    plans = [Plan("decode", "decode.plan", "trt-rtx", "1.7", ["sm_86"])]
    return dataclasses.replace(
        Manifest(MODEL, levels, "light", graphs, plans, {"ort": "built"}, {"onnx": "1"}), **changes
    )


def fill(folder: Path) -> None:
    for name in ("vision.onnx", "prefill.onnx", "decode.onnx", "compact.onnx", "decode.plan", "tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 3)
    (folder / WEIGHTS).write_bytes(bytes(16) + TABLE.tobytes() + b"more")


def write(out: Path, **changes: Any) -> Manifest:
    with writing(out) as folder:
        fill(folder)
        return seal(folder, manifest(**changes))
