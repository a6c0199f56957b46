"""Precision islands: the products that float16 does not hold, found by running samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calibration.observe import observe
from calibration.samples import Sample
from export.checkpoint import Checkpoint
from export.weights.float16 import LARGEST
from export.weights.weights import PRODUCTS

# Samples are few, and outliers grow with what is read: what comes this near to the end of float16 stays out of it.
HEADROOM = 2.0


def islands(
    checkpoint: Checkpoint, samples: Sequence[Sample], progress: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Names of the modules whose products stay float32, and why."""
    found: dict[str, dict[str, float]] = {}
    modules = {name: m for name, m in checkpoint.model.named_modules() if isinstance(m, PRODUCTS)}

    def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for what, tensor in (("input", inputs[0]), ("output", output)):
            found[name][what] = max(found[name].get(what, 0.0), tensor.abs().max().item())

    def speak(module: nn.Module, inputs: Any, output: Any) -> None:
        checkpoint.decoder.head(output[0][:, -1])

    hooks = [checkpoint.decoder.language_model.register_forward_hook(speak)]
    for name, module in modules.items():
        found[name] = {"weight": module.weight.abs().max().item()}
        hooks.append(module.register_forward_hook(partial(see, name)))
    try:
        with torch.no_grad():
            observe(checkpoint, samples, lambda *_: None, progress)
    finally:
        for hook in hooks:
            hook.remove()
    beyond = {name: max(reach.items(), key=lambda item: item[1]) for name, reach in found.items()}
    return {
        name: f"its {what} reaches {most:,.0f}, and float16 ends at {LARGEST:,.0f}"
        for name, (what, most) in beyond.items()
        if not most < LARGEST / HEADROOM
    }
