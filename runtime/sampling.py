"""How the next token is chosen from the model's logits: as Hugging Face's `generate` chooses it, in numpy.

The largest logit is made 0 first: only differences count, and dividing them by a small temperature overflows nothing.
Filters work on e to the power of that, the weights.
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
        if self.temperature != 0 or isinstance(self.temperature, bool):
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
        if s.repetition_penalty == 1 and s.temperature == 0:
            self._said.add(token)
            return token
        if len(self._own) != len(logits):
            self._own, self._other = np.empty((2, len(logits)), np.float32)
        if s.repetition_penalty != 1:
            self._own[:] = logits
            penalize(self._own, self._said, s.repetition_penalty)
            logits, token = self._own, int(self._own.argmax())
        if s.temperature != 0:
            np.subtract(logits, logits[token], out=self._own)
            weights, tokens = weigh(self._own, s)
            place = self._draw(weights, self._other[: len(weights)])
            token = place if tokens is None else int(tokens[place])
        self._said.add(token)
        return token

    def _draw(self, weights: np.ndarray, other: np.ndarray) -> int:
        """One of the weights [N], the largest of which is 1, if top-p and min-p keep it; `other` [N] is overwritten.

        Both are asked of what was drawn alone: to sort a vocabulary, or only to look through it, takes longer. With it
        go all others that they drop for sure, and one of the rest is drawn: each by its share of those that stay.
        """
        s = self._sampling
        sums = block_sums(weights)
        most = max(s.top_p * sums.sum(), 0.5)  # half of the largest weight: that one stays at any p
        while True:
            block = self._pick(sums) * BLOCK
            place = block + self._pick(weights[block : block + BLOCK].astype(np.float64))
            if weights[place] < s.min_p:
                weights *= weights >= s.min_p
            elif s.top_p == 1:
                return place
            else:
                likelier(weights, place, other)
                if other.sum() < most:
                    return place
                weights, other = other, weights
            sums = block_sums(weights)

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


def weigh(scores: np.ndarray, s: Sampling) -> tuple[np.ndarray, np.ndarray | None]:
    """Probabilities over the likeliest's, after temperature and top-k, and which tokens' they are, if not all V.

    Args:
        scores: logits [V] whose largest is 0; they are overwritten.
    """
    scores /= np.float32(s.temperature)
    tokens = largest(scores, s.top_k) if 0 < s.top_k < len(scores) else None
    few = scores if tokens is None else scores[tokens]
    return np.exp(few, out=few), tokens


def likelier(weights: np.ndarray, place: int, out: np.ndarray) -> None:
    """The weights [N] that are larger than the one at `place`, and its equals behind it; 0 in place of all others."""
    upto, after = slice(place + 1), slice(place + 1, None)
    np.multiply(weights[upto], weights[upto] > weights[place], out=out[upto])
    np.multiply(weights[after], weights[after] >= weights[place], out=out[after])


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` largest of [V] stand, and what equals the last of them, in the order of V."""
    most = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if count < len(most):  # so many blocks hold one that is as large as this: no other block has one of the largest
        blocks = (most >= np.partition(most, -count)[-count]).nonzero()[0]
        found = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        found = found[found < len(values)]
    else:
        found = np.arange(len(values))
    its = values[found]
    return found[its >= np.partition(its, -count)[-count]] if count < len(found) else found


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
        np.exp(self._scores, out=self._weights)
        total = float(self._weights.sum())
        with np.errstate(invalid="ignore"):
            mean = float(self._weights @ self._scores)
        if math.isnan(mean):  # 0 * -inf; e to the -200 is 0 in float32, and 0 times that is 0
            mean = float(self._weights @ np.maximum(self._scores, -200))
        self.entropy = max(math.log(total) - mean / total, 0.0)
        self.total = float(best) + math.log(total)

    def logprob(self, logits: np.ndarray, token: int, top: int) -> Logprob:
        """Of the chosen token and the `top` likeliest, by the logits that were read."""
        found = largest(logits, top).tolist() if top else []
        likeliest = sorted(zip((-logits[found]).tolist(), found, strict=True))[:top]
        own = float(logits[token]) - self.total
        return Logprob(token, own, [(other, -negative - self.total) for negative, other in likeliest])
