"""Several answers at once: whose prompt is read, and whose tokens, from step to step.

>>> scheduler = Scheduler(rows=vlm.bundle.manifest.batch)
>>> answers = [scheduler.submit(vlm.stream(question, [image])) for question in questions]
>>> for text in answers[0]:  # the others go on meanwhile
...     print(text, end="")
>>> print([answer.result.text for answer in scheduler.run(answers)])

A bundle built with `--batch B` reads a token of each of B answers for little more than the price of one. Every answer
is the one that its request gets alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from runtime.batch import Batch
from runtime.generate import Result, TextStream
from runtime.sampling import check_number
from runtime.state import Read


class Answering:
    """An answer that a scheduler computes: an iterator of its texts, as the stream that it was made of.

    Attributes:
        texts: that were computed and not taken yet.
        read: the token that the model reads next; None while it reads the prompt.
        ended: nothing more is computed.
        error: that ended it; raised behind the texts.
    """

    def __init__(self, scheduler: Scheduler, stream: TextStream) -> None:
        self.stream, self._scheduler = stream, scheduler
        self.texts: deque[str] = deque()
        self.read: Read | None = None
        self.ended = False
        self.error: Exception | None = None

    def __iter__(self) -> Answering:
        return self

    def __next__(self) -> str:
        while not self.texts and not self.ended:
            self._scheduler.step()
        if self.texts:
            return self.texts.popleft()
        if self.error:
            raise self.error
        raise StopIteration

    @property
    def result(self) -> Result:
        if self.error:
            raise self.error
        return self.stream.result

    @property
    def place(self) -> Hashable:
        """What it shares with those that are decoded together with it; itself if that is nobody."""
        assert self.read
        batched = self.read.context.bucket.batched
        return (self.stream.vlm, batched) if batched and not self.read.alone else self

    def go_on(self, error: Exception | None = None) -> None:
        """Compute up to where the model reads next, or to the end; with an error, that of the last reading."""
        stats = self.stream.answer.stats
        try:
            while True:
                retries, part = stats.retries, self.stream.part(error)
                if stats.retries > retries:  # what was not taken yet is void
                    self.texts.clear()
                if not isinstance(part, str):
                    self.read = part
                    return
                self.texts.append(part)
        except StopIteration:
            self.ended = True
        except Exception as failed:
            self.ended, self.error = True, failed
        self.read = None


class Scheduler:
    """First come, first served; for one thread.

    A step reads one piece of one prompt at most (what prefill takes, an image, or a chunk behind prefill), then a token
    of every answer of one batch. Prompts are read one after another, each as soon as there is a place; batches take
    turns. So with answers in G batches, of at most T tokens after prompts of at most P pieces, an answer gets a token
    every G steps, and the request with n others before it begins within (n // rows + 1) x (G x T + rows x P) steps.

    Attributes:
        rows: answers that are computed at once, at most.
        steps, tokens: decode steps so far, and the tokens that were read in them.
    """

    def __init__(self, rows: int = 1) -> None:
        check_number("rows", rows, 1)
        self.rows, self.steps, self.tokens = rows, 0, 0
        self._line: deque[Answering] = deque()
        self._here: list[Answering] = []
        self._batches: dict[Hashable, Batch] = {}  # whose turn is next comes first

    def submit(self, stream: TextStream) -> Answering:
        """Put a request in the line; of any model, and a session's too."""
        self._line.append(answer := Answering(self, stream))
        return answer

    @property
    def takes(self) -> bool:
        """Whether a request that is submitted now would be begun with the next step."""
        return not self._line and len(self._here) < self.rows and all(each.read for each in self._here)

    @property
    def nbytes(self) -> int:
        """Of the batches; they are freed when the last of their answers has ended."""
        return sum(batch.nbytes for batch in self._batches.values())

    def run(self, answers: Iterable[Answering]) -> list[Answering]:
        """Compute them, and with them the others, to the end."""
        done = list(answers)
        while not all(each.ended for each in done):
            self.step()
        return done

    def step(self) -> None:
        """Let some answers go on, as told above."""
        reading = next((each for each in self._here if not each.read), None)
        if not reading and self._line and len(self._here) < self.rows:
            self._here.append(reading := self._line.popleft())
        if reading:
            reading.go_on()
        self._decode()
        self._here = [each for each in self._here if not each.ended]
        places = {each.place for each in self._here if each.read}
        self._batches = {place: batch for place, batch in self._batches.items() if place in places}

    def _decode(self) -> None:
        """Let the batch whose turn it is read a token of each of its answers."""
        groups: dict[Hashable, list[tuple[Answering, Read]]] = {}
        for each in self._here:
            if each.read:
                groups.setdefault(each.place, []).append((each, each.read))
        for place, ((first, read), *_) in groups.items():
            if place not in self._batches:
                self._batches[place] = Batch(first.stream.vlm, read.context.bucket)
        if not groups:
            return
        place = next(iter(self._batches))
        self._batches[place] = batch = self._batches.pop(place)  # behind the others
        error = None
        try:
            batch.read([read for _, read in groups[place]])
        except Exception as failed:
            error = failed
        for each, _ in groups[place]:
            each.go_on(error)
        self.steps, self.tokens = self.steps + 1, self.tokens + len(groups[place])
