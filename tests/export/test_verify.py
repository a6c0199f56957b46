"""export/verify.py: what a graph with kernels may err by, layer by layer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.bundle import Graph
from engines.errors import UserError
from export import verify
from export.verify import DEEP, DEEPER, KERNEL_TOLERANCE, _largest_difference

LAYERS = 3 * DEEPER
NAMES = ("logits", "new_store_mass.0", f"new_store_mass.{LAYERS - 1}")


def checked(errors: list[float], depth: int = LAYERS) -> float:
    """Of three outputs whose largest value is one."""
    wanted = {name: torch.tensor([[0.5, 1.0]]) for name in NAMES}
    actual = {name: np.array([[0.5 + e, 1.0]], np.float32) for name, e in zip(NAMES, errors, strict=True)}
    return _largest_difference(wanted, actual, "x", KERNEL_TOLERANCE, depth)


def test_what_random_layers_make_of_an_error_is_none() -> None:
    assert checked([3.9 * KERNEL_TOLERANCE, 0, 3.6 * KERNEL_TOLERANCE]) == pytest.approx(3.9 * KERNEL_TOLERANCE)
    with pytest.raises(UserError, match=r"output logits differs from PyTorch by 8\.2e-02, allowed 0\.08"):
        checked([4.1 * KERNEL_TOLERANCE, 0, 0])


def test_the_first_layer_has_none_before_it() -> None:
    with pytest.raises(UserError, match=r"output new_store_mass\.0 differs"):
        checked([0, 1.1 * KERNEL_TOLERANCE, 0])


def test_without_our_operators_nothing_adds_up() -> None:
    for number in range(len(NAMES)):
        errors = [0.0] * len(NAMES)
        errors[number] = 1.1 * KERNEL_TOLERANCE
        with pytest.raises(UserError, match=NAMES[number].replace(".", r"\.")):
            checked(errors, depth=0)


@pytest.mark.parametrize(
    ("layers", "wrong", "agrees"), [(DEEP, 0, True), (DEEP, 1, False), (9, 2, True), (9, 3, False)]
)
def test_of_a_deep_model_one_state_has_to_agree(
    layers: int, wrong: int, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three states `wrong` come out as something else."""

    class Session:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.runs = 0

        def run(self, _feeds: Any) -> dict[str, np.ndarray]:
            self.runs += 1
            return {"logits": np.array([[0.0 if self.runs <= wrong else 1.0]], np.float32)}

    monkeypatch.setattr(verify, "OrtSession", Session)
    monkeypatch.setattr(verify.nbits, "exact", nullcontext)
    exported = Graph("decode", "x.onnx", [], [], {"QuantKVAttention": layers})
    known: Any = [({}, {"logits": torch.ones(1, 1)})] * 3
    graph: Any = None  # asked again with rounded weights only
    if agrees:
        assert verify._error(graph, known, exported, Path(), None) == 0
    else:
        with pytest.raises(UserError, match="output logits differs"):
            verify._error(graph, known, exported, Path(), None)
