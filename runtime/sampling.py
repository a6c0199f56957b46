"""How the next token is chosen from the model's logits: as Hugging Face's `generate` chooses it, in numpy.

The largest logit is made 0 first: only differences count, and dividing them by a small temperature overflows nothing.
Filters work on e to the power of that, the weights, and make 0 of what they drop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.errors import UserError

BLOCK = 256  # tokens whose weights are summed first, so that no sum runs over the whole vocabulary in turn


def check_number(name: str, value: Any, least: float, most: float = math.inf, whole: bool = True) -> None:
    """Refuse what is no number from `least` to `most`; where a whole one is meant, a float too."""
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if not isinstance(value, kinds) or isinstance(value, bool) or value != value:
        raise UserError(f"{name} must be a {'whole ' * whole}number, got {value!r}")
    if not least <= value <= most:
        limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise UserError(f"{name} must be {limits}, got {value}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and where an answer ends. The filters run in this order: penalty, temperature, k, p, min.

    Attributes:
        temperature: divides the logits; at 0 the likeliest token is taken, and the filters and the seed do not matter.
        top_k: draw among so many likeliest tokens; 0: among all.
        top_p: draw among the fewest likeliest tokens that have this probability together.
        min_p: drop tokens that are less likely than this share of the likeliest.
        repetition_penalty: positive logits of tokens in the prompt or the answer are divided by it, negative ones
            multiplied (CTRL, arXiv 1909.05858).
        stop: the answer ends before the first of these texts.
        seed: of this request's random numbers; None: other ones every time.
        logprobs: tell the log-probability of every token, and of so many likeliest ones beside it; None: tell none.

    Raises:
        UserError: one of them is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0:
            check_number("temperature, where it is not 0,", self.temperature, 0.01, 100, whole=False)
        check_number("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0, 1, whole=False)
        check_number("min_p", self.min_p, 0, 1, whole=False)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100, whole=False)
        for name in ("seed", "logprobs"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, 0)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"stop must be texts, none of them empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))


GREEDY = Sampling()


@dataclass(frozen=True)
class Logprob:
    """Natural logarithms of the model's own probabilities, before any penalty, temperature or filter.

    Attributes:
        top: the likeliest tokens and theirs, likeliest first; the chosen token need not be among them.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Sampler:
    """Chooses one request's tokens; its random numbers are its own, so that no other request changes them."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._said = set(prompt)
        self._random = np.random.default_rng(sampling.seed)
        self._own = self._other = np.empty(0, np.float32)  # [V], as new memory takes as long as what is computed in it

    def choose(self, logits: np.ndarray) -> int:
        """The next token, by the logits [V] of the model.

        Raises:
            UserError: they are not numbers.
        """
        s = self._sampling
        token = int(logits.argmax())
        if not math.isfinite(logits[token]):  # argmax finds the first nan
            raise UserError(
                "the model's logits are not numbers: an overflow in a graph, or a preprocessor that does not fit"
            )
        if s.repetition_penalty != 1 or s.temperature != 0:
            if len(self._own) != len(logits):
                self._own, self._other = np.empty((2, len(logits)), np.float32)
            self._own[:] = logits
        if s.repetition_penalty != 1:
            penalize(self._own, self._said, s.repetition_penalty)
            token = int(self._own.argmax())
        if s.temperature != 0:
            self._own -= self._own[token]
            token = self._draw(weigh(self._own, self._other, s))
        self._said.add(token)
        return token

    def _draw(self, weights: np.ndarray) -> int:
        """One of V: a block of tokens by its weight, then one of them."""
        block = self._pick(block_sums(weights)) * BLOCK
        return block + self._pick(weights[block : block + BLOCK].astype(np.float64))

    def _pick(self, weights: np.ndarray) -> int:
        cumulative = weights.cumsum()
        # u < 1, and u * total rounds to less than the total: one is found, and one of weight 0 never is.
        return int(cumulative.searchsorted(self._random.random() * cumulative[-1], side="right"))


def block_sums(weights: np.ndarray) -> np.ndarray:
    return np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)


def penalize(logits: np.ndarray, tokens: set[int], penalty: float) -> None:
    """Make tokens that were said less likely (with a penalty under 1: more), in place."""
    said = np.fromiter(tokens, np.int64, len(tokens))
    said = said[said < len(logits)]
    its = logits[said]
    logits[said] = np.where(its < 0, its * penalty, its / penalty)


def weigh(scores: np.ndarray, other: np.ndarray, s: Sampling) -> np.ndarray:
    """Each token's probability over the likeliest's, and 0 where a filter drops it; in one of both arrays, [V].

    Args:
        scores: logits whose largest is 0.
    """
    scores /= np.float32(s.temperature)
    if not 0 < s.top_k < len(scores):
        return filtered(np.exp(scores, out=scores), other, s)
    tokens = largest(scores, s.top_k)
    few = filtered(np.exp(scores[tokens]), other[: len(tokens)], s)
    other[:] = 0
    other[tokens] = few
    return other


def filtered(weights: np.ndarray, other: np.ndarray, s: Sampling) -> np.ndarray:
    """Weights with 0 in the place of what top-p and min-p drop; the largest is 1."""
    least = max(top_p(weights, other, s.top_p) if s.top_p < 1 else 0, s.min_p)
    if least:
        weights *= weights >= least
    return weights


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` largest of [V] stand, and what equals the last of them, in the order of V."""
    most = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    # So many blocks have one that is as large as this: what is smaller is none of the largest.
    least = np.partition(most, -count)[-count] if count <= len(most) else -np.inf
    found = (values >= least).nonzero()[0]
    its = values[found]
    return found[its >= np.partition(its, -count)[-count]] if count < len(found) else found


