"""How the next token is chosen from the model's logits: as Hugging Face's `generate` chooses it, in numpy.

Scores are logits whose largest is 0: only differences count, and dividing them by a small temperature overflows
nothing. What a filter drops becomes -inf.
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
        if s.repetition_penalty != 1:
            logits = penalize(logits, self._said, s.repetition_penalty)
            token = int(logits.argmax())
        if s.temperature != 0:
            token = self._draw(min_p(top_p(top_k(scores(logits, s.temperature), s.top_k), s.top_p), s.min_p))
        self._said.add(token)
        return token

    def _draw(self, scores: np.ndarray) -> int:
        """One of V: a block of tokens by its weight, then one of them."""
        weights = np.exp(scores)
        block = self._pick(block_sums(weights)) * BLOCK
        return block + self._pick(weights[block : block + BLOCK].astype(np.float64))

    def _pick(self, weights: np.ndarray) -> int:
        cumulative = weights.cumsum()
        # u < 1, and u * total rounds to less than the total: one is found, and one of weight 0 never is.
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))


def block_sums(weights: np.ndarray) -> np.ndarray:
    return np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)


def penalize(logits: np.ndarray, tokens: set[int], penalty: float) -> np.ndarray:
    """Make tokens that were said less likely (with a penalty under 1: more)."""
    said = np.fromiter(tokens, np.int64, len(tokens))
    said = said[said < len(logits)]
    result, its = logits.copy(), logits[said]
    result[said] = np.where(its < 0, its * penalty, its / penalty)
    return result


def scores(logits: np.ndarray, temperature: float) -> np.ndarray:
    return (logits - logits.max()) / np.float32(temperature)


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Keep the k largest, and what equals the last of them; k = 0 keeps all."""
    if not 0 < k < len(scores):
        return scores
    return np.where(scores < np.partition(scores, -k)[-k], -np.inf, scores)


def top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Drop the least likely while all that is dropped has at most 1 - p; among equals the first go first."""
    if p == 1:
        return scores
    ascending = np.sort(scores[scores > -np.inf])
    weights = np.exp(ascending)
    sums = block_sums(weights).cumsum()
    most = (1 - p) * sums[-1]
    block = int(np.searchsorted(sums[:-1], most, side="right"))
    own = weights[block * BLOCK : (block + 1) * BLOCK].astype(np.float64).cumsum() + (sums[block - 1] if block else 0)
    dropped = block * BLOCK + int(np.searchsorted(own[:-1], most, side="right"))
    edge = ascending[dropped]
    result = np.where(scores < edge, -np.inf, scores)
    equals = np.flatnonzero(scores == edge)
    result[equals[: dropped - np.searchsorted(ascending, edge)]] = -np.inf
    return result


def min_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Drop what is less likely than p times the likeliest."""
    return np.where(np.exp(scores) < p, -np.inf, scores) if p else scores


def logprob(logits: np.ndarray, token: int, top: int) -> Logprob:
    """Of the chosen token and the `top` likeliest, by the logits [V]."""
    own = logits - logits.max()
    own -= np.log(np.exp(own).sum(dtype=np.float64))
    best = np.argpartition(-own, min(top, len(own)) - 1)[:top] if top else np.empty(0, np.int64)
    best = best[np.lexsort((best, -own[best]))]
    return Logprob(token, float(own[token]), [(int(other), float(own[other])) for other in best])
