"""How many visual tokens of each image enter the language model, where a level leaves that to the request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engines.gate import Gate
from engines.manifest import Level
from engines.visual_counts import visual_counts
from runtime.memory import MIB, Memory, resident


def memory_pressure(budget_mib: int) -> float:
    """Memory in use / budget: of this process, or of the whole machine if there is no budget (Linux; elsewhere 0)."""
    try:
        if budget_mib:
            return resident() / (budget_mib * MIB)
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        known = {row[0]: int(row[1]) for row in rows}
        return 1 - known["MemAvailable:"] / known["MemTotal:"]
    except (OSError, ValueError, LookupError):
        return 0.0


class VisualGate:
    """Decides, before prefill, how many of its returned tokens each image of a request keeps.

    Attributes:
        heavy: whether memory pressure was over the gate's `high` and has not been under its `low` since.
    """

    def __init__(self, level: Level, image_tokens: int, memory: Memory | None = None) -> None:
        """
        Args:
            image_tokens: N, of an image before any is dropped.
            memory: whose budget counts where the level names none.
        """
        self._level, self._tokens, self._memory, self.heavy = level, image_tokens, memory, False

    def counts(self, seen: Sequence[dict[str, np.ndarray]], text: int) -> list[int]:
        """Tokens of each image.

        Args:
            seen: what the vision graph returned of each image.
            text: text tokens of the prompt.
        """
        adaptive = self._level.adaptive
        if adaptive is None:
            return [self._level.visual_tokens] * len(seen)
        pressure = self._pressure(adaptive.gate) if adaptive.gate else 0.0
        curves, entropies = [out["coverage"][0] for out in seen], [float(out["entropy"][0]) for out in seen]
        return visual_counts(adaptive, self._tokens, curves, entropies, pressure, text, room=self._longest(text) - text)

    def _longest(self, text: int) -> int:
        """Tokens of the longest prompt that the level takes, `text` of them text."""
        shortened = ((bucket.length, bucket.shortened) for bucket in self._level.buckets)
        return max(s.tokens if s and not s.fits(length, text) else length for length, s in shortened)

    def _pressure(self, gate: Gate) -> float:
        """Pressure now, and while `heavy` at least `high`."""
        own = self._memory if not gate.budget_mib else None
        now = own.in_use() / own.budget if own else memory_pressure(gate.budget_mib)
        self.heavy = now > gate.high or (self.heavy and now >= gate.low)
        return max(now, gate.high) if self.heavy else now
