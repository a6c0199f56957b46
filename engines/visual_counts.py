"""How many visual tokens each image of a request keeps: the rule that the runtime follows, and calibration fits.

Standard library only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeAlias

from engines.gate import Adaptive

Curve: TypeAlias = Any  # numbers by index: a list, or a numpy array, which this module does not know
SLACK = 1e-6  # of a token: 0.6 of 10 are 6, whatever floats make of it


def visual_counts(
    adaptive: Sequence[Adaptive],
    tokens: Sequence[int],
    curves: Sequence[Curve],
    entropies: Sequence[float],
    pressure: float = 0.0,
    text: int = 0,
    room: int | None = None,
) -> list[int]:
    """Tokens of each image.

    Args:
        adaptive: of each image, by the layout that it has; all of one rule.
        tokens: N of each image, before any is dropped.
        curves: of each image, coverage by its first 1, 2, ... tokens.
        entropies: of each image; a gate looks at them.
        pressure: memory in use / budget; a gate looks at it.
        text: text tokens of the prompt; a fallback looks at them.
        room: visual tokens that the longest prompt has room for; a quota looks at it. None: any number.
    """
    # Where a rate decides, coverage does not: it would drop more than the rate's limits allow.
    most = []
    for own, size, curve, entropy in zip(adaptive, tokens, curves, entropies, strict=True):
        rates = [own.gate.rate(pressure, entropy)] if own.gate else []
        rates += [own.fallback.rate(sum(tokens), text)] if own.fallback else []
        if rates:
            keep = (1 - min(rates)) * size - SLACK  # the fallback only ever softens the gate
            enough = (n for n in own.counts if n >= keep)
        else:
            enough = (n for n in own.counts if curve[n - 1] >= own.coverage)
        most.append(next(enough, own.counts[-1]))
    if not adaptive or adaptive[0].quota is None:
        return most
    shared = round(adaptive[0].quota * sum(tokens))
    return fill(curves, [own.floor for own in adaptive], most, shared if room is None else min(shared, room))


def fill(curves: Sequence[Curve], floors: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Share `total` tokens out among images: each gets its floor, each further one goes where coverage is lowest.

    Args:
        curves: of each image, coverage by its first 1, 2, ... tokens, [K].
        floors: of each image.
        most: of each image, tokens that it takes at most.

    Returns:
        Tokens of each image; together `total`, unless all have their floor or all have their most.
    """
    counts = [min(floor, limit) for floor, limit in zip(floors, most, strict=True)]
    lowest = [(float(curve[count - 1]), i) for i, (curve, count) in enumerate(zip(curves, counts, strict=True))]
    heapq.heapify(lowest)  # the first image among equals
    for _ in range(min(total, sum(most)) - sum(counts)):
        while counts[lowest[0][1]] == most[lowest[0][1]]:
            heapq.heappop(lowest)
        image = lowest[0][1]
        counts[image] += 1
        heapq.heapreplace(lowest, (float(curves[image][counts[image] - 1]), image))
    return counts
