"""Signs that compression was too heavy for an answer, and what follows from them.

The model becomes unsure (entropy jumps), it repeats itself, or it would say the same without the image: the three ways
in which a compressed cache breaks an answer while nothing else looks wrong.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from engines.errors import UserError
from runtime.sampling import check_number

OnAlarm = Literal["none", "lighter-next", "retry"]
Sign = Literal["entropy", "repetition", "blind"]
LIKELIEST = 20  # tokens whose log-probabilities are compared without the image


@dataclass(frozen=True)
class Watch:
    """What counts as an alarm. None of the defaults was fitted to a model.

    Attributes:
        on_alarm: `none` only tells and counts. `lighter-next` asks the next request at the next lighter level, and one
            lighter still if there is an alarm again; each request without one leads a level back. `retry` prefills
            once more at the next lighter level and answers anew, where nothing was streamed yet or the caller allows
            it; else it is `lighter-next`.
        recent: tokens whose mean entropy is compared with the mean of all before, of which there are as many at least.
        ratio, margin: the alarm is a recent mean over ratio x the mean before + margin, in nats.
        period, repeats, repeated: the alarm is a block of up to `period` tokens so many times in a row, and `repeated`
            tokens together at least, so that a row of dots is none.
        blindness: the alarm is that blank images would move the log-probabilities of the likeliest first tokens by less
            than this, in nats, as a mean. Probabilities themselves say little: a sure "no" may be as sure without the
            image. 0: not tried, since it is a prefill more; and a question that needs no image raises it too. In a
            prompt that is read at once, the first token sees the images before the cache is compressed: it tells of
            dropped visual tokens. Where the question comes later, it tells of the cache.
    """

    on_alarm: OnAlarm = "none"
    recent: int = 16
    ratio: float = 1.5
    margin: float = 1.0
    period: int = 64
    repeats: int = 4
    repeated: int = 24
    blindness: float = 0.0

    def __post_init__(self) -> None:
        if self.on_alarm not in get_args(OnAlarm):
            raise UserError(f"on_alarm must be {', '.join(get_args(OnAlarm))}, got {self.on_alarm!r}")
        for name, least in (("recent", 1), ("period", 1), ("repeats", 2), ("repeated", 2)):
            check_number(name, getattr(self, name), least)
        check_number("ratio", self.ratio, 1, whole=False)
        check_number("margin", self.margin, 0, whole=False)
        check_number("blindness", self.blindness, 0, whole=False)


@dataclass(frozen=True)
class Alarm:
    """A sign, and how many tokens the answer had then."""

    sign: Sign
    tokens: int


@dataclass
class Counters:
    """Of all requests since the monitor was made.

    Attributes:
        entropy: sum of every token's, in nats.
        entropy_alarms, repetition_alarms, blind_alarms: by sign.
        lightened: requests that began at a lighter level because of an alarm before.
        retries: requests that were answered anew at a lighter level.
    """

    requests: int = 0
    tokens: int = 0
    entropy: float = 0.0
    entropy_alarms: int = 0
    repetition_alarms: int = 0
    blind_alarms: int = 0
    lightened: int = 0
    retries: int = 0


@dataclass
class Monitor:
    """Watches the requests of one model; any thread's.

    Attributes:
        lighter: how many levels lighter the next request begins.
    """

    watch: Watch = field(default_factory=Watch)
    counters: Counters = field(default_factory=Counters)
    lighter: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def answered(self, watchers: list[Watcher], lighter: int, heavy: bool) -> None:
        """Take account of a request.

        Args:
            watchers: of each time that it was answered.
            lighter: how many levels lighter than its own it ended.
            heavy: whether there is a level that is lighter still.
        """
        with self._lock:
            count, alarmed = self.counters, watchers[-1].alarms
            count.requests += 1
            count.retries += len(watchers) - 1
            for watcher in watchers:
                count.tokens += watcher.tokens
                count.entropy += watcher.entropy
                for alarm in watcher.alarms:
                    name = f"{alarm.sign}_alarms"
                    setattr(count, name, getattr(count, name) + 1)
            count.lightened += lighter >= len(watchers)
            if self.watch.on_alarm == "none":
                return
            if not alarmed:
                self.lighter = max(self.lighter - 1, 0)
            elif heavy:
                self.lighter = max(self.lighter, lighter + 1)


class Watcher:
    """Watches one answer.

    Attributes:
        alarms: so far; each sign gives one at most.
        tokens, entropy: watched, and the sum of their entropies.
    """

    def __init__(self, watch: Watch) -> None:
        self.alarms: list[Alarm] = []
        self.tokens, self.entropy = 0, 0.0
        self._watch = watch
        self._jump, self._repetition = Jump(watch), Repetition(watch)

    def add(self, entropy: float, token: int) -> bool:
        """Whether this token, chosen with this entropy, raises an alarm."""
        self.tokens += 1
        self.entropy += entropy
        jumped, repeats = self._jump.add(entropy), self._repetition.add(token)
        return self._raise("entropy", jumped) | self._raise("repetition", repeats)

    def seen(self, logits: np.ndarray, blank: np.ndarray) -> bool:
        """Whether the first token's logits are too near to those without the images."""
        return self._raise("blind", distance(logits, blank) < self._watch.blindness)

    def _raise(self, sign: Sign, alarming: bool) -> bool:
        new = alarming and sign not in (alarm.sign for alarm in self.alarms)
        if new:
            self.alarms.append(Alarm(sign, self.tokens))
        return new


class Jump:
    """Whether the mean of the last values has jumped above the mean of all before."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._recent: deque[float] = deque()
        self._before, self._count = 0.0, 0

    def add(self, value: float) -> bool:
        self._recent.append(value)
        if len(self._recent) > self._watch.recent:
            self._before += self._recent.popleft()
            self._count += 1
        if self._count < self._watch.recent:
            return False
        mean = self._before / self._count
        return sum(self._recent) / len(self._recent) > self._watch.ratio * mean + self._watch.margin


class Repetition:
    """Whether the last tokens are one block again and again, whatever its length."""

    def __init__(self, watch: Watch) -> None:
        self._last = deque([-1] * watch.period, watch.period)  # latest first
        self._same = [0] * watch.period  # for how many tokens each has been the one `period` before it
        self._enough = [max(watch.repeats * period, watch.repeated) - period for period in range(1, watch.period + 1)]

    def add(self, token: int) -> bool:
        self._same = [same + 1 if last == token else 0 for same, last in zip(self._same, self._last, strict=True)]
        self._last.appendleft(token)
        return any(map(operator.ge, self._same, self._enough))


def distance(logits: np.ndarray, others: np.ndarray) -> float:
    """Mean difference of two log-probabilities, in nats, over the likeliest tokens of the first."""
    best = np.argsort(-logits)[:LIKELIEST]
    best = best[logits[best] > -np.inf]
    first, second = (each[best] - logarithm(each) for each in (logits, others))
    return float(np.abs(first - second).mean())


def logarithm(logits: np.ndarray) -> float:
    """Of the sum of the exponentials."""
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum(dtype=np.float64)))
