"""How many visual tokens of each image enter the language model, where a level leaves that to the request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engines.gate import Gate
from engines.layout import Layout
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

    def __init__(self, level: Level, memory: Memory | None = None) -> None:
        """
        Args:
            memory: whose budget counts where the level names none.
        """
        self._level, self._memory, self.heavy = level, memory, False

    def counts(self, seen: Sequence[dict[str, np.ndarray]], layouts: Sequence[Layout], text: int) -> list[int]:
        """Tokens of each image.

        Args:
            seen: what the vision graph returned of each image.
            layouts: of each image.
            text: text tokens of the prompt.
        """
        views = self._level.seen(layouts)
        adaptive = [view.adaptive for view in views if view.adaptive]  # all of one rule, or none
        if not adaptive:
            return [view.tokens for view in views]
        pressure, tokens = self._pressure(adaptive[0].gate), [layout.tokens for layout in layouts]
        curves, entropies = [out["coverage"][0] for out in seen], [float(out["entropy"][0]) for out in seen]
        return visual_counts(adaptive, tokens, curves, entropies, pressure, text, room=self._longest(text) - text)

    def _longest(self, text: int) -> int:
        """Tokens of the longest prompt that the level takes, `text` of them text."""
        shortened = ((bucket.length, bucket.shortened) for bucket in self._level.buckets)
        return max(s.tokens if s and not s.fits(length, text) else length for length, s in shortened)

    def _pressure(self, gate: Gate | None) -> float:
        """Pressure now, and while `heavy` at least `high`; nobody asks for it without a gate."""
        if gate is None:
            return 0.0
        own = self._memory if not gate.budget_mib else None
        now = own.in_use() / own.budget if own else memory_pressure(gate.budget_mib)
        self.heavy = now > gate.high or (self.heavy and now >= gate.low)
        return max(now, gate.high) if self.heavy else now
