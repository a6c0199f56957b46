"""The three ways in which compression ruins a model, each with a detector and what to do about it.

They differ from a loss of accuracy: a model can lose points in many ways, and these have one cause each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibration.statistics.rank import spearman
from engines.guard import Failure

CASES = 5  # observations below which nothing is said
STEPS = 6  # of an answer that are read from the cache: below it, a trend is none
GRAM = 8  # tokens of what a loop repeats, at most
TIMES, STRETCH = 3, 8  # a loop repeats so often at least, and is so many tokens long at least: "0 0 0" is a number

BLINDNESS, DRIFT, LOOPS = "visual blindness", "semantic drift", "repetition loops"
REMEDIES = {
    BLINDNESS: "keep more visual tokens: raise  [budget] keep  or kv_bytes, lower  [modality] visual_cap; raise  "
    "[perception] keep ; protect what aligns text and image:  [protect] discount = 0.5",
    DRIFT: "keep more in the deep layers: lower  [budget] deep_rate , or drop nothing there and only quantize "
    "(keep = 1.0); more bits, or a longer  [window]",
    LOOPS: 'merge less: raise  [merge] merge_above , or  method = "evict"; where nothing is merged, keep more',
}


def blindness(whole: Sequence[NDArray[np.bool_]], compressed: Sequence[NDArray[np.bool_]], limit: float) -> Failure:
    """Share of what changes with the image in the uncompressed model and does not in the compressed one.

    The first token of an answer comes from prefill, later ones from the cache, so each is counted for itself and the
    worse counts: a model that drops all of the image after prefill still sees it once.

    Args:
        whole, compressed: of every answer, whether the likeliest token at its places is another with another image.
    """
    pairs = [(w[part], c[part]) for part in (slice(1), slice(1, None)) for w, c in zip(whole, compressed, strict=True)]
    first, later = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    told = []
    for what, part in (("first tokens", first), ("later tokens", later)):
        seen = sum(int(w.sum()) for w, _ in part)
        unseen = sum(int((w & ~c).sum()) for w, c in part)
        if seen >= CASES:
            told.append((unseen / seen, seen, what))
    if not told:
        why = f"fewer than {CASES} tokens change with the image in the uncompressed model"
        return Failure(BLINDNESS, None, None, limit, 0, why)
    share, seen, what = max(told)
    detail = f"{share:.0%} of the {seen} {what} that another image changes stay as they are"
    return _failure(BLINDNESS, share, limit, seen, detail)


def drift(divergences: Sequence[Sequence[float]], floor: float, limit: float) -> Failure:
    """How many times farther from the uncompressed model the end of an answer is than its beginning.

    Only answers of `STEPS` steps count. It drifts if the divergence rises with the step (Spearman's correlation above
    1/2), its last third is above the floor, and that is more than `limit` times the first third.

    Args:
        divergences: KL of every answer's steps that are read from the cache, nats.
        floor: below which a divergence does no harm.
    """
    long = [np.asarray(row) for row in divergences if len(row) >= STEPS]
    if len(long) < CASES:
        longest = max(map(len, divergences), default=0)
        why = f"{len(long)} answers are read for {STEPS} tokens or more, the longest for {longest}; {CASES} are needed"
        return Failure(DRIFT, None, None, limit, len(long), why)
    early = float(np.mean([row[: len(row) // 3].mean() for row in long]))
    late = float(np.mean([row[-(len(row) // 3) :].mean() for row in long]))
    rise = float(np.mean(np.nan_to_num([spearman(row, range(len(row))) for row in long])))
    ratio = late / max(early, floor / 100)
    detail = f"logit KL rises from {early:.3g} to {late:.3g} nats, correlation with the step {rise:.2f}"
    drifts = late > floor and rise > 0.5
    return _failure(DRIFT, ratio, limit, len(long), detail, drifts)


def loops(whole: Sequence[Sequence[int]], compressed: Sequence[Sequence[int]], limit: float) -> Failure:
    """Share of the answers that repeat themselves, less that of the uncompressed model."""
    looping = [i for i, answer in enumerate(compressed) if loop(answer)]
    before = sum(loop(answer) is not None for answer in whole)
    detail = f"{len(looping)} of {len(whole)} answers repeat themselves, uncompressed {before}"
    if looping:
        gram, times = loop(compressed[looping[0]]) or (0, 0)
        detail += f"; the first {times} times the same {gram} token{'s' * (gram > 1)}"
    return _failure(LOOPS, max(0, len(looping) - before) / max(len(whole), 1), limit, len(whole), detail)


def loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """The n-gram that tokens repeat, as its length and how often it stands there in a row; None if there is none."""
    for gram in range(1, GRAM + 1):
        run = 0
        for i in range(gram, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - gram]:
                run += 1
            elif run + gram >= max(TIMES * gram, STRETCH):
                return gram, (run + gram) // gram
            else:
                run = 0
    return None


def _failure(name: str, figure: float, limit: float, cases: int, detail: str, condition: bool = True) -> Failure:
    found = condition and figure > limit
    return Failure(name, found, figure, limit, cases, detail, REMEDIES[name] if found else "")
