"""Each exported graph, run in ONNX Runtime on random input, must agree with its PyTorch module."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines import bundle, products
from engines.errors import UserError
from engines.ort import OrtSession
from export.graphs import NEW, Graph
from export.operators import OPERATORS
from export.stages.tokens import ALIGNED, FIRST, PADDING, TEXT, VISUAL
from export.weights import nbits

# One token alone, as `extend` may read too, can miss a weight that feeds a gate it leaves shut. Many tokens do not, and
# of a large model each time that they are read is most of a build.
SEEDS = {"decode": 3, "extend": 3, "compact": 3}
TOLERANCE = 2e-3  # float32 sums in another order, a few layers deep, relative to the largest value
# A kernel may round queries and weights to 16 bits. Random keys draw attention sharper than a model does, and logits of
# the demo's graphs then err by 5e-3; what is computed wrong errs by tenths. kernel_check.py looks at kernels alone.
KERNEL_TOLERANCE = 2e-2
# Every layer of random keys makes an error of those before it larger, now and then much: SmolLM2-135M's thirty turn
# 1e-5 into 1e-2, of 60 states into 2e-1 once. With more than DEEP layers one state that agrees is enough.
DEEPER, DEEP = 4, 8  # layers: in which as much again is allowed
# With quantized weights, as they run, inputs of every product are rounded to 8 bits: logits of the demo's graphs err by
# 3e-2, SmolLM2-135M's by 1.5e-1, and over random keys by 1. It is looked at with nothing in the cache, beside the check
# that counts, of the same weights with inputs as they are.
ROUNDED_TOLERANCE = 2e-1

Known = tuple[dict[str, np.ndarray], dict[str, Tensor]]  # what a graph is fed, and PyTorch's outputs

NEWEST = 4096  # position of what is read behind random states: none of theirs lies before the first


def random_inputs(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Plausible tensors for a graph: finite rows, some padding, some empty slots."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for spec in graph.inputs.values():
        name = spec.name.split(".")[0]
        if name.endswith("kinds"):
            marked = [TEXT + FIRST, VISUAL + ALIGNED] if name != "kinds" else []
            value = rng.choice([TEXT, VISUAL, *marked], spec.shape)
            value[..., : spec.shape[-1] // 8 if name == "kinds" else 0] = PADDING
        elif name == "segments":
            value = np.cumsum(rng.random(spec.shape) < 0.2, axis=-1) + 1
        elif name == "position_ids":
            value = rng.integers(0, spec.shape[-1], spec.shape)
        elif name.endswith("positions"):
            step = 2 if name == "store_positions" else 1  # others were dropped
            first = NEWEST - spec.shape[-1] * step if name != "positions" else NEWEST * (graph.kind == "extend")
            value = np.broadcast_to(first + step * np.arange(spec.shape[-1]), spec.shape).copy()
        elif name == "position":
            value = NEWEST - 5 * np.arange(spec.shape[0])[:, None]  # rows of a batch are ragged
        elif name.endswith("bias"):
            filled = spec.shape[-1] * 7 // (8 + np.arange(spec.shape[0]).reshape(-1, *[1] * (len(spec.shape) - 1)))
            value = np.where(np.arange(spec.shape[-1]) < filled, 0, -np.inf) + np.zeros(spec.shape)
        elif name == "asked":
            value = np.broadcast_to(np.arange(spec.shape[-1]) >= rng.integers(spec.shape[-1]), spec.shape)
        elif spec.dtype == "int8":
            value = rng.integers(-127, 128, spec.shape)
        elif name.endswith(("scale", "mass")):
            value = rng.random(spec.shape) * 0.1 + 0.01
        else:
            value = rng.standard_normal(spec.shape)
        feeds[spec.name] = value.astype(spec.dtype)
    return feeds


def largest_error(graph: Graph, exported: bundle.Graph, folder: Path, library: Path | None = None) -> float:
    """Run both and compare; the largest difference relative to each output's largest value.

    Where ONNX Runtime and PyTorch keep different tokens of nearly equal score, those slots are left out, and may be
    one in a hundred at most.

    Args:
        library: kernels of the operators, and of products of few rows: the graph is run with them too, not only with
            the functions' bodies and ONNX Runtime's products.

    Raises:
        UserError: an output differs by more than `TOLERANCE`, with kernels `KERNEL_TOLERANCE`, or in shape.
    """
    known = [_known(graph, random_inputs(graph, seed)) for seed in range(SEEDS.get(exported.kind, 1))]
    return max(_error(graph, known, exported, folder, kernels) for kernels in dict.fromkeys([None, library]))


def _known(graph: Graph, feeds: dict[str, np.ndarray]) -> Known:
    with torch.no_grad():
        outputs = graph(*(torch.from_numpy(v) for v in feeds.values()))
    return feeds, dict(zip(graph.outputs, outputs, strict=True))


def _error(graph: Graph, known: list[Known], exported: bundle.Graph, folder: Path, library: Path | None) -> float:
    """With one session at a time: each may hold all weights once more."""
    name = exported.file + (f" with the kernels of {library.name}" if library else "")
    tolerance = KERNEL_TOLERANCE if library else TOLERANCE
    depth = exported.operators.get(OPERATORS["quant_kv_attention"].name, 0)
    with nbits.exact(folder / exported.file) as path:
        worst, rounds = 0.0, path.name != exported.file
        session = OrtSession(path, library=library, mapped=not rounds, few_rows=products.few(exported))
        refused: list[UserError] = []
        for feeds, expected in known:
            try:
                worst = max(worst, _largest_difference(expected, session.run(feeds), name, tolerance, depth))
            except UserError as error:
                refused.append(error)
        if len(refused) > (len(known) - 1) * (depth > DEEP):
            raise refused[0]
        del session
    if rounds:
        session = OrtSession(folder / exported.file, library=library)
        for feeds, _ in known:
            cleared, expected = _known(graph, {name: _cleared(name, value) for name, value in feeds.items()})
            logits = {"logits": expected["logits"]}  # which tokens are kept may differ
            _largest_difference(logits, session.run(cleared), f"{name}, inputs rounded", ROUNDED_TOLERANCE)
    return worst


def _cleared(name: str, value: np.ndarray) -> np.ndarray:
    """What says that nothing is in the cache."""
    return np.full_like(value, -np.inf) if name.partition(".")[0].endswith("bias") else value


def _kept_by_both(
    expected: dict[str, Tensor], actual: dict[str, np.ndarray], file: str
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """A vision graph's outputs at the tokens that both keep, [1, common, ...]; what is no token's as it is."""
    _, wanted, got = np.intersect1d(expected["kept"].numpy(), actual["kept"], return_indices=True)
    if (share := len(wanted) / expected["kept"].shape[1]) < 0.99:
        raise UserError(f"{file}: kept agrees with PyTorch in {share:.1%} of the tokens only")
    rows = ("visual_tokens", "kept", "deepstack")  # `order` is left out: one near tie early on shifts all behind it
    return (
        {name: t[:, wanted] if name in rows else t for name, t in expected.items() if name != "order"},
        {name: t[:, got] if name in rows else t for name, t in actual.items()},
    )


def _largest_difference(
    expected: dict[str, Tensor],
    actual: dict[str, np.ndarray],
    file: str,
    tolerance: float = TOLERANCE,
    depth: int = 0,
) -> float:
    """
    Args:
        depth: layers whose errors add up; `NAME.3` is of layer 3.
    """
    worst = 0.0
    for name, want in expected.items():
        if want.shape != actual[name].shape:
            raise UserError(f"{file}: output {name} has shape {actual[name].shape}, PyTorch gives {tuple(want.shape)}")
    if "kept" in expected:
        expected, actual = _kept_by_both(expected, actual, file)
    for name, want in expected.items():
        wanted, got = want.numpy().astype(np.float64), actual[name].astype(np.float64)
        kept = _kept(name, expected, actual)
        if kept.mean() < 0.99:
            raise UserError(f"{file}: {name} agrees with PyTorch in {kept.mean():.1%} of the slots only")
        same = _of_shape(kept, wanted.shape)
        if np.isnan(wanted).any():
            raise UserError(f"{file}: PyTorch's output {name} is not a number: are the checkpoint's weights finite?")
        finite = np.isfinite(wanted)
        if (finite != np.isfinite(got))[same].any():
            raise UserError(f"{file}: output {name} is not finite where PyTorch's is")
        difference = np.abs(wanted[same & finite] - got[same & finite])
        if actual[name].dtype == np.int8:
            # One step is a rounding tie, not an error; of codes that share a byte it may change the byte by more.
            difference = np.sort(np.maximum(difference - 1, 0))[: ceil(0.99 * len(difference))]
        scale = max(np.abs(wanted[finite]).max(initial=0), 1e-3)
        apart, layer = difference.max(initial=0) / scale, name.rpartition(".")[2]
        allowed = tolerance * (1 + (min(int(layer), depth) if layer.isdigit() else depth) / DEEPER)
        if apart > allowed:
            raise UserError(f"{file}: output {name} differs from PyTorch by {apart:.1e}, allowed {allowed:g}")
        worst = max(worst, apart)
    return worst


def _kept(name: str, expected: dict[str, Tensor], actual: dict[str, np.ndarray]) -> np.ndarray:
    """Which slots of an output's store hold the same token, by position or by key, bool [batch, kv_heads, slots]."""
    kind, _, layer = name.partition(".")
    prefix = NEW if kind.startswith(NEW) else ""
    places, keys = f"{prefix}store_positions.{layer}", f"{prefix}key_store.{layer}"
    if places in expected:
        return actual[places] == expected[places].numpy()
    if keys not in expected:
        return np.ones(1, bool)
    want = expected[keys].double().numpy()
    near = 1.0 if actual[keys].dtype == np.int8 else TOLERANCE * np.abs(want).max()
    return (np.abs(actual[keys] - want) <= near).mean(axis=-1) > 0.5


def _of_shape(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The same of an output's numbers, bool of its shape; where one is of several slots, of those heads that agree."""
    if kept.size == 1:
        return np.ones(shape, bool)
    if shape[2] != kept.shape[2]:
        kept = np.all(kept, axis=2, keepdims=True)
    return np.broadcast_to(kept if len(shape) == 3 else kept[..., None], shape)
