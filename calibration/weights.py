"""What storing weights in fewer bits costs, on held-out samples: the model before it beside the model after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from calibration.evaluate import prompt_of
from calibration.guard import Guard
from calibration.islands import islands
from calibration.levels import OFF, WARN, split_samples
from calibration.samples import model_inputs
from engines.errors import UserError
from engines.guard import Guarded, Limits
from engines.weights import StoredWeights
from export.checkpoint import Checkpoint
from export.weights import Weights
from export.weights.grid import LEAST_GROUP

MORE_BITS = {"int4": "int8", "int8": "float16", "float16": "float32"}


def guarded_weights(
    checkpoint: Checkpoint,
    weights: Weights,
    way: str,
    folder: Path | None,
    held_out: str | None,
    say: Callable[[str], None],
    task: Callable[[str, int], Callable[[], None]],
) -> tuple[Checkpoint, StoredWeights]:
    """The checkpoint with its weights as they will be stored, and what is told of them.

    Levels are judged afterwards, beside this model: what they cost is told apart from what its weights cost.

    Args:
        way: `off` does not look, `warn` builds what breaks the limits; anything else refuses it.
        folder, held_out, say, task: as `levels.guarded` takes them.

    Raises:
        UserError: the weights cost more than the guard's limits allow.
    """
    parameters = sum(p.numel() for p in checkpoint.model.parameters())
    group = weights.layers.group if weights.bits else 0
    stored = StoredWeights(weights.dtype, group, parameters)  # type: ignore[arg-type]  # one of its names
    if weights.dtype == "float32":
        return checkpoint, stored
    known, others, why = split_samples(checkpoint, folder, held_out, False, say)
    if weights.dtype == "float16":
        seen = [*known, *others]
        found = islands(checkpoint, seen, task("looking for what float16 does not hold", len(seen)))
        for name, reason in found.items():
            say(f"{name} stays float32: {reason}")
        if not seen:
            say(f"warning: activations beyond float16 are not looked for: {why}")
        weights = weights.sparing(checkpoint.model.get_submodule(name) for name in found)
        stored = dataclasses.replace(stored, islands=found)
    if way == OFF or not others:
        note = f"not guarded: {why if way != OFF else OFF}"
        return checkpoint.quantized(weights), dataclasses.replace(stored, guard=Guarded(note=note))
    guard = Guard(checkpoint, known, others, progress=lambda what: task(f"guard: {what}", len(others)))
    guard.checkpoint = checkpoint = checkpoint.quantized(weights)
    for reference in guard.references:  # their embeddings are stored too
        reference.prompt = prompt_of(checkpoint, model_inputs(checkpoint, reference.sample))
    verdict = guard.judge(dataclasses.replace(guard.whole, name=f"{weights.dtype}-weights", guard=Limits()))
    if not (verdict.holds or way == WARN):
        raise UserError(
            f"{weights.dtype} weights are refused: {'; '.join(verdict.reasons)}: {_remedies(weights)}, or build it as "
            "it is (--guard warn)"
        )
    guarded = Guarded([verdict])
    say(f"{weights.dtype} weights: {guarded.line}")
    return checkpoint, dataclasses.replace(stored, guard=guarded)


def _remedies(weights: Weights) -> str:
    """What costs less than these weights, and nothing that they have already."""
    told = f"give more bits (--weights {MORE_BITS[weights.dtype]})"
    coarse = weights.bits and weights.layers.group > LEAST_GROUP
    return f"{told}, a scale for fewer of them (--group {LEAST_GROUP})" if coarse else told
