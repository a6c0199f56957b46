"""Search for a recipe: one change at a time, in the order in which they matter most, each judged by the guard.

A target of bytes: recipes of equal bytes compete. A target of accuracy: they compete at bytes so few that the best so
far does not hold any more, where they differ, and the winner is then taken to the fewest bytes that it bears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from calibration import candidates
from calibration.candidates import Draft, Move
from calibration.lighten import ROOM
from calibration.workbench import Workbench
from engines.errors import UserError, one_line
from engines.guard import Verdict
from export.recipe import Recipe

STEP = 1.1  # bytes of a level in multiples of the next one's
LEVELS = 40  # from `ROOM` of the fp16 bytes down to a sixtieth
STRIDE = 8  # levels at once, as long as nothing is known
RESERVE = 2  # levels above the edge that the recipe stays: a few answers tell where it is, other prompts have another

MovesOf = Callable[[Workbench, Draft], Sequence[Move]]
Keep = Callable[[Verdict], tuple[bool, str]]  # whether a recipe is kept, and why

ORDER: tuple[tuple[str, MovesOf], ...] = (
    ("layers", lambda bench, best: candidates.layers()),
    ("modalities", lambda bench, best: candidates.modalities(bench.densities)),
    ("importance", lambda bench, best: candidates.importance(bench.later)),
    ("weights", lambda bench, best: candidates.weights(best)),
    ("bits", lambda bench, best: [*candidates.bits(), ("quantize.method = by-layer", bench.by_layer)]),
    ("heads", lambda bench, best: bench.thresholds(best)),
)


@dataclass(frozen=True)
class Trial:
    """A recipe and what became of it.

    Attributes:
        step: of the tuning order, or what else it was tried for.
        change: in words.
        recipe: its settings.
        bytes_per_token: of the KV state, for each token of the prompts before any is pruned; `kv_share` of fp16's.
        accuracy: exact answers, percent.
        verdict: None where there can be no such recipe.
        kept: whether the search went on from it; `why`.
    """

    step: str
    change: str
    recipe: dict[str, Any]
    bytes_per_token: float | None = None
    kv_share: float | None = None
    accuracy: float | None = None
    verdict: Verdict | None = None
    kept: bool = False
    why: str = ""


def accuracy(verdict: Verdict) -> float:
    """Exact answers of all tasks, percent."""
    tasks = verdict.tasks.values()
    return sum(task.asked * task.compressed for task in tasks) / sum(task.asked for task in tasks)


def rank(verdict: Verdict | None) -> tuple[bool, float, float]:
    """Of two recipes that take equal bytes the better one has the higher."""
    if verdict is None:
        return False, -math.inf, -math.inf
    return verdict.holds, accuracy(verdict), -verdict.logit_kl


class Search:
    """Finds a recipe from the workbench's base on.

    Attributes:
        trials: all that was tried, in this order.
    """

    def __init__(self, bench: Workbench):
        self.bench, self.trials = bench, list[Trial]()

    def by_bytes(self, bytes_per_token: float) -> Recipe | None:
        """The best recipe that takes so many bytes; None if it does not hold where that is confirmed.

        Raises:
            UserError: no recipe takes as few.
        """
        best = Draft(self.bench.base)
        try:
            self.bench.judge(self.bench.at(best, bytes_per_token))  # a mistake is no row of a table
        except UserError as error:
            raise UserError(f"{bytes_per_token:g} bytes a token: {error}") from error
        self._try("base", "these bytes", lambda: self.bench.at(best, bytes_per_token), _first)
        for step, moves in ORDER:
            best = self._step(step, moves, best, bytes_per_token)
        self._try("confirm", "the base", lambda: self.bench.base, _within, confirm=True)
        return self._confirmed("the best", best, bytes_per_token)

    def by_accuracy(self) -> Recipe | None:
        """A recipe that holds and takes few bytes; what its tasks may lose is in its `[guard]`.

        None if it does not hold where that is confirmed, with more bytes neither.

        Raises:
            UserError: the base does not hold however many bytes it takes.
        """
        best = Draft(self.bench.base)
        whole = self.bench.judge(self.bench.at(best, self._bytes(0)))
        if not whole.holds:
            told = f"even with {self._bytes(0):.0f} bytes a token {best.recipe.name} does not hold"
            raise UserError(f"{told}: {'; '.join(whole.reasons)}")
        level = self._lowest("base", best, 0, STRIDE)
        for step, moves in ORDER:
            found = self._step(step, moves, best, self._bytes(level + 1))
            if found is not best:
                lowest = self._lowest(step, found, level + 1, 1)
                if lowest > level or self._holds(step, found, level):
                    best, level = found, lowest
        self._try("confirm", "the base", lambda: self.bench.base, _within, confirm=True)
        least = max(level - RESERVE, 0)
        for more in range(least, -1, -1):
            recipe = self._confirmed("the best" + (" with more bytes" if more < least else ""), best, self._bytes(more))
            if recipe is not None:
                return recipe
        return None

    def _bytes(self, level: int) -> float:
        return ROOM * self.bench.checkpoint.decoder.fp16_token_bytes / STEP**level

    def _lowest(self, step: str, draft: Draft, level: int, stride: int) -> int:
        """The last level from `level` on that a draft holds at, by strides and then by bisection; or the one before."""
        low, high = level - 1, level
        while self._holds(step, draft, high):
            low, high, stride = high, high + stride, 2 * stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._holds(step, draft, middle) else (low, middle)
        return low

    def _holds(self, step: str, draft: Draft, level: int) -> bool:
        if level > LEVELS:
            return False
        verdict = self._try(step, "other bytes", lambda: self.bench.at(draft, self._bytes(level)), _within)
        return verdict is not None and verdict.holds

    def _step(self, step: str, moves_of: MovesOf, best: Draft, bytes_per_token: float) -> Draft:
        """The best draft after one step of the order, at these bytes."""
        try:
            moves = moves_of(self.bench, best)
        except UserError as error:
            self.trials.append(Trial(step, "all", {}, why=f"not possible: {one_line(error)}"))
            return best
        try:
            standing = self.bench.judge(self.bench.at(best, bytes_per_token))
        except UserError:
            standing = None
        for change, move in moves:
            make = partial(self._moved, best, move, bytes_per_token)
            verdict = self._try(step, change, make, partial(compared, standing))
            if verdict is not None and rank(verdict) > rank(standing):
                best, standing = move(best), verdict
        return best

    def _moved(self, draft: Draft, move: Callable[[Draft], Draft], bytes_per_token: float) -> Recipe:
        return self.bench.at(move(draft), bytes_per_token)

    def _confirmed(self, what: str, draft: Draft, bytes_per_token: float) -> Recipe | None:
        """The recipe, if it holds on the samples that had no part in choosing it."""
        recipe = self.bench.at(draft, bytes_per_token)
        verdict = self._try("confirm", what, lambda: recipe, _within, confirm=True)
        return recipe if verdict is not None and verdict.holds else None

    def _try(
        self, step: str, change: str, make: Callable[[], Recipe], keep: Keep, confirm: bool = False
    ) -> Verdict | None:
        """Judge a recipe and note what becomes of it, once for each; None if there can be no such recipe."""
        bench, settings = self.bench, dict[str, Any]()
        bench.doing = f"{step}: {change}"
        try:
            recipe = make()
            settings, size = recipe.settings(), bench.bytes_per_token(recipe, confirm)
            verdict = bench.judge(recipe, confirm)
        except UserError as error:
            self.trials.append(Trial(step, change, settings, why=f"not possible: {one_line(error)}"))
            return None
        if not any(trial.recipe == settings and (trial.step == "confirm") == confirm for trial in self.trials):
            share = size / bench.checkpoint.decoder.fp16_token_bytes
            told = settings, size, share, accuracy(verdict), verdict
            self.trials.append(Trial(step, change, *told, *keep(verdict)))
        return verdict


def _first(verdict: Verdict) -> tuple[bool, str]:
    return True, "where the search begins"


def _within(verdict: Verdict) -> tuple[bool, str]:
    return verdict.holds, "; ".join(verdict.reasons) or "holds"


def compared(standing: Verdict | None, verdict: Verdict) -> tuple[bool, str]:
    """Whether a verdict is better than that of the best recipe so far, and by what."""
    if standing is None:
        return True, "the best so far cannot be made with as few bytes"
    better = rank(verdict) > rank(standing)
    if verdict.holds != standing.holds:
        return better, "holds, the best so far does not" if better else "; ".join(verdict.reasons)
    if (now := accuracy(verdict)) != (before := accuracy(standing)):
        return better, f"accuracy {now:.1f} %, the best so far {before:.1f} %"
    return better, f"logit KL {verdict.logit_kl:.3g}, the best so far {standing.logit_kl:.3g}"