def top_p(weights: np.ndarray, other: np.ndarray, p: float) -> float:
    """The least weight that stays if the smallest go while all of them have at most 1 - p; of its equals the first go.

    Those equals are made 0 here.
    """
    other[:] = weights
    other.sort()
    sums = block_sums(other).cumsum()
    most = (1 - p) * sums[-1]
    block = int(sums[:-1].searchsorted(most, side="right"))
    own = other[block * BLOCK : (block + 1) * BLOCK].astype(np.float64).cumsum() + (sums[block - 1] if block else 0)
    dropped = block * BLOCK + int(own[:-1].searchsorted(most, side="right"))
    edge = other[dropped]
    if equals := dropped - int(other.searchsorted(edge)):
        weights[(weights == edge).nonzero()[0][:equals]] = 0
    return float(edge)


class Distribution:
    """The model's own probabilities of the next token, before any penalty, temperature or filter.

    Attributes:
        entropy: in nats.
        total: logarithm of the sum of the logits' exponentials.
    """

    def __init__(self) -> None:
        self.entropy, self.total = 0.0, 0.0
        self._scores = self._weights = np.empty(0, np.float32)  # [V]

    def read(self, logits: np.ndarray) -> None:
        """Those that logits [V] stand for."""
        if len(self._scores) != len(logits):
            self._scores, self._weights = np.empty((2, len(logits)), np.float32)
        best = logits.max()
        np.subtract(logits, best, out=self._scores)
        np.maximum(
            self._scores, -200, out=self._scores
        )  # e to the -200 is 0 in float32, and 0 times it, unlike -inf, 0
        np.exp(self._scores, out=self._weights)
        total = float(self._weights.sum())
        self.entropy = max(math.log(total) - float(self._weights @ self._scores) / total, 0.0)
        self.total = float(best) + math.log(total)

    def logprob(self, logits: np.ndarray, token: int, top: int) -> Logprob:
        """Of the chosen token and the `top` likeliest, by the logits that were read."""
        found = largest(logits, top).tolist() if top else []
        likeliest = sorted(zip((-logits[found]).tolist(), found, strict=True))[:top]
        own = float(logits[token]) - self.total
        return Logprob(token, own, [(other, -negative - self.total) for negative, other in likeliest])
