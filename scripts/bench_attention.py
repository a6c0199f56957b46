"""How long attention takes in one decode step on this CPU: our kernel beside what else there is, and beside the floor.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --kv-heads 16 --slots 4096 --threads 1 --json mha.json
    python scripts/bench_attention.py --quick

All run in one process, in rounds in which each has its turn: what disturbs the machine disturbs all of them. A turn is
a few calls one after another, each on a cache that the processor does not hold, as with a model's layers. The floor is
a plain read of memory, in the same rounds with as many threads: what reads its cache once cannot be faster. Who
computes something else than attention over its own cache, stated in double precision, is named and not timed.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's threads do not wait by spinning while others run

import numpy as np
import torch

import attention_peers
from attention_peers import OURS, Peer, Reader, Setting, Shape
from engines.errors import Parser, UserError, command, one_line, positive
from engines.plugins import store
from figures import Figures, last_level, typed, versions
from plots import Panel
from reporting import json_option

SLOTS, QUICK_SLOTS = (1024, 4096, 16384), (256,)
RUNS, QUICK_RUNS = 60, 2
COLD, QUICK_COLD = 4, 0.05  # times the last-level cache: what the copies of a cache have together
TURN = 2e-3  # seconds a turn takes at least
WRONG = "WRONG"
NOTE = (
    "µs: a call, in the median round and in the fastest. / floor: the fastest over the fastest read of its cache. "
    "/ ours: the fastest over that of our kernel of as many bits, int8 for floats."
)
PACKAGES = ("numpy", "onnxruntime", "torch")


@dataclass(frozen=True)
class Row:
    """One way on one setting; seconds a call.

    Attributes:
        error: largest difference from the exact result, over that result's largest number.
        over_ours: how many times our kernel's time it takes, in the median round; the kernel of as many bits, or of 8.
        floor: seconds to read its cache, at the speed of the fastest read there was with as many threads.
        least_over_floor, least_over_ours: what the table has. A long turn is disturbed more often than a short one, so
            that on a busy machine medians flatter the quick; what is fastest was not disturbed.
    """

    peer: str
    threads: int
    slots: int
    bits: int
    kv_bytes: int
    calls: int
    median: float
    least: float
    error: float
    over_ours: float | None
    floor: float = 0.0
    least_over_floor: float = 0.0
    least_over_ours: float | None = None


def turns(call: Callable[[], object]) -> int:
    """How many calls a turn has; they are the warm-up too."""
    call()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() < start + TURN:
        call()
        calls += 1
    return calls


def measure(setting: Setting, runs: int) -> tuple[list[Row], float, dict[str, str]]:
    """All that can be compared; seconds a byte of the fastest read; and of the others why not."""
    torch.set_num_threads(setting.threads)
    peers: dict[str, Peer] = {}
    errors: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, prepare in attention_peers.peers(setting).items():
        try:
            peer = prepare()
            errors[name] = peer.error()
        except Exception as error:  # another release of ONNX Runtime or PyTorch may not have the operator, or this form
            missing[name] = one_line(error)
            continue
        if errors[name] > peer.limit:
            missing[name] = f"{WRONG}: {errors[name]:.1e} from the exact result, {peer.limit:.0e} is allowed"
        else:
            peers[name] = peer
    reader = Reader(max(setting.cold, 1 << 20), setting.threads)
    reader()
    calls = {name: turns(peer.call) for name, peer in peers.items()}
    taken: dict[str, list[float]] = {name: [] for name in peers}
    reads = []
    for _ in range(runs):
        start = time.perf_counter()
        reader()
        reads.append((time.perf_counter() - start) / reader.bytes)
        for name, peer in peers.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                peer.call()
            taken[name].append((time.perf_counter() - start) / calls[name])
    rows = []
    for name, peer in peers.items():
        times, ours = np.array(taken[name]), taken.get(kernel_for(peer.bits))
        over = None if ours is None else float(np.median(times / np.array(ours)))
        shape, median, least = setting.shape, float(np.median(times)), float(times.min())
        row = (setting.threads, shape.slots, peer.bits, peer.kv_bytes, calls[name], median, least, errors[name], over)
        rows.append(Row(name, *row))
    return rows, min(reads), missing


def kernel_for(bits: int) -> str:
    """Ours, to compare others with."""
    return f"{OURS} int{bits if bits in (4, 8) else 8}"


def compared(rows: Sequence[Row], reads: dict[int, float]) -> list[Row]:
    """The rows with what their least times are over the floor and over ours.

    Args:
        reads: seconds a byte, by threads.
    """
    least = {(row.peer, row.threads, row.slots): row.least for row in rows}
    result = []
    for row in rows:
        floor, ours = reads[row.threads] * row.kv_bytes, least.get((kernel_for(row.bits), row.threads, row.slots))
        over = None if ours is None else row.least / ours
        result.append(replace(row, floor=floor, least_over_floor=row.least / floor, least_over_ours=over))
    return result


def tables(rows: Sequence[Row]) -> dict[str, list[list[str]]]:
    """A table for each number of threads."""
    found = {}
    for threads in dict.fromkeys(row.threads for row in rows):
        slots = list(dict.fromkeys(row.slots for row in rows))
        lines = [
            ["peer", *(f"{count:,} slots: {what}" for count in slots for what in ("µs (least)", "/ floor", "/ ours"))]
        ]
        for name in dict.fromkeys(row.peer for row in rows):
            cells: list[str] = []
            for count in slots:
                key = (name, threads, count)
                row = next((row for row in rows if (row.peer, row.threads, row.slots) == key), None)
                cells += told(row) if row else [""] * 3
            lines.append([name, *cells])
        found[f"threads: {threads}"] = lines
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    found: dict[int, dict[str, list[list[float]]]] = {}
    for row in rows:
        found.setdefault(row.threads, {}).setdefault(row.peer, []).append([row.slots, 1e6 * row.least])
    return [
        Panel(f"attention of a step, {threads} thread{'s' * (threads > 1)}", "slots", "microseconds", lines, True)
        for threads, lines in found.items()
    ]


def told(row: Row) -> list[str]:
    ours = "" if row.least_over_ours is None or row.peer.startswith(OURS) else f"{row.least_over_ours:.1f}"
    return [f"{1e6 * row.median:,.0f} ({1e6 * row.least:,.0f})", f"{row.least_over_floor:.2f}", ours]


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=positive, default=16, metavar="N", help="query heads; default: 16")
    parser.add_argument(
        "--kv-heads", type=positive, default=4, metavar="N", help="as many as --heads is MHA; default: 4"
    )
    parser.add_argument("--head-dim", type=positive, default=64, metavar="N", help="even; default: 64")
    parser.add_argument("--slots", type=_numbers, metavar="N,N", help="of the store; default: 1024,4096,16384")
    parser.add_argument("--window", type=positive, default=64, metavar="N", help="float32 tokens after it; default: 64")
    parser.add_argument("--threads", type=_numbers, metavar="N,N", help="default: 1, and 2 where there are two cores")
    parser.add_argument("--runs", type=positive, metavar="N", help=f"rounds; default: {RUNS}")
    parser.add_argument("--quick", action="store_true", help="a few rounds, few slots, warm caches: does it run at all")
    json_option(parser)
    arguments = parser.parse_args(argv)
    cores = os.cpu_count() or 1
    arguments.threads = arguments.threads or [1, 2][:cores]
    arguments.slots = arguments.slots or (QUICK_SLOTS if arguments.quick else SLOTS)
    arguments.runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    if max(arguments.threads) > cores:
        raise UserError(f"--threads {max(arguments.threads)}: this machine has {cores} cores")
    if arguments.heads % arguments.kv_heads:
        raise UserError(f"--heads {arguments.heads} is no multiple of --kv-heads {arguments.kv_heads}")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    cold = int((QUICK_COLD if arguments.quick else COLD) * last_level())
    built: store.Stored | None = None
    try:
        built = store.cpu()
    except UserError as error:
        missing[OURS] = str(error)
    library, paths = (built.path, built.architectures) if built else (None, [])
    reads: dict[int, float] = {}
    for threads in arguments.threads:
        for slots in arguments.slots:
            shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_dim, slots, arguments.window)
            found, read, without = measure(Setting(shape, threads, cold, library), arguments.runs)
            rows += found
            reads[threads] = min(read, reads.get(threads, read))
            missing |= without
    rows = compared(rows, reads)
    values = {
        "paths": paths,
        "heads": [arguments.heads, arguments.kv_heads, arguments.head_dim],
        "window": arguments.window,
        "runs": arguments.runs,
        "read_bytes_per_second": {threads: 1 / read for threads, read in reads.items()},
        "seconds": [asdict(row) for row in rows],
        "not_measured": missing,
    }
    heads = f"{arguments.heads} query heads, {arguments.kv_heads} KV heads of {arguments.head_dim}"
    about = f"{heads}, one query, a window of {arguments.window}. {NOTE}"
    notes = [about, *(f"not measured: {name}: {reason}" for name, reason in missing.items())]
    told = tables(rows), notes, values, panels(rows), versions(PACKAGES)
    Figures(typed("bench_attention.py", argv), *told).report(arguments.json)
    return int(any(name.startswith(f"{OURS} ") or reason.startswith(WRONG) for name, reason in missing.items()))


if __name__ == "__main__":
    sys.exit(main())
