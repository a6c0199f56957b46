"""What each graph of a bundle takes on this machine: measured once, each in a process of its own.

ONNX Runtime does not tell beforehand what it allocates: weights in the layout that the processor likes, threads, the
activations of a run. So every graph is loaded and run in a fork of a process that has nothing else, and the kernel's
count of resident memory is read: afterwards, and its highest. The numbers hold for this version of ONNX Runtime, these
threads and these kernels, and are kept beside the kernels (`engines.plugins.store.folder`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.errors import UserError, one_line
from engines.ort import OrtSession, ort_status
from runtime.memory import Cost, populate, settle

if TYPE_CHECKING:
    from engines.bundle import Bundle

RUNS = 3  # the first only learns where tensors go, the second allocates it in one piece
FORMAT = 1  # of the file: raised where what is measured changes


def costs(bundle: Bundle, threads: int | None, library: Path | None) -> dict[str, Cost]:
    """Of all graphs of a bundle, measured now unless that was done before.

    Raises:
        UserError: a graph cannot be loaded or run, or takes more memory than there is.
    """
    from engines.plugins import store

    known = FORMAT, bundle.fingerprint, ort_status().reason, threads or os.cpu_count(), str(library)
    kept = store.folder() / "memory" / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    graphs = bundle.manifest.graphs
    with suppress(OSError, ValueError, TypeError, AttributeError):
        found = {name: Cost(**cost) for name, cost in json.loads(kept.read_bytes()).items()}
        if found.keys() == graphs.keys() and all(
            isinstance(each.loaded + each.running, int) for each in found.values()
        ):
            return found
    wanted = {
        name: [str(bundle.file(graph.file)), threads, str(library) if library and graph.operators else None]
        for name, graph in graphs.items()
    }
    found = _measured(wanted)
    with suppress(OSError):  # then it is measured again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new.", dir=kept.parent) as folder:
            new = Path(folder, "costs")
            new.write_text(json.dumps({name: asdict(cost) for name, cost in found.items()}))
            os.replace(new, kept)
    return found


def _measured(wanted: dict[str, Any]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    shown = sys.stderr.isatty()
    command = [sys.executable, "-P", "-m", "runtime.probe"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        with suppress(BrokenPipeError):  # it has ended, and is asked below how
            child.stdin.write(json.dumps(wanted))
            child.stdin.close()
        for line in child.stdout:
            name, cost = json.loads(line)
            if isinstance(cost, str):
                child.kill()
                raise UserError(f"the memory of graph {name} cannot be measured: {cost}")
            found[name] = Cost(**cost)
            if shown:
                print(f"\rmeasuring the graphs' memory: {len(found)}/{len(wanted)} ", end="", file=sys.stderr)
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    if found.keys() != wanted.keys():
        raise UserError(f"measuring the graphs' memory broke off (exit code {child.returncode}): try again")
    return found


def _main() -> None:
    """Measure the graphs that stdin names, one fork each -> a JSON line each."""
    wanted = json.load(sys.stdin)
    with suppress(OSError):  # where memory runs out, this ends and not what the machine is for
        Path("/proc/self/oom_score_adj").write_text("1000")
    ort_status()
    settle()  # a fork begins with what is resident here, and that is its highest at least
    for name, (file, threads, library) in wanted.items():
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                told: Any = asdict(_cost(file, threads, Path(library) if library else None))
            except Exception as error:
                told = one_line(error)
            os.write(write, json.dumps(told).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lost = f"its process ended with {status}: it may take more memory than there is"
        print(json.dumps([name, json.loads(text) if text else lost]), flush=True)


def _cost(file: str, threads: int | None, library: Path | None) -> Cost:
    populate("/")
    settle()
    before = _status("VmRSS")
    session = OrtSession(file, threads, library, arena=False)
    feeds = {name: np.zeros(shape, dtype) for name, (dtype, shape) in session.inputs.items()}
    outputs = None
    for _ in range(RUNS):
        outputs = None  # the last ones are freed before the next are made
        outputs = session.run(feeds)
    highest = _status("VmHWM") - before
    del feeds, outputs
    settle()
    loaded = max(_status("VmRSS") - before, 0)
    return Cost(loaded, max(highest - loaded, 0))


def _status(name: str) -> int:
    """A figure of this process, in bytes."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(row[1]) for row in rows if row[0] == f"{name}:") * 1024


if __name__ == "__main__":
    _main()
