"""One long answer: does memory stay what it is, and does the last token take as long as the first?

    python scripts/endurance.py BUNDLE
    python scripts/endurance.py BUNDLE --level extreme --tokens 100000 --json endurance.json

A session reads a question and generates tokens that nobody stops. A line of the table is a thousand of them: the median
time of a step in which nothing is compacted and of one in which the window is, the bytes of the KV state, and those of
the process. The last thousand steps take turns with the first thousand of another session: what else the machine does
meanwhile slows both. It ends with 1 where they are slower by more than a tenth, the state has not been of one size, or
the process has grown by more than 2 % since the first thousand.

A level ends at its positions. One that has more is built by a recipe that stretches them (`[positions] scale`): what
the model says then makes no sense, but it costs what sense would.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import runtime
from engines.errors import Parser, UserError, command, positive
from reporting import QUESTION, json_option, markdown, write
from runtime.model import VLM
from runtime.session import Session
from runtime.state import Context

PART = 1000  # tokens of a line
SLOWER, GROWN = 1.1, 1.02


@dataclass(frozen=True)
class Part:
    """A part of the answer, up to this number of tokens: medians in seconds, None where there is no step of the kind.

    Attributes:
        kv_bytes: smallest and largest size of the KV state.
        process_bytes: resident in memory, at their end.
    """

    tokens: int
    step: float | None
    compacting: float | None
    kv_bytes: tuple[int, int]
    process_bytes: int


class Run:
    """A session that answers without end, and what its steps took."""

    def __init__(self, vlm: VLM, tokens: int) -> None:
        self.session, self.done = Session(vlm), 0
        self._stream = self.session.stream(QUESTION, (), tokens + 2, ignore_eos=True)
        self._begun = np.zeros(tokens + 1)  # these are made before, or they would be what grows
        self._compactions, self._sizes = np.zeros((2, tokens + 1), np.int64)
        self._away, self._left = 0.0, time.perf_counter()

    def go_on(self) -> bool:
        """To the next piece of text -> whether there was one."""
        self._away += time.perf_counter() - self._left
        piece = next(self._stream, None)
        self._left = time.perf_counter()
        return piece is not None

    def note(self, context: Context) -> None:
        """A step begins."""
        if self.done < len(self._begun):
            self._begun[self.done] = time.perf_counter() - self._away
            self._compactions[self.done], self._sizes[self.done] = context.state.compactions, context.state.nbytes
        self.done += 1

    def part(self, start: int, stop: int, process: int) -> Part:
        steps, compacted = np.diff(self._begun[start : stop + 1]), np.diff(self._compactions[start : stop + 1]) > 0
        quick, slow = (float(np.median(each)) if len(each) else None for each in (steps[~compacted], steps[compacted]))
        sizes = self._sizes[start:stop]
        return Part(stop, quick, slow, (int(sizes.min()), int(sizes.max())), process)

    def check(self, tokens: int) -> None:
        if self.done <= tokens:
            reason = self._stream.answer.stats.stop_reason
            level = self.session.vlm.bundle.manifest.levels[self.session.level]
            raise UserError(
                f"the answer ended after {self.done} tokens ({reason}), and level {self.session.level} has "
                f"{level.max_positions} positions: give fewer --tokens, or build a level of more (--help)"
            )


def measure(vlm: VLM, tokens: int, part: int) -> tuple[list[Part], Part]:
    """The answer's parts, and the first part of another session's, which takes turns with the last one."""
    advance, process = vlm.advance, list[int]()
    long, fresh = Run(vlm, tokens), Run(vlm, part)
    running = fresh

    def noted(context: Context, *rest: Any) -> Any:
        running.note(context)
        return advance(context, *rest)

    vlm.advance = noted  # type: ignore[method-assign, assignment]
    try:
        with tqdm(total=tokens, unit="token", disable=None, leave=False) as bar:
            fresh.go_on()  # so that its memory is there from the beginning
            running = long
            while long.done <= tokens and long.go_on():
                bar.update(long.done - bar.n)
                if long.done // part > len(process):
                    process.append(resident())
                if long.done > tokens - part:
                    running = fresh
                    fresh.go_on()
                    running = long
            running = fresh
            while fresh.done <= part and fresh.go_on():  # pieces of more than one token may have kept it behind
                pass
    finally:
        vlm.advance = advance  # type: ignore[method-assign]
    long.check(tokens)
    parts = [long.part(start, start + part, process[start // part]) for start in range(0, tokens, part)]
    return parts, fresh.part(0, part, process[-1])


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def verdict(parts: Sequence[Part], fresh: Part) -> tuple[str, bool]:
    """What became of time and memory, and whether both held."""
    first, last = parts[0], parts[-1]
    if last.step is None or fresh.step is None:
        raise UserError("every step compacts: choose a level with a longer window")
    slower, grown = last.step / fresh.step, last.process_bytes / first.process_bytes
    sizes = {size for part in parts for size in part.kv_bytes}
    state = f"{max(sizes):,} bytes throughout" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,} bytes"
    line = (
        f"last {fresh.tokens:,} steps: {1e3 * last.step:.3f} ms, the first of another session, in turns with them: "
        f"{1e3 * fresh.step:.3f} ms, ratio {slower:.3f}\n"
        f"process at the end / after the first {first.tokens:,}: {grown:.4f}; KV state: {state}"
    )
    return line, slower <= SLOWER and grown <= GROWN and len(sizes) == 1


def report(parts: Sequence[Part]) -> list[str]:
    rows: list[Sequence[str]] = [("tokens", "step, ms", "compacting step, ms", "KV state, bytes", "process, MiB")]
    for part in parts:
        times = (f"{1e3 * seconds:.3f}" if seconds else "" for seconds in (part.step, part.compacting))
        rows.append((f"{part.tokens:,}", *times, f"{part.kv_bytes[1]:,}", f"{part.process_bytes / 2**20:.1f}"))
    return markdown(rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--level", help="of the bundle; a session runs at what it names for later questions")
    parser.add_argument("--tokens", type=positive, default=20 * PART, metavar="N", help="default: 20000")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="default: 1")
    json_option(parser, "")
    arguments = parser.parse_args(argv)
    if arguments.tokens % PART or arguments.tokens == PART:
        raise UserError(f"--tokens must be {2 * PART}, {3 * PART}, ..., got {arguments.tokens}")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    vlm = runtime.open(arguments.bundle, "ort", arguments.level, arguments.threads)
    parts, fresh = measure(vlm, arguments.tokens, PART)
    line, held = verdict(parts, fresh)
    print("\n".join([*report(parts), "", line]))
    if arguments.json is not None:
        values = {
            "command": ["scripts/endurance.py", *(sys.argv[1:] if argv is None else argv)],
            "level": vlm.level_for(question_later=True),
            "held": held,
            "fresh": asdict(fresh),
            "parts": [asdict(part) for part in parts],
        }
        write(arguments.json, json.dumps(values, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
