"""Measure the attention map: the samples are read one by one, and what each adds is kept until the map is written.

Nothing that grows with the number of samples is held but sums and a fixed number of rows; of the attention itself one
layer's matrix for one sample. A sample's part is a file in the work folder, named by all that it depends on: a run that
was interrupted finds them again and ends as if it had not been.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from calibration.attention_map import FEW, FORMAT, KINDS, QUANTILES, AttentionMap, Facts, Sizes, statistics
from calibration.looking import read_sample
from calibration.memory import write
from calibration.samples import Sample
from calibration.statistics import cache
from calibration.statistics.kind import kind
from engines.bundle import sha256
from engines.errors import UserError
from export.checkpoint import Checkpoint

ROWS = 4096  # of keys and of values of each kind that percentiles are of, of all samples together
DECIDING = (  # files of a checkpoint: configurations, tokenizer, chat template, weights
    "*config.json", "tokenizer*", "*tokens*.json", "vocab.*", "merges.txt", "chat_template.*",
    "*.model", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json",
)  # fmt: skip
SIGNALS = ("answer_entropy", "layer_similarity", "step_similarity")  # in the order that `kind` takes them
TEXT_ONLY = "calibrated on text only: visual tokens have other ranges; give samples with images"


def measure(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    work: Path | None = None,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> AttentionMap:
    """Read every sample and its answer, the model's own where the sample has none.

    Args:
        checkpoint: as it was loaded: a part in the work folder is known by the checkpoint's files.
        work: folder for the samples' parts, which is made and left with them; None: a temporary one.
        seed: chooses the rows that percentiles are of.
        progress: called once a sample.

    Raises:
        UserError: a sample that makes no prompt, or is longer than the model reads.
    """
    with contextlib.ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        weights = fingerprint(checkpoint)
        rows = max(1, ROWS // len(samples))
        parts = []
        for index, sample in enumerate(samples):
            path = folder / f"{_name(weights, sample, seed, index, rows)}.safetensors"
            if not _whole(path):
                write(path, save(read_sample(checkpoint, sample, rows, np.random.default_rng([seed, index]))))
            parts.append(path)
            progress()
        return _finish(checkpoint, samples, parts, weights, seed)


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of the files of a checkpoint that decide what the model says; others may lie beside them."""
    files = sorted({path for pattern in DECIDING for path in checkpoint.path.glob(pattern) if path.is_file()})
    return hashlib.sha256("".join(f"{path.name} {sha256(path)}\n" for path in files).encode()).hexdigest()


def check(found: AttentionMap, checkpoint: Checkpoint) -> None:
    """
    Raises:
        UserError: the map is of another model.
    """
    if found.facts.weights != fingerprint(checkpoint):
        raise UserError(
            f"the attention map is of {found.facts.model} with other weights: measure it again with  "
            f"python -m calibration map {checkpoint.path}"
        )


def _name(weights: str, sample: Sample, seed: int, index: int, rows: int) -> str:
    pictures = [sha256(path) for path in sample.images]
    known = (FORMAT, weights, pictures, sample.prompt, sample.answer, seed, index, rows)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _whole(path: Path) -> bool:
    try:
        load_file(path)
    except (OSError, SafetensorError):
        return False
    return True


