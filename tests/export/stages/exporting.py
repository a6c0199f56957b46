"""Graphs of the tiny model with one recipe: exported, compared with PyTorch, built by TensorRT-RTX."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from engines import trt
from engines.config import parse
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Compact, Prefill, State
from export.recipe import Recipe
from export.to_onnx import WeightFile, export
from export.verify import TOLERANCE, largest_error

LENGTH = 48


def check_exported(checkpoint: Checkpoint, folder: Path, quantize: str = "int8", **tables: Any) -> None:
    """Prefill and Compact agree in ONNX Runtime with PyTorch, and TensorRT-RTX, where it is installed, takes them."""
    window = {"least": 8, "most": 8, "recent": 0.25}
    recipe = parse(
        Recipe,
        {"name": "test", "quantize": {"method": quantize}, "budget": {"keep": 0.4}, "window": window, **tables},
        "test",
    )
    decoder = checkpoint.decoder
    shape = (decoder.kv_heads[0], decoder.head_dim)
    statistics = [KeyStatistics(torch.full(shape, 0.5), torch.full(shape, 4.0))] * decoder.num_layers
    state = State(decoder, recipe, LENGTH)
    files: dict[str, Path] = {}
    with WeightFile(folder) as weights:
        for kind in (Prefill, Compact):
            graph = kind(state, statistics).eval()
            exported = export(graph, kind.kind, weights)
            assert largest_error(graph, exported, folder) < TOLERANCE
            files[kind.kind] = folder / exported.file
    if importlib.util.find_spec("tensorrt_rtx"):
        plans = folder / "plans"
        plans.mkdir()
        assert len(trt.build_plans("trt-rtx", files, plans, workers=1)) == len(files)
