"""What each graph of a bundle takes on this machine: measured once, each in a process of its own.

ONNX Runtime does not tell beforehand what it allocates: weights in the layout that the processor likes, threads, the
activations of a run. So every graph is loaded and run in a fork of a process that has nothing else, and the kernel's
count of resident memory is read: afterwards, and its highest. The numbers hold for this version of ONNX Runtime, these
threads and these kernels, and are kept beside the kernels (`engines.plugins.store.folder`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    found = {name: cost for name, cost in _kept(kept).items() if name in graphs}
    wanted = {
        name: [str(bundle.file(graph.file)), threads, str(library) if library and graph.operators else None]
        for name, graph in graphs.items()
        if name not in found
    }
    if wanted:
        with _told(len(wanted)) as done:
            for name, cost in _measured(wanted):
                found[name] = cost
                _keep(kept, found)  # so that what is interrupted goes on from there
                done()
    return found


@contextmanager
def _told(total: int) -> Iterator[Callable[[], None]]:
    """Say on stderr what is done and when it is over, and count on a terminal -> to be called when one more is done."""
    what, began, count = f"the memory that each of {total} graphs takes", time.monotonic(), itertools.count(1)
    print(f"measuring {what}, once for this bundle: seconds, or minutes if it has GiB", file=sys.stderr, flush=True)

    def done() -> None:
        if sys.stderr.isatty():
            print(f"\r{next(count)}/{total} ", end="", file=sys.stderr, flush=True)

    try:
        yield done
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted: the same command goes on from the graphs that were measured") from None
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    print(f"measured {what}, in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _kept(file: Path) -> dict[str, Cost]:
    """What was measured before; what is damaged is not."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        found = {name: Cost(**cost) for name, cost in json.loads(file.read_bytes()).items()}
        if all(isinstance(each.loaded + each.running, int) for each in found.values()):
            return found
    return {}


def _keep(file: Path, found: dict[str, Cost]) -> None:
    """Write the file whole or not at all."""
    with suppress(OSError):  # then it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new.", dir=file.parent) as folder:
            new = Path(folder, "costs")
            new.write_text(json.dumps({name: asdict(cost) for name, cost in found.items()}))
            os.replace(new, file)


def _measured(wanted: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    """Each graph and what it takes, as soon as it is known."""
    missing = set(wanted)
    command = [sys.executable, "-P", "-m", "runtime.probe"]
    # In a session of its own: Ctrl-C is this process's to tell, which ends the child and its forks.
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **how) as child:
        assert child.stdin
        assert child.stdout
        try:
            with suppress(BrokenPipeError):  # it has ended, and is asked below how
                child.stdin.write(json.dumps(wanted))
                child.stdin.close()
            for line in child.stdout:
                name, cost = json.loads(line)
                if isinstance(cost, str):
                    raise UserError(f"the memory of graph {name} cannot be measured: {cost}")
                yield name, Cost(**cost)
                missing.remove(name)
        except BaseException:  # also whoever takes them has had enough
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if missing:
        raise UserError(f"measuring the graphs' memory broke off (exit code {child.returncode}): try again")


def _main() -> None:
    """Measure the graphs that stdin names, one fork each -> a JSON line each."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who asked is gone
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
