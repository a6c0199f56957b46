"""TensorRT plans: `trt-rtx` (TensorRT-RTX, builds without a GPU) and `trt` (TensorRT, builds on the device).

One code path: the two differ in the table `BACKENDS` only. Networks are strongly typed. The operators' nodes become
layers of the plugin library where one is given, else their functions are inlined by the parser. Whatever the parser or
the builder refuses is an error that names graph, node and operator: no graph falls back to something else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engines.backend import Status
from engines.bundle import Bundle, Plan
from engines.errors import UserError
from engines.trt_worker import gpu

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 3600.0  # seconds for one graph; a 2B-parameter prefill on a Jetson takes minutes
LAST_WORDS = 4  # lines of a dead worker that its error message repeats
LINE_WIDTH = 300  # and how much of each


@dataclass(frozen=True)
class Backend:
    """What differs between the two TensorRTs.

    Attributes:
        module: the Python package.
        title: its name in messages.
        install: how to get it.
        targets: compute capabilities that a plan is built for; empty: that of the GPU that is present.
        workers: processes that build side by side; one where kernels are timed on the GPU.
    """

    module: str
    title: str
    install: str
    targets: tuple[str, ...]
    workers: int


BACKENDS = {
    "trt-rtx": Backend(
        module="tensorrt_rtx",
        title="TensorRT-RTX",
        install="pip install tensorrt-rtx-cu13",
        # Ampere (datacenter, RTX; the nearest proxy of Orin's sm_87) and Ada. More targets do not make a plan larger.
        targets=("sm_80", "sm_86", "sm_89"),
        workers=2,
    ),
    "trt": Backend(
        module="tensorrt",
        title="TensorRT",
        install="on a Jetson it comes with JetPack (apt install nvidia-jetpack); elsewhere  pip install tensorrt",
        targets=(),
        workers=1,
    ),
}
AUTO, NAMES = "auto", ("ort", *BACKENDS)  # what a bundle can be opened with


@dataclass(frozen=True)
class FusedLayer:
    """A layer of the finished engine.

    Attributes:
        name, kind: as the builder calls it, for example `gemm`, `kgen` (generated pointwise kernel), `_gemm_mha_v2`.
        nodes: the ONNX nodes it computes.
    """

    name: str
    kind: str
    nodes: list[str]


@dataclass(frozen=True)
class Built:
    """One plan and the builder's report.

    Attributes:
        seconds, bytes: what it took, and the size of the plan (weights included).
        inputs, outputs: names of the network's tensors.
        layers: type of every layer of the parsed network, functions inlined.
        fused: layers of the engine.
    """

    plan: Plan
    seconds: float
    bytes: int
    inputs: list[str]
    outputs: list[str]
    layers: list[str]
    fused: list[FusedLayer]


def table(backend: str) -> Backend:
    """The backend's row.

    Raises:
        UserError: no TensorRT backend of that name.
    """
    if backend not in BACKENDS:
        raise UserError(f"{backend!r} is no TensorRT backend; known: {', '.join(BACKENDS)}")
    return BACKENDS[backend]


def version(backend: str) -> str:
    """Version of the installed package.

    Raises:
        UserError: it is missing or does not load, with how to get it.
    """
    row = table(backend)
    try:
        return importlib.import_module(row.module).__version__
    except (ImportError, OSError) as error:
        why = "not installed" if isinstance(error, ModuleNotFoundError) else f"installed but does not load ({error})"
        raise UserError(f"backend {backend} needs {row.title}, which is {why}: {row.install}") from error


def check(backend: str) -> list[str]:
    """Compute capabilities that plans would be built for here.

    Raises:
        UserError: no plan can be built here, and why; to be called before any long work.
    """
    version(backend)
    targets = list(table(backend).targets) or [device for device in [gpu()] if device]
    if not targets:
        raise UserError(f"backend {backend} builds for the GPU at hand, and there is none here: build on the device")
    return targets


def rebuild(backend: str, bundle: Bundle) -> str:
    return f"rebuild with  python -m engines plans {bundle.path} --backend {backend}"


def status(backend: str, bundle: Bundle) -> Status:
    """Whether this machine can run the bundle's plans: package, GPU, plans, and what the plans were built for."""
    try:
        return Status(backend, True, _check(backend, bundle))
    except UserError as error:
        return Status(backend, False, str(error))


def _check(backend: str, bundle: Bundle) -> str:
    title, device = table(backend).title, gpu()
    if device is None:
        raise UserError("no NVIDIA GPU here, and plans run on one only")
    plans = {plan.graph: plan for plan in bundle.manifest.plans if plan.backend == backend}
    if missing := [graph for graph in bundle.manifest.graphs if graph not in plans]:
        which = "no plans" if not plans else f"no plan of {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        raise UserError(f"the bundle has {which} for {backend}: {rebuild(backend, bundle)}")
    here = version(backend)  # last: it imports TensorRT
    for plan in plans.values():
        if plan.version != here or device not in plan.compute_capabilities:
            raise UserError(
                f"plans were built for {title} {plan.version} on {'/'.join(plan.compute_capabilities)}, "
                f"this machine has {here} on {device}: {rebuild(backend, bundle)}"
            )
    return f"{title} {here}, {len(plans)} plans for {device}"