def _finish(
    checkpoint: Checkpoint, samples: Sequence[Sample], parts: Sequence[Path], weights: str, seed: int
) -> AttentionMap:
    """The map from the samples' parts, added up in the samples' order."""
    summed: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    for path in parts:
        for name, tensor in load_file(path).items():
            how = {"min": torch.minimum, "max": torch.maximum}.get(name.split()[0], torch.add)
            if name.startswith("rows "):
                rows.setdefault(name, []).append(tensor)
            else:
                summed[name] = how(summed[name], tensor) if name in summed else tensor
    names = [name.removeprefix("sum ") for name in summed if name.startswith("sum ")]
    found = {name: summed[f"sum {name}"] / summed[f"count {name}"] for name in names}

    layers, kv_heads, _, head_dim = found["key_power1"].shape
    heads = found["entropy"].shape[1]
    nothing = torch.full([layers, kv_heads, head_dim], torch.nan)
    for what in ("key", "value"):
        found[f"{what}_mean"], square = found.pop(f"{what}_power1"), found.pop(f"{what}_power2")
        found[f"{what}_std"] = (square - found[f"{what}_mean"].square()).clamp(min=0).sqrt()
        for end in ("min", "max"):
            found[f"{what}_{end}"] = torch.stack([summed.get(f"{end} {what} {k}", nothing) for k in KINDS], dim=2)
        percentiles = [_percentiles(rows.get(f"rows {what} {k}", [nothing[:, :, None]])) for k in KINDS]
        found[f"{what}_percentiles"] = torch.stack(percentiles, dim=2)
    square = found.pop("value_norm_square")
    found["value_norm_spread"] = (square - found["value_norm"].square()).clamp(min=0).sqrt() / found["value_norm"]

    count = summed["count key_power1"]
    center = summed["sum key_power1"].sum(dim=2) / count.sum(dim=2)
    low = found["key_min"].double().nan_to_num(torch.inf).amin(dim=2)
    high = found["key_max"].double().nan_to_num(-torch.inf).amax(dim=2)
    deviation = (summed["sum key_power2"].sum(dim=2) / count.sum(dim=2) - center.square()).clamp(min=0).sqrt()
    bias = key_bias(checkpoint, layers, (kv_heads, head_dim))
    found |= {
        "key_outlier": cache.outlier(torch.maximum(-low, high)),
        "key_outlier_centred": cache.outlier(torch.maximum(center - low, high - center)),
        "key_bias_norm": bias.norm(dim=-1),
        "key_bias_spike": cache.bias_spike(bias, deviation),
    }
    arrays = {f.name: found.pop(f.name).float().numpy() for f in statistics()}
    told = {name: float(np.nanmean(arrays[name])) for name in SIGNALS if not np.isnan(arrays[name]).all()}
    with_images = sum(bool(sample.images) for sample in samples)
    facts = Facts(
        model=checkpoint.path.resolve().name,
        weights=weights,
        sizes=Sizes(layers, heads, kv_heads, head_dim),
        samples=len(samples),
        with_images=with_images,
        tokens=int(summed["tokens"]),
        steps=int(summed["steps"]),
        seed=seed,
        kind=kind(*(told.get(name, np.nan) for name in SIGNALS)),
        signals={name: told.get(name) for name in SIGNALS},
        warnings=warnings(len(samples), with_images, checkpoint),
    )
    return AttentionMap(facts=facts, **arrays)


def _percentiles(parts: list[Tensor]) -> Tensor:
    """Of every channel over rows [layers, kv_heads, rows, head_dim], [layers, kv_heads, quantiles, head_dim]."""
    layers = (torch.cat([part[layer] for part in parts], dim=1).numpy() for layer in range(len(parts[0])))
    return torch.stack([torch.from_numpy(np.quantile(layer, QUANTILES, axis=1)).movedim(0, 1) for layer in layers])


def key_bias(checkpoint: Checkpoint, layers: int, shape: tuple[int, int]) -> Tensor:
    """Biases of k_proj by KV head, float64 [layers, kv_heads, head_dim]; 0 where a layer has none."""
    biases = torch.zeros(layers, *shape, dtype=torch.float64)
    modules: list[Any] = [m for m in checkpoint.decoder.language_model.modules() if hasattr(m, "k_proj")]
    for attention in modules:
        if attention.k_proj.bias is not None:
            biases[attention.layer_idx] = attention.k_proj.bias.view(shape)
    return biases


def warnings(samples: int, with_images: int, checkpoint: Checkpoint) -> list[str]:
    found = [TEXT_ONLY] if checkpoint.takes_images and not with_images else []
    if samples < FEW:
        found.append(f"{samples} samples are few: from {FEW} on the figures hold better")
    return found
