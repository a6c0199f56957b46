"""The memory budget: sizes, and the ledger of what is reserved and what is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime
from engines.errors import UserError
from runtime import memory
from runtime.memory import MIB, Cost, Memory, Need, Reservation, parse_size
from tests.runtime.budgeted import bare

if not Path("/proc/self/statm").exists():
    pytest.skip("a memory budget needs Linux", allow_module_level=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 1024**3), ("512MiB", 512 * 1024**2), ("1.5 GB", 1_500_000_000), ("7kb", 7000), ("3K", 3000),
     ("12345", 12345), ("12345 B", 12345), ("1tib", 1024**4), (" 0.5Mi ", 524288)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "2 GiBs", "two", "1e9", "2Gi B", "0x10", "9" * 400])
def test_what_is_no_size_is_one_line(text: str, bundle_path: Path) -> None:
    with pytest.raises(UserError, match="no size: write it like"):
        runtime.open(bundle_path, memory_budget=text)


def test_few_bytes_are_not_told_as_none() -> None:
    assert [memory.size(count) for count in (0, 1, 1024, 2**20, 1.25 * 2**30)] == [
        *("0.0 MiB", "1 B", "1.0 KiB", "1.0 MiB", "1,280.0 MiB"),
    ]


def test_a_budget_of_nothing_is_refused(bundle_path: Path) -> None:
    with pytest.raises(UserError, match="memory_budget must be at least 1"):
        runtime.open(bundle_path, memory_budget="0")


@given(data=st.data())
def test_the_ledger(data: st.DataObject) -> None:
    """Whatever is reserved, loaded, allocated and given back: resident + what is still to come, graphs once."""
    graphs = {f"g{i}": Cost(data.draw(st.integers(0, 50)), 0) for i in range(4)}
    with pytest.MonkeyPatch.context() as patch:
        resident = data.draw(st.integers(0, 100))
        patch.setattr(memory, "resident", lambda: resident)
        bare(patch)
        ledger = Memory(data.draw(st.integers(1, 400)), graphs)
        held: list[Any] = []
        for _ in range(data.draw(st.integers(1, 12))):
            need = Need(data.draw(st.frozensets(st.sampled_from([*graphs]))), data.draw(st.integers(0, 80)))
            step = data.draw(st.sampled_from(["reserve", "change", "release", "drop", "load", "allocated"]))
            live = [each.need for each in held if each.need.bytes or each.need.graphs]
            if step == "load":
                names = sorted(set().union(*(each.graphs for each in live)) - ledger.loaded.keys())
                if names:
                    ledger.loaded[names[0]] = object()  # type: ignore[assignment]
                    ledger.use(names[0])
                    resident += graphs[names[0]].loaded
            elif step == "reserve":
                # what is loaded for nobody may have to go, but its memory is not freed in this test: it stays resident
                before = len(held)
                held += filter(None, [ledger.reserve(need)])
                assert len(held) == before or ledger.in_use() <= ledger.budget
            elif held:
                chosen = held[data.draw(st.integers(0, len(held) - 1))]
                if step == "change":
                    kept = chosen.need
                    changed = ledger.change(chosen, need)
                    assert chosen.need == (need if changed else kept)
                elif step == "release":
                    chosen.release()
                elif step == "drop":
                    held.remove(chosen)
                elif step == "allocated":
                    moved = min(chosen.need.bytes, need.bytes)
                    chosen.allocated(moved)
                    resident += moved
            chosen = None
            expected = resident + sum(each.need.bytes for each in held)
            for name, cost in graphs.items():
                if name not in ledger.loaded and any(name in each.need.graphs for each in held):
                    expected += cost.loaded
            assert ledger.in_use() == expected


def test_graphs_that_nobody_needs_make_room_the_one_used_last_stays(process: SimpleNamespace) -> None:
    ledger = Memory(200 * MIB, {name: Cost(20 * MIB, 0) for name in "abcd"})
    ledger.loaded = Freed({name: None for name in "abcd"}, process)
    process.resident = 180 * MIB
    for name in "cabd":
        ledger.use(name)
    held = ledger.reserve(Need(frozenset("c"), 10 * MIB))
    assert held
    assert ledger.loaded.keys() == set("abcd")  # there was room
    other = ledger.reserve(Need(frozenset("d"), 40 * MIB))
    assert other
    assert ledger.loaded.keys() == set("cd")  # a and b went; c is needed, though it was used first
    assert ledger.reserve(Need(frozenset(), 31 * MIB)) is None
    assert ledger.loaded.keys() == set("cd")


class Freed(dict):
    """Loaded graphs of 20 MiB, whose memory is free when they are dropped."""

    def __init__(self, graphs: dict[str, None], process: SimpleNamespace) -> None:
        super().__init__(graphs)
        self.process = process

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.process.resident -= 20 * MIB


def test_room_that_is_found_free_when_it_is_looked_for_again(process: SimpleNamespace) -> None:
    """Who was in the way has left while it was looked for: that is no reason to say that there will never be room."""
    ledger, need = Memory(300 * MIB, {}), Need(frozenset(), 60 * MIB)
    held = ledger.reserve(Need(frozenset(), 150 * MIB))
    assert held
    tried = []

    def take() -> Reservation | None:
        found = ledger.reserve(need)
        tried.append(found)
        if len(tried) == 2:
            held.release()  # after it was in the way
        return found

    assert ledger.sure(take) is None  # it still holds its room
    assert len(tried) == 1
    assert ledger.sure(take)
    assert len(tried) == 3
    ledger.others = lambda: True  # they hold memory without having reserved it
    assert ledger.sure(lambda: tried.append(None)) is None
    assert len(tried) == 4
    assert ledger.busy()