def build_plans(
    backend: str,
    graphs: dict[str, Path],
    out_dir: Path,
    progress: Callable[[Built], None] = lambda built: None,
    *,
    plugins: Path | None = None,
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> list[Plan]:
    """Build a plan of every graph into `out_dir`: all of them, or none and an error.

    Args:
        graphs: name -> ONNX file; its external data lies beside it.
        progress: called once a graph, as it is finished, with the builder's report.
        plugins: library of the operators' plugins (engines/plugins/cuda_library.py); every node of an operator becomes
            its layer. None: the operators' bodies of standard operators are built.
        workers: processes side by side; default from the table.
        timeout: seconds for one graph.

    Returns:
        Plans in the order of `graphs`; their files are `GRAPH.BACKEND.plan`.

    Raises:
        UserError: TensorRT is missing, refuses a graph, dies or takes too long; graph, node and operator are named.
    """
    row, here, targets = table(backend), version(backend), check(backend)
    if plugins and not plugins.is_file():
        raise UserError(f"there is no plugin library {plugins}: build one with  python -m engines.plugins build")
    library = str(plugins.resolve()) if plugins else None
    count = max(1, min(workers or row.workers, len(graphs), os.cpu_count() or 1))
    jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for name in [*graphs, *[None] * count]:
        jobs.put(name)
    results: queue.SimpleQueue[Built | Exception] = queue.SimpleQueue()

    with tempfile.TemporaryDirectory(prefix=".plans.", dir=out_dir) as folder, _workers(backend, count) as pool:

        def work(worker: _Worker) -> None:
            try:
                while (graph := jobs.get()) is not None:
                    file = Path(folder, f"{graph}.{backend}.plan").resolve()
                    onnx = str(Path(graphs[graph]).resolve())
                    job = {"onnx": onnx, "plan": str(file), "targets": row.targets, "plugins": library}
                    answer = worker.ask(graph, job, timeout)
                    plan = Plan(graph, file.name, backend, here, targets, plugins=answer.pop("plugins"))
                    fused = [FusedLayer(**layer) for layer in answer.pop("fused")]
                    results.put(Built(plan, bytes=file.stat().st_size, fused=fused, **answer))
            except Exception as error:  # raised again in the caller's thread
                results.put(error)

        for worker in pool:
            threading.Thread(target=work, args=(worker,), daemon=True).start()
        plans = {}
        for _ in graphs:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            plans[result.plan.graph] = result.plan
            progress(result)
        for plan in plans.values():
            os.replace(Path(folder, plan.file), out_dir / plan.file)
    return [plans[graph] for graph in graphs]


@contextlib.contextmanager
def _workers(backend: str, count: int) -> Iterator[list[_Worker]]:
    """Worker processes that are gone when the block ends, however it ends."""
    pool: list[_Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        _link_libraries(f"{table(backend).module}_libs", Path(folder))
        try:
            for _ in range(count):
                pool.append(_Worker(backend, folder))
            yield pool
        finally:
            for worker in pool:
                worker.stop()


def _link_libraries(package: str, folder: Path) -> None:
    """Names without version numbers for the package's libraries.

    To find plugins, TensorRT-RTX's parser opens a library by such a name, which is not there, and ends the process.
    """
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations if spec else None) or []:
        for library in Path(place).glob("lib*.so.*"):
            (folder / f"{library.name.partition('.so')[0]}.so").symlink_to(library.resolve())


class _Worker:
    """One `engines.trt_worker` process; it builds many graphs, since starting it costs a second."""

    def __init__(self, backend: str, libraries: str) -> None:
        self.backend = backend
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        paths = {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": libraries}
        paths = {name: os.pathsep.join([p, *filter(None, [os.environ.get(name)])]) for name, p in paths.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engines.trt_worker", BACKENDS[backend].module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | paths,
            text=True,
        )

    def ask(self, graph: str, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Build one graph; the process is killed when it takes longer than `timeout` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(timeout, give_up)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before: readline tells
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise UserError(f"{self.backend}: graph {graph} took longer than {timeout:.0f} s to build")
        if not line:
            died = f"the builder died on graph {graph} ({self._exit()})"
            raise UserError(f"{self.backend}: {died}; its last words: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self.backend}: graph {graph}: {answer['error']}")
        return answer

    def _exit(self) -> str:
        code = self.process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(line[:LINE_WIDTH] for line in lines[-LAST_WORDS:]) or "none"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
