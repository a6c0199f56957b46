"""Whether a request is let in under a memory budget, and at which level: decided before anything of it is allocated.

What a request needs is known then:
- exactly: its KV state (the manifest's shapes), its pixels and embeddings;
- measured here before: what each graph takes when it is loaded and when it runs (`runtime.probe`);
- estimated, from above: decoding an image of its header's size, Python's own (`SLACK`, `VOCABULARY`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from engines.bundle import Bucket, Bundle, Level, Manifest
from engines.errors import UserError
from engines.gate import Fallback, Gate
from engines.ort import providers
from runtime import probe
from runtime.generate import MAX_NEW_TOKENS, Request
from runtime.memory import MIB, Memory, Need, OverBudget, Reservation, resident, size
from runtime.prompt import choose_bucket, least_room
from runtime.sampling import GREEDY

if TYPE_CHECKING:
    from pathlib import Path

HIGH, LOW = Gate.high, Gate.low
COMPLEXITY = Fallback()
SLACK = 8 * MIB  # a request's Python objects, and what memory is left in pieces that are too small
FIRST = 7 * MIB  # what a first prompt leaves before the request is let in: 6 MiB of a server, measured
# A process that starts later has more than this one, or less: 2 MiB more if Python compiles what it imports (measured),
# less if the system has fewer pages of the libraries in memory. And one that has answered a lot holds more with all its
# graphs dropped: the demo's server 12.8 MiB more than before its start, and no more than that when it was asked for
# minutes. 5 are its start, 2 what its levels share, and 5 are pages of the heap of which a few pieces are in use. A
# budget that is told is enough for both.
ANOTHER = 9 * MIB
VOCABULARY = 64  # bytes a token of the vocabulary: sorting, drawing from and copying of logits
MAPPED = 2**16  # bytes of the embedding table that Linux maps where one row is read


def line(manifest: Manifest, level: str, question_later: bool) -> list[str]:
    """This level and those to go to from it, heaviest first: those that keep the fewest bytes of their longest prompt.

    Where the question comes later, what takes their places; a level that does only that is none to go to.
    """
    levels = manifest.levels
    sizes = {name: max(map(manifest.state_bytes, each.buckets)) for name, each in levels.items()}
    others = levels.keys() - {each.unknown for each in levels.values()}
    first = {sizes[name]: name for name in [*(n for n in reversed(levels) if n in others), level]}  # of equal sizes
    names = [first[size] for size in sorted(first)]
    return list(dict.fromkeys(levels[name].unknown or name if question_later else name for name in names))


def opened(bundle: Bundle, budget: int, backend: str, threads: int | None, library: Path | None) -> Memory:
    """The memory of a bundle that is being opened.

    Raises:
        UserError: a budget cannot be kept here.
    """
    if backend != "ort" or providers()[0] != "CPUExecutionProvider":
        where = providers()[0] if backend == "ort" else backend
        raise UserError(f"a memory budget counts this process' memory, and {where} has its own: leave it out")
    try:
        resident()
    except OSError as error:
        raise UserError(f"a memory budget needs Linux, which tells memory in use ({error}): leave it out") from error
    costs = probe.costs(bundle, threads, library)
    import numpy.random  # noqa: F401 (what is imported counts as this process', also what is used later)
    from PIL import Image

    Image.init()  # imports its decoders
    return Memory(budget, costs)


def _told(least: int) -> str:
    """A budget that is enough in another process too, as it is typed."""
    return f"{math.ceil((least + ANOTHER) / MIB)}MiB"


class Admission:
    """Lets requests of one opened level in."""

    def __init__(
        self, bundle: Bundle, memory: Memory, lines: Mapping[bool, list[str]], own: Callable[[bool], str]
    ) -> None:
        """
        Args:
            lines: `line` of the opened level, by whether the question comes later.
            own: the opened level, or what takes its place if the question comes later.

        Raises:
            UserError: the budget is too small for any request; the message tells the least that would do.
        """
        self.memory, self._manifest, self._lines, self._own = memory, bundle.manifest, lines, own
        model = self._manifest.model
        shown = model.layouts[:1]
        ids = [model.image_token_id] * sum(layout.tokens for layout in shown)
        one = Request(ids or [0], shown, own(False), MAX_NEW_TOKENS, False, False, GREEDY)
        least = FIRST + min(memory.alone(self.need(one, name)) for name in self._from(one))
        if least > memory.budget:
            raise UserError(
                f"a memory budget of {size(memory.budget)} is too small for {bundle.path}: a question"
                f"{' about one image' * bool(shown)} takes {math.ceil(least / MIB)} MiB at its heaviest level, "
                f"{size(memory.base)} of them this process before any graph is loaded: give at least  {_told(least)}"
            )

    def need(self, request: Request, name: str, decoding: int = 0) -> Need:
        """What a request takes at a level; in a session, without the state.

        Args:
            decoding: bytes while an image is decoded.
        """
        level, model, costs = self._manifest.levels[name], self._manifest.model, self.memory.costs
        views, text, context = level.seen(request.layouts), request.text, request.context
        tokens = text + sum(view.tokens for view in views)
        graphs = {view.vision for view in views}
        most = 0
        for bucket in [context.bucket] if context else self._buckets(level, tokens, text, request.room):
            used = graphs | {bucket.decode} | ({bucket.prefill} if not context else set())
            short = bucket.shortened
            whole = tokens <= bucket.length and (short is None or short.fits(tokens, text))
            behind = 0 if whole and not context and not request.question_later else tokens
            free = context.state.free if context else bucket.window - bucket.recent
            if bucket.extend and behind:
                used.add(bucket.extend)
            if bucket.compact and behind + request.max_new_tokens > free:
                used.add(bucket.compact)
            state = 0 if request.keep else self._manifest.state_bytes(bucket)
            most = max(most, state + max(costs[graph].running for graph in used))
            graphs = graphs | used
        pixels = 4 * sum(math.prod(layout.pixel_values) for layout in request.layouts)
        own = 3 * pixels + 3 * tokens * model.hidden_size * 4  # blank pixels too; images' embeddings
        own += (
            min(MAPPED * (text + request.max_new_tokens), model.embedding.nbytes)
            + VOCABULARY * model.vocab_size
            + SLACK
        )
        return Need(frozenset(graphs), most + own + decoding)

    def admit(self, request: Request, decoding: int, others: Sequence[str]) -> tuple[Request, str]:
        """The request with its room reserved, at its level or a heavier one, and why at that.

        Under pressure (use over 80 % of the budget with it, and until it is under 60 %), it is the lightest heavier
        level that leaves use under 80 %, among those that drop no more of the prompt than its complexity allows. Where
        none does, a level takes the rest of the budget: those that are allowed first, the heaviest of them before.

        Args:
            others: levels that take the request too; those that are lighter do not count.

        Raises:
            OverBudget: none fits.
        """
        levels = [name for name in self._from(request) if name == request.level or name in others]
        needs = {name: self.need(request, name, decoding) for name in levels}
        name, why, reserved = self._choose(needs, request.visual, request.text)
        return replace(request, level=name, reserved=reserved), why

    def _choose(self, needs: dict[str, Need], visual: int, text: int) -> tuple[str, str, Reservation]:
        """One of the levels, lightest first; why, unless it is the first; and its room."""
        memory, (own, *others) = self.memory, needs
        limit = LOW if memory.heavy else HIGH
        if reserved := memory.reserve(needs[own], limit):
            memory.heavy = False
            return own, "", reserved
        memory.heavy = True
        rate = COMPLEXITY.rate(visual, text)
        allowed = [name for name in others if self.drops(name) <= rate]
        rest = [name for name in others if name not in allowed]
        tries = [*((name, HIGH) for name in allowed), *((name, 1.0) for name in (*reversed([own, *allowed]), *rest))]
        share = memory.in_use(needs[own]) / memory.budget

        def taken() -> tuple[str, Reservation] | None:
            return next(((name, room) for name, most in tries if (room := memory.reserve(needs[name], most))), None)

        if not (found := memory.sure(taken)):
            raise self._refusal(min(needs.values(), key=memory.in_use))
        name, reserved = found
        memory.pressed += name != own
        why = f"with {own}, {share:.0%} of the memory budget would be in use (more than {limit:.0%})"
        if name == own:
            why += ", and no heavier level is right for this prompt" if others else ", and no level is heavier"
        return name, why, reserved

    def moved(self, request: Request) -> Request | None:
        """A request that goes on at another level, if there is room for that."""
        fits = request.reserved and self.memory.change(request.reserved, self.need(request, request.level))
        return request if fits else None

    def session(self, room: int) -> tuple[str, str, Reservation]:
        """Level of a new session, why, and room for its state; there is room for a first turn, too.

        Args:
            room: tokens that it asks memory for; 0: no more than its turns do.
        """
        rooms = {name: room or least_room(level) for name, level in self._manifest.levels.items()}
        one = Request([], [], self._own(True), 1, False, True, GREEDY)
        needs = {name: self.need(replace(one, room=rooms[name]), name) for name in self._from(one)}
        name, why, reserved = self._choose(needs, 0, 0)
        self.memory.change(reserved, self._state(name, rooms[name], 0, rooms[name]))
        return name, why, reserved

    def turn(self, request: Request, decoding: int, held: Reservation | None) -> Request:
        """A turn of a session with its room reserved; with a first turn's also the rest of the state's.

        Args:
            held: the session's.

        Raises:
            OverBudget: there is none, and all stays as it was.
        """
        if held and request.context is None:
            text, views = request.text, self._manifest.levels[request.level].seen(request.layouts)
            tokens = text + sum(view.tokens for view in views)
            state = self._state(request.level, tokens, text, request.room)
            if not self.memory.sure(lambda: self.memory.change(held, state), held):
                raise self._refusal(state, held)
        return replace(request, reserved=self.hold(self.need(request, request.level, decoding)))

    def file(self, path: Path) -> Reservation:
        """Room for reading a session's file."""
        with suppress(OSError):
            return self.hold(Need(frozenset(), 2 * path.stat().st_size))
        return self.hold(Need(frozenset(), 0))  # it is missing, and who reads it tells that

    def _from(self, request: Request) -> list[str]:
        """The request's level, and the heavier ones after it."""
        line = self._lines[request.question_later]
        return line[line.index(request.level) :: -1]

    def _state(self, name: str, tokens: int, text: int, room: int) -> Need:
        buckets = self._buckets(self._manifest.levels[name], tokens, text, room)
        return Need(frozenset(), max(map(self._manifest.state_bytes, buckets)))

    def hold(self, need: Need) -> Reservation:
        """Room for something that stays.

        Raises:
            OverBudget: there is none.
        """
        if reserved := self.memory.sure(lambda: self.memory.reserve(need)):
            return reserved
        raise self._refusal(need)

    def drops(self, name: str) -> float:
        """The share of a full prompt's tokens that a level drops, of its longest bucket and mean layer."""
        level, layouts = self._manifest.levels[name], self._manifest.model.layouts
        longest = max(level.buckets, key=lambda bucket: bucket.length)
        kept = sum(longest.capacities) / len(longest.capacities) + longest.recent
        seen, tokens = (sum(each.tokens for each in some) for some in (level.views.values(), layouts))
        return 1 - min(kept / longest.length, 1) * (seen / tokens if layouts else 1)

    def _refusal(self, need: Need, own: Reservation | None = None) -> OverBudget:
        memory = self.memory
        memory.refused += 1
        busy = memory.busy(own)
        waits = busy and memory.alone(need) <= memory.budget
        used, wanted = memory.in_use(), memory.in_use(need)
        advice = "try again when others have ended" if waits else (
            "give smaller or fewer images, less text, or a budget of at least  "
            + _told(max(memory.alone(need), 0 if busy else wanted))
        )  # fmt: skip
        return OverBudget(
            f"this takes {size(wanted - used)}, and {size(used)} of the memory budget of {size(memory.budget)} are in "
            f"use: {advice}",
            waits,
        )

    def _buckets(self, level: Level, tokens: int, text: int, room: int) -> list[Bucket]:
        """Those that a prompt of so many tokens at most may take: an adaptive level may keep fewer."""
        try:
            longest = choose_bucket(tokens, text, level, room)
        except UserError:  # of all tokens; fewer fit
            longest = max(level.buckets, key=lambda bucket: bucket.length)
        adaptive = any(view.adaptive for view in level.views.values())
        return [b for b in level.buckets if b.length <= longest.length] if adaptive else [longest]
