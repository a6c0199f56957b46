"""How many visual tokens an image keeps: pressure with hysteresis, quotas, and prompts that a quota makes fit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from engines.gate import Adaptive, Fallback, Gate
from engines.manifest import Bucket, Level, Shortened, View
from runtime import gate
from runtime.gate import VisualGate, memory_pressure
from tests.layouts import plain
from tests.runtime.asking import Recorder, ask, ids_of, patchy

BUCKETS = [Bucket(40, [4], 8, 2, "p", "d", "c"), Bucket(60, [4], 8, 2, "p", "d", "c")]


LAYOUT = plain(1, 1, 10)


class OneSize(VisualGate):
    """Of a model with 10 tokens an image."""

    def counts_of(self, seen: list[dict[str, np.ndarray]], text: int) -> list[int]:
        return self.counts(seen, [LAYOUT] * len(seen), text)


def visual_gate(adaptive: Adaptive | None, buckets: list[Bucket] = BUCKETS) -> OneSize:
    view = View("v", adaptive.counts[-1] if adaptive else 7, adaptive)
    return OneSize(Level({}, [1], 99, {LAYOUT.name: view}, buckets))


def seen(*curves: list[float], entropy: float = 1.0) -> list[dict[str, np.ndarray]]:
    return [{"coverage": np.array([curve], np.float32), "entropy": np.array([entropy], np.float32)} for curve in curves]


def pressures(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    remaining = list(values)
    monkeypatch.setattr(gate, "memory_pressure", lambda budget: remaining.pop(0))


SLOW, FAST = [k / 10 for k in range(1, 11)], [0.8 + k / 50 for k in range(1, 11)]


def test_the_smallest_count_that_covers_enough() -> None:
    chooser = visual_gate(Adaptive([2, 5, 10], coverage=0.5))
    assert chooser.counts_of(seen(SLOW, FAST), 8) == [5, 2]
    assert visual_gate(Adaptive([2, 5, 10], coverage=0.51)).counts_of(seen(SLOW, FAST), 8) == [10, 2]
    assert visual_gate(Adaptive([2, 5], coverage=1.0)).counts_of(seen(SLOW[:5], FAST[:5]), 8) == [5, 5]
    assert chooser.counts_of([], 8) == []


def test_a_level_that_is_not_adaptive_keeps_what_the_graph_returns() -> None:
    assert visual_gate(None).counts_of([{}, {}], 8) == [7, 7]


def test_the_gate_keeps_at_least_what_its_rate_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = visual_gate(Adaptive([2, 3, 6, 8, 10], gate=Gate(base=0.8)))
    pressures(monkeypatch, 0.0, 0.5, 1.0)
    got = [chooser.counts_of(seen(SLOW, entropy=1.0), 8)[0] for _ in range(3)]
    assert got == [8, 6, 6]  # 1 - rate is 0.8, 0.6 and 0.4
    pressures(monkeypatch, 1.0, 1.0)
    assert chooser.counts_of(seen(SLOW, entropy=0.0), 8) == [3]  # 0.3: the most that a gate drops
    pressures(monkeypatch, 0.0)
    assert chooser.counts_of(seen(FAST, entropy=1.0), 8) == [8]  # 5 would cover enough; it drops 0.2 at most


def test_hysteresis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heavy from over 80 % until under 60 %; in between the rate is that of 80 %."""
    course = [0.7, 0.8, 0.81, 1.0, 0.7, 0.6, 0.59, 0.79]
    heavy = [False, False, True, True, True, True, False, False]
    counted = [0.7, 0.8, 0.81, 1.0, 0.8, 0.8, 0.59, 0.79]
    knobs = Gate(base=0.5)
    chooser = visual_gate(Adaptive([*range(1, 11)], gate=knobs))
    pressures(monkeypatch, *course)
    for was_heavy, pressure in zip(heavy, counted, strict=True):
        got = chooser.counts_of(seen(SLOW, entropy=0.5), 8)[0]
        assert chooser.heavy is was_heavy
        assert got == next(n for n in range(1, 11) if n >= 10 * (1 - knobs.rate(pressure, 0.5)) - 1e-6)


def test_the_fallback_softens_the_gate_and_decides_alone_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, hard = [*range(1, 11)], Fallback(simple=0.0, complex=0.1)
    easy = Fallback(simple=90.0, complex=99.0)
    for fallback, together, alone in ((hard, 6, 6), (easy, 4, 3)):  # rates 0.4 and 0.75; the gate's is 0.6
        pressures(monkeypatch, 1.0)
        adaptive = Adaptive(counts, gate=Gate(base=0.4), fallback=fallback)
        assert visual_gate(adaptive).counts_of(seen(SLOW, entropy=0.5), 8) == [together]
        assert visual_gate(Adaptive(counts, fallback=fallback)).counts_of(seen(SLOW), 8) == [alone]


