"""From nothing to the first token: a process is started, asked, and ended, again and again.

    python scripts/bench_load.py build/demo-vlm --checkpoint models/demo-vlm
    python scripts/bench_load.py BUNDLE --image photo.jpg --question "what is this?" --json load.json

Beside our runtime, with --checkpoint, Hugging Face transformers on the model that the bundle was built from: same image
and question, float32, as many threads. They have their turns in rounds. `cold`: the system's file cache is emptied of
their files first. Memory is the process's peak; what is left of it without the weights and the KV cache is what the
program itself takes.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
from PIL import Image
from rich.progress import track

from demo_vlm.data import make_page
from engines import bundle as bundles
from engines.errors import Parser, UserError, check_exit, command, positive
from engines.manifest import WEIGHTS
from figures import PACKAGES, Figures, typed, versions
from plots import Panel
from reporting import json_option

START = Path(__file__).with_name("cold_start.py")
PARTS = ("import", "open", "first token")
OURS, THEIRS = "runtime", "transformers"
MIB = 2**20
HEADER = "who", "files", *(f"{part}, s" for part in PARTS), "x", "peak, MiB", "weights", "KV", "rest, MiB"
SEED = 0  # of the page that is drawn
NOTE = (
    "Seconds since the process was started, and its peak of resident memory: of {times} starts the median; ratios are "
    "of paired starts. Rest: the peak without weights and KV cache. cold: no file of bundle or checkpoint in the cache."
)


def forget(folder: Path) -> None:
    """Let the system's file cache drop a folder's files."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # what is not on disk yet is not dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def start(way: str, path: Path, arguments: argparse.Namespace, images: list[Path]) -> dict[str, Any]:
    """One process: what cold_start.py says."""
    line = [sys.executable, START, way, path, arguments.question, "--threads", arguments.threads]
    line += [part for image in images for part in ("--image", image)] + ["--tokens", arguments.tokens]
    line += ["--level", arguments.level] if arguments.level else []
    done = subprocess.run([str(part) for part in [*line, "--since", monotonic()]], capture_output=True, text=True)
    said = done.stderr.strip().splitlines() or ["no reason given"]
    check_exit(done.returncode, f"{way} could not answer: {said[-1]}")
    return dict(json.loads(done.stdout))


def measure(arguments: argparse.Namespace, images: list[Path]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """State of the file cache -> who -> its starts."""
    who = {OURS: arguments.bundle} | ({THEIRS: arguments.checkpoint} if arguments.checkpoint else {})
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        state: {name: [] for name in who} for state in ("warm", "cold")
    }
    for path in who.values():
        start(next(name for name in who if who[name] == path), path, arguments, images)  # compiles Python's files
    for _ in track(range(arguments.times), "starting", transient=True, disable=not sys.stderr.isatty()):
        for state, starts in found.items():
            for name, path in who.items():
                if state == "cold":
                    forget(path)
                starts[name].append(start(name, path, arguments, images))
    return found


def weights_of(name: str, arguments: argparse.Namespace) -> int:
    """Bytes of the weights, as they are in memory."""
    if name == OURS:
        return bundles.read(arguments.bundle).manifest.files[WEIGHTS].bytes
    import torch
    from safetensors import safe_open

    size = 0
    for file in arguments.checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            size += sum(int(np.prod(tensors.get_slice(key).get_shape())) for key in tensors.keys())  # noqa: SIM118
    return size * torch.float32.itemsize


@dataclass(frozen=True)
class Row:
    """Medians of the starts; seconds since the process was started, bytes.

    Attributes:
        ratio: seconds to the first token over ours, of paired starts.
        rest: of the peak, without weights and cache.
    """

    who: str
    files: str
    seconds: list[float]
    ratio: float
    peak: float
    weights: int
    kv_bytes: int
    rest: float


def row(name: str, state: str, starts: dict[str, list[dict[str, Any]]], weights: int) -> Row:
    each, last = starts[name], PARTS[-1]
    seconds = [median(one["marks"][part]["seconds"] for one in each) for part in PARTS]
    pairs = zip(starts[OURS], each, strict=True)
    ratio = median(theirs["marks"][last]["seconds"] / ours["marks"][last]["seconds"] for ours, theirs in pairs)
    peak, kv_bytes = median(one["marks"]["end"]["peak"] for one in each), each[0]["kv_bytes"]
    return Row(name, state, seconds, ratio, peak, weights, kv_bytes, peak - weights - kv_bytes)


def cells(row: Row) -> list[str]:
    sizes = [f"{size / MIB:,.1f}" for size in (row.peak, row.weights, row.kv_bytes, row.rest)]
    return [row.who, row.files, *(f"{second:.2f}" for second in row.seconds), f"{row.ratio:.1f}", *sizes]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="that the bundle was built from: transformers is measured too")
    parser.add_argument("--image", type=Path, action="append", help="default: a page with numbers, if the model sees")
    parser.add_argument("--question", default="what is the number in row 1 column 1 ?")
    parser.add_argument("--level", help="of the bundle; default: its own")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="default: 1")
    parser.add_argument("--tokens", type=positive, default=8, metavar="N", help="of the answer; default: 8")
    parser.add_argument("--times", type=positive, default=9, metavar="N", help="starts each; default: 9")
    parser.add_argument("--quick", action="store_true", help="one start each: does it run at all")
    json_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.times = 1
    if arguments.checkpoint and not (arguments.checkpoint / "config.json").is_file():
        raise UserError(f"{arguments.checkpoint} is no checkpoint: it has no config.json")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    sees = bool(bundles.read(arguments.bundle).manifest.model.layouts)
    with tempfile.TemporaryDirectory() as folder:
        images: list[Path] = arguments.image or []
        if sees and not images:
            images = [Path(folder) / "page.png"]
            Image.fromarray(make_page(np.random.default_rng(SEED))[0]).save(images[0])
        found = measure(arguments, images)
    packages = [*PACKAGES, *(["torch", THEIRS] if arguments.checkpoint else [])]
    weights = {name: weights_of(name, arguments) for name in found["warm"]}
    rows = [row(name, state, starts, weights[name]) for state, starts in found.items() for name in starts]
    values = {"rows": [asdict(row) for row in rows], "starts": found}
    table, note = {"": [list(HEADER), *map(cells, rows)]}, NOTE.format(times=arguments.times)
    lines = {f"{row.who}, {row.files}": [[row.seconds[-1]]] for row in rows}
    panel = Panel(f"from the start to {PARTS[-1]}", "", "seconds", lines)
    Figures(typed("bench_load.py", argv), table, [note], values, [panel], versions(packages)).report(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
