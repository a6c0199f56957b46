"""A memory budget that is kept: what a request takes is reserved before any of it is allocated, or it is refused.

    in use = resident memory of this process + what was reserved and is not allocated yet

Resident memory is all that the kernel counts (statm): Python, libraries, graphs, images, caches. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engines.errors import UserError

if TYPE_CHECKING:
    from engines.backend import Session

T = TypeVar("T")
MIB = 2**20
UNITS = {"": 1} | {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
POPULATE = 22  # madvise's MADV_POPULATE_READ
ARENA_MAX = -8  # mallopt's M_ARENA_MAX


class OverBudget(UserError):
    """A request that the budget has no room for.

    Attributes:
        waits: whether it would fit once what runs now has ended.
    """

    def __init__(self, message: str, waits: bool) -> None:
        super().__init__(message)
        self.waits = waits


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512 MiB`, `1.5GB`, or a plain number of bytes."""
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if not found:
        raise UserError(f"{text[:40]!r} is no size: write it like  2GiB, 512MiB or 1.5GB")
    return int(float(found[1]) * UNITS[found[2]])


def size(count: float) -> str:
    """Bytes as a person reads them."""
    if 0 < count < 1024:
        return f"{count:.0f} B"
    return f"{count / MIB:,.1f} MiB" if count >= MIB / 10 or not count else f"{count / 1024:,.1f} KiB"


def resident() -> int:
    """Bytes of this process that are in memory.

    Raises:
        OSError: this system does not tell (it is not Linux).
    """
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle() -> None:
    """Give freed memory back to the system, which glibc keeps for later; other C libraries do as they like."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def one_arena() -> None:
    """Let all threads share one heap: glibc gives each of its own, which keeps the most that ever passed through it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(ARENA_MAX, 1)


def populate(name: str) -> None:
    """Map all pages of the files with this in their path: code is counted now, and not when it first runs."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, path = line.split(maxsplit=5) if line.count("/") else ("", "-", "")
        if name in path and rights[0] == "r":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), POPULATE)


@dataclass(frozen=True)
class Cost:
    """What a graph takes, in bytes: `loaded`, and `running` more while it is loaded or runs, inputs and outputs too."""

    loaded: int
    running: int


@dataclass(frozen=True)
class Need:
    """What something takes: graphs, which all that need them share, and bytes of its own."""

    graphs: frozenset[str]
    bytes: int


class Reservation:
    """Room in the budget. Given back by `release`, or when nobody holds it any more."""

    def __init__(self, need: Need) -> None:
        self.need = need

    def release(self) -> None:
        self.need = Need(frozenset(), 0)

    def allocated(self, count: int) -> None:
        """So many of its bytes are resident now, and no more to come."""
        self.need = Need(self.need.graphs, max(self.need.bytes - count, 0))


class Memory:
    """The budget, what is reserved in it, and the loaded graphs, which are dropped where their room is needed.

    Attributes:
        budget: bytes.
        costs: of every graph.
        base: resident before any graph was loaded.
        loaded: graphs; one at a time is loaded, by who holds `loading`.
        heavy: whether use was over 80 % of the budget and has not been under 60 % since.
        refused, pressed: requests that found no room, and that were answered at a heavier level.
        others: whether someone holds memory that is not reserved, and will give it back.
    """

    def __init__(self, budget: int, costs: Mapping[str, Cost]) -> None:
        self.budget, self.costs = budget, costs
        self.loaded: dict[str, Session] = {}
        self.heavy, self.refused, self.pressed = False, 0, 0
        self.others: Callable[[], bool] = lambda: False
        self._live: weakref.WeakSet[Reservation] = weakref.WeakSet()
        self._lock, self.loading = threading.RLock(), threading.Lock()
        self._clock = itertools.count()
        self._used: dict[str, int] = {}
        populate("onnxruntime")
        settle()
        self.base = resident()

    def busy(self, own: Reservation | None = None) -> bool:
        """Whether memory will be given back: by someone else than who asks and has this reserved."""
        with self._lock:
            return any(each.need.bytes or each.need.graphs for each in self._live if each is not own) or self.others()

    def sure(self, take: Callable[[], T], own: Reservation | None = None) -> T:
        """What `take` gives; once more where it finds no room, and what was in its way has left meanwhile."""
        return take() if not (taken := take()) and not self.busy(own) else taken

    def alone(self, need: Need) -> int:
        """Bytes in use if nothing else were."""
        return self.base + need.bytes + sum(self.costs[graph].loaded for graph in need.graphs)

    def in_use(self, *more: Need) -> int:
        """Bytes in use, and with `more` of them reserved."""
        with self._lock:
            needs = [*(each.need for each in self._live), *more]
        missing = {graph for need in needs for graph in need.graphs} - self.loaded.keys()
        return resident() + sum(need.bytes for need in needs) + sum(self.costs[graph].loaded for graph in missing)

    def reserve(self, need: Need, most: float = 1.0) -> Reservation | None:
        """Take room, if no more than this share of the budget is in use then; graphs that nobody needs are dropped."""
        with self._lock:
            if not self._makes_room(need, most * self.budget):
                return None
            self._live.add(reservation := Reservation(need))
            return reservation

    def change(self, reservation: Reservation, need: Need) -> bool:
        """Take this room in place of what was reserved; if there is none, all stays as it was."""
        with self._lock:
            before, reservation.need = reservation.need, Need(frozenset(), 0)
            fits = self._makes_room(need, self.budget)
            reservation.need = need if fits else before
            return fits

    def use(self, graph: str) -> None:
        """Graphs that were used last are dropped last."""
        self._used[graph] = next(self._clock)

    def _makes_room(self, need: Need, most: float) -> bool:
        if self.in_use(need) <= most:
            return True
        gc.collect()  # a session that was left is in a circle with its last answer
        needed = need.graphs.union(*(each.need.graphs for each in self._live))
        idle = sorted(self.loaded.keys() - needed, key=lambda graph: self._used.get(graph, 0))
        while True:
            settle()
            if self.in_use(need) <= most:
                return True
            if not idle:
                return False
            del self.loaded[idle.pop(0)]