def test_a_quota_gives_more_to_the_image_that_is_hard_to_cover() -> None:
    assert visual_gate(Adaptive([10], quota=0.5)).counts_of(seen(SLOW, FAST), 8) == [9, 1]
    assert visual_gate(Adaptive([10], quota=0.5, floor=3)).counts_of(seen(SLOW, FAST), 8) == [7, 3]
    assert visual_gate(Adaptive([10], quota=0.5)).counts_of(seen(SLOW, SLOW), 8) == [5, 5]


def test_a_quota_takes_no_more_than_covers_enough() -> None:
    chooser = visual_gate(Adaptive([2, 5, 10], coverage=0.5, floor=2, quota=1.0))
    assert chooser.counts_of(seen(SLOW, FAST), 8) == [5, 2]


def test_a_quota_shrinks_the_images_to_the_room_of_the_longest_bucket() -> None:
    chooser = visual_gate(Adaptive([10], quota=1.0))
    assert chooser.counts_of(seen(SLOW, SLOW, SLOW), 30) == [10, 10, 10]
    assert chooser.counts_of(seen(SLOW, SLOW, SLOW), 40) == [7, 7, 6]
    assert chooser.counts_of(seen(SLOW, SLOW, SLOW), 57) == [1, 1, 1]


def test_the_room_is_that_of_prompts_that_the_level_can_shorten() -> None:
    short = [dataclasses.replace(bucket, shortened=Shortened(36, 30)) for bucket in BUCKETS]
    chooser = visual_gate(Adaptive([10], quota=1.0), short)
    assert chooser.counts_of(seen(SLOW, SLOW, SLOW), 30) == [10, 10, 10]
    assert chooser.counts_of(seen(SLOW, SLOW, SLOW), 31) == [2, 2, 1]  # 36: no longer prompt with so much text


QUESTION = "red red red red red"


def images_that_fill(least: int) -> int:
    """How many images the longest bucket, of 40 tokens, holds at `least` tokens each."""
    return max(n for n in range(1, 8) if len(ids_of(QUESTION, n)) + n * (least - 1) <= 40)


@pytest.mark.parametrize(("level", "least"), [("thrifty", 4), ("gated", 4), ("shared", 1), ("frugal", 2)])
def test_images_that_do_not_fit_the_longest_bucket_are_read_behind_it(
    level: str, least: int, bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, vlm = Recorder(monkeypatch), runtime.open(bundle_path, level=level, threads=1)
    most = images_that_fill(least)
    for count in (most, most + 1):
        recorder.calls.clear()
        pictures = [patchy(seed) for seed in range(count)]
        stats = ask(vlm, QUESTION, pictures, max_new_tokens=1).stats
        assert len(stats.visual_tokens_by_image) == count
        assert min(stats.visual_tokens_by_image) >= min(least, 1)
        assert sum(stats.visual_tokens_by_image) == stats.visual_tokens
        tokens = stats.visual_tokens + len(ids_of(QUESTION, count)) - count
        assert sum(len(positions) for positions, _ in recorder.steps()) == max(tokens - 40, 0)
        if level == "shared":
            assert tokens == 40 if count == most else tokens > 40  # all the room is used


def test_the_bucket_is_that_of_the_tokens_kept(bundle_path: Path) -> None:
    """An image that needs one token takes the short bucket where one that needs four does not."""
    vlm = runtime.open(bundle_path, level="thrifty", threads=1)
    words = "red " * (16 - len(ids_of("", 1)) - 1)
    assert [ask(vlm, words, [patchy(i)], max_new_tokens=1).stats.bucket for i in (3, 0)] == [16, 40]


def test_memory_pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n", "/proc/self/statm": "9 512 1"}
    monkeypatch.setattr(os, "sysconf", lambda name: 4096)
    read: Any = lambda path: files[str(path)]  # noqa: E731
    monkeypatch.setattr(Path, "read_text", read)
    assert memory_pressure(0) == 0.75
    assert memory_pressure(4) == 0.5
    files["/proc/meminfo"] = "nothing"
    assert memory_pressure(0) == 0.0


def test_memory_pressure_of_this_machine() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc: not Linux")
    assert 0 < memory_pressure(0) < 1
    assert 10 * memory_pressure(1 << 20) == pytest.approx(memory_pressure((1 << 20) // 10), rel=0.2)
