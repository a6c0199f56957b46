"""What a build takes: seconds, memory and disk, of models of real sizes with random weights in bfloat16.

    python scripts/bench_export.py smolvlm-256m
    python scripts/bench_export.py qwen2-vl-2b --json export.json -- --recipe off --weights float16 --buckets 512

What stands behind `--` goes to export/build.py as it is. Memory is told in two figures. *Own* is what the build and
its workers hold that no file backs: without swap, that has to fit. *Resident* is the most that the kernel has counted
of the largest of these processes (VmHWM): it has pages of mapped files in it too, which are dropped for want of room.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import random_checkpoint
from engines import bundle as bundles
from engines.errors import Parser, check_exit, command
from engines.manifest import WEIGHTS
from figures import Figures, typed, versions
from plots import Panel
from reporting import choice, json_option

ROOT = Path(__file__).resolve().parents[1]
EVERY = 0.1  # seconds between two looks at the memory
MIB = 2**20
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")
NOTE = "Own memory: what no file backs, of all processes together; resident: VmHWM of the largest of them."
# Random weights give the guard nothing to judge: its answers are as wrong with a full cache.
BUILD = ("--recipe", "off", "--recipe", "balanced", "--images", "1", "--no-report", "--guard", "off")


@dataclass(frozen=True)
class Row:
    """A build.

    Attributes:
        weights: bytes of the checkpoint's.
        cpu_seconds: of all its processes; `seconds` are the clock's, and the machine may have had other work.
        own: most bytes in memory that no file backs, of all its processes together.
        resident: VmHWM of the largest of them, in bytes.
        stored: bytes of the bundle's weights.
    """

    name: str
    parameters: int
    weights: int
    seconds: float
    cpu_seconds: float
    own: int
    resident: int
    stored: int
    graphs: int

    @property
    def share(self) -> float:
        """Of the weights, that is held in memory."""
        return self.own / self.weights


class Watch:
    """The most memory that a process and its descendants have taken so far."""

    def __init__(self, pid: int) -> None:
        self.pid, self.own, self.resident = pid, 0, 0

    def look(self) -> None:
        pids = _family(self.pid)
        with suppress(OSError, StopIteration):  # some have ended meanwhile
            if len(pids) == 1:
                own = _kib(Path(f"/proc/{self.pid}/status"), "RssAnon")
            else:  # forks share pages, which count once
                own = sum(_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon") for pid in pids)
            self.own = max(self.own, own)
            self.resident = max(self.resident, *(_kib(Path(f"/proc/{pid}/status"), "VmHWM") for pid in pids))


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # grows on the way
        with suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _kib(file: Path, name: str) -> int:
    """A figure of a process, in bytes."""
    rows = (line.split() for line in file.read_text().splitlines())
    return next(int(row[1]) for row in rows if row and row[0] == f"{name}:") * 1024


def measure(name: str, folder: Path, options: Sequence[str]) -> Row:
    """Build a checkpoint of one of `random_checkpoint.SIZES`, which is written to `folder` unless it lies there.

    Raises:
        UserError: it could not be built.
    """
    checkpoint = folder / name
    if not checkpoint.is_dir():
        print(f"writing random weights of {name} ...", file=sys.stderr, flush=True)
        random_checkpoint.write(checkpoint, name)
    line = [sys.executable, str(ROOT / "export" / "build.py"), str(checkpoint), "--out", str(folder / f"{name}.bundle")]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen([*line, *options], stdout=2) as child:  # stdout has the figures alone
        watch = Watch(child.pid)
        while child.poll() is None:
            watch.look()
            time.sleep(EVERY)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    check_exit(child.returncode, f"{name} could not be built (exit code {child.returncode}): see above")
    manifest = bundles.read(folder / f"{name}.bundle").manifest
    model = random_checkpoint.skeleton(random_checkpoint.configuration(name))
    return Row(
        name,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
        seconds,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        watch.own,
        watch.resident,
        manifest.files[WEIGHTS].bytes,
        len(manifest.graphs),
    )


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["model", "parameters, M", "checkpoint, MiB", "graphs", "seconds", "CPU seconds"]
    header += ["own memory, MiB", "of the checkpoint", "resident, MiB", "weights.bin, MiB"]
    cells = [header]
    for row in rows:
        size = [f"{row.parameters / 1e6:.1f}", f"{row.weights / MIB:.0f}", str(row.graphs)]
        took = [f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}", f"{row.own / MIB:.0f}", f"{row.share:.2f}"]
        cells.append([row.name, *size, *took, f"{row.resident / MIB:.0f}", f"{row.stored / MIB:.0f}"])
    return cells


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own, behind = list(argv), list[str]()
    if "--" in own:
        own, behind = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(random_checkpoint.SIZES)
    parser.add_argument("models", help=f"comma-separated: {known}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write and build there, and leave it, for a next time")
    json_option(parser)
    arguments = parser.parse_args(own)
    arguments.models = choice(arguments.models, list(random_checkpoint.SIZES), "model")
    return arguments, behind or list(BUILD)


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments, options = _arguments(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as temporary:
        rows = [measure(name, arguments.keep or Path(temporary), options) for name in arguments.models]
    notes = [f"build.py {' '.join(options)}", NOTE]
    values = {"build": options, "rows": [{**asdict(row), "share": row.share} for row in rows]}
    panel = Panel("building a bundle", "", "seconds", {row.name: [[row.seconds]] for row in rows})
    told = {"": table(rows)}, notes, values, [panel], versions(PACKAGES)
    Figures(typed("bench_export.py", argv), *told).report(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
