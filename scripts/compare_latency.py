"""How fast a bundle runs here, on every backend that can run it, and whether their outputs agree.

    python scripts/compare_latency.py build/demo-vlm
    python scripts/compare_latency.py build/demo-vlm --level extreme --images 4 --runs 200 --json latency.json
    python scripts/compare_latency.py BUNDLE --image street.jpg --question "how many cars are there?"

The question is asked through the runtime once, and what each graph was given is kept: every backend is measured on the
tensors of a real request. A latency is one call of one graph, inputs and outputs in host memory. Outputs are compared
with polygraphy. A backend that cannot run here is listed with the reason and what to type.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import dataclasses
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import runtime
from demo_vlm.data import make_page
from engines import bundle as bundles
from engines import ort
from engines.backend import Session
from engines.bundle import Bundle
from engines.cuda import Array
from engines.errors import Parser, UserError, command
from figures import Figures, typed, versions
from plots import Panel
from reporting import json_option
from runtime import backends
from runtime.backends import NAMES, load
from runtime.generate import Stats

PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13", "polygraphy")
WARM_UP = 3  # calls that are not counted
TOKENS = 16  # decoded at least
SEED = 0  # of the drawn pages
QUESTION = "what is the number in row 1 column 1 ?"
# Largest difference that still counts as agreement, by kind of dtype. Rounding to int8 may fall on either side.
TOLERANCE = {"f": 1e-3, "i": 0.0, "int8": 1.0}

Feeds = dict[str, np.ndarray]
Call = Callable[[Feeds], Any]


@dataclass(frozen=True)
class Latency:
    """One graph on one backend, seconds a call."""

    backend: str
    provider: str
    graph: str
    kind: str
    median: float
    p95: float
    runs: int


@dataclass(frozen=True)
class Difference:
    """Outputs of one graph on two runners: the output that differs most beyond its tolerance, or most of all."""

    graph: str
    kind: str
    first: str
    second: str
    outputs: int
    worst: str
    difference: float
    agree: bool


@dataclass
class Recorder:
    """Keeps what every graph was given the last time it ran.

    Attributes:
        feeds: graph -> its inputs, in the order in which the graphs first ran.
        on: copying costs time, so it can be switched off.
    """

    feeds: dict[str, Feeds] = field(default_factory=dict)
    on: bool = True

    def load(self, bundle: Bundle, graph: str, *options: Any) -> Session:
        """Stands in for `runtime.backends.load`."""
        session = load(bundle, graph, *options)
        run = session.run

        def recording(feeds: Mapping[str, Array]) -> dict[str, Any]:
            if self.on:  # copied: the runtime writes new tokens into the same arrays
                self.feeds[graph] = {name: np.array(array) for name, array in feeds.items()}
            return run(feeds)

        session.run = recording  # type: ignore[method-assign]
        return session


def ask(arguments: argparse.Namespace) -> tuple[Bundle, dict[str, Feeds], Stats]:
    """Ask through the runtime: the feeds of every graph that ran, and the statistics of a second, unrecorded answer."""
    rng = np.random.default_rng(SEED)
    images: list[Any] = arguments.image or [make_page(rng)[0] for _ in range(arguments.images)]
    question = arguments.question or (f"in image 1 , {QUESTION}" if len(images) > 1 else QUESTION)
    recorder = Recorder()
    with patch.object(backends, "load", recorder.load):
        vlm = runtime.open(arguments.bundle, "ort", arguments.level, arguments.threads)
        buckets = vlm.bundle.manifest.levels[vlm.level].buckets
        # Enough tokens that the window is compacted once, wherever that can happen.
        tokens = max([TOKENS, *(bucket.window - bucket.recent + 2 for bucket in buckets if bucket.compact)])
        vlm.generate(question, images, max_new_tokens=tokens, ignore_eos=True)
        recorder.on = False
        stats = vlm.generate(question, images, max_new_tokens=tokens, ignore_eos=True).stats
    return vlm.bundle, recorder.feeds, stats


def measure(call: Call, feeds: Feeds, runs: int) -> tuple[float, float]:
    """Median and 95th percentile of a call, seconds."""
    for _ in range(WARM_UP):
        call(feeds)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call(feeds)
        times.append(time.perf_counter() - start)
    median, p95 = np.percentile(times, [50, 95])
    return float(median), float(p95)


def opened(backend: str, bundle: Bundle, graph: str, threads: int | None) -> tuple[Session, Call]:
    """One graph on one backend as the runtime runs it, and a call of it from the host and back."""
    session = load(bundle, graph, threads, backends.library(backend, bundle), backend)
    return session, lambda feeds: {name: np.asarray(array) for name, array in session.run(feeds).items()}


def providers(session: Session, bundle: Bundle, graph: str, feeds: Feeds) -> str:
    """What ran the graph's nodes: of ONNX Runtime only its profiler tells which of them fell back to the CPU."""
    described = bundle.manifest.graphs[graph]
    if session.provider == "CPUExecutionProvider":  # nothing to fall back to
        kernels = described.operators and backends.kernels(bundle)[0]
        return session.provider + ", kernels" * bool(kernels)
    if session.provider not in ort.PREFERRED:
        return session.provider
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "profile"))
        profiled = onnxruntime.InferenceSession(str(bundle.file(described.file)), options, providers=ort.providers())
        profiled.run(None, feeds)
        events = json.loads(Path(profiled.end_profiling()).read_text())
    nodes: dict[str, set[str]] = {}
    for event in events:
        if event.get("cat") == "Node" and "provider" in event.get("args", {}):
            nodes.setdefault(event["args"]["provider"], set()).add(event["name"])
    counts = sorted(((len(names), name) for name, names in nodes.items()), reverse=True)
    return ", ".join(f"{name} ({count} nodes)" for count, name in counts)


def plan_runner(backend: str, bundle: Bundle, graph: str) -> Any:
    """A polygraphy runner of the graph's plan, which the runtime runs."""
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    session, call = opened(backend, bundle, graph, None)

    class Runner(BaseRunner):
        def get_input_metadata_impl(self) -> TensorMetadata:
            metadata = TensorMetadata()
            for name, (dtype, shape) in session.inputs.items():
                metadata.add(name, dtype, shape)
            return metadata

        def infer_impl(self, feed_dict: Feeds) -> Feeds:
            start = time.perf_counter()
            outputs = call(feed_dict)
            self.inference_time = time.perf_counter() - start
            return outputs

    return Runner(name=backend)


def onnx_runner(name: str, path: Path, threads: int | None, optimize: bool, provider: Sequence[str]) -> Any:
    """A polygraphy runner of ONNX Runtime."""
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner

    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return OnnxrtRunner(lambda: onnxruntime.InferenceSession(str(path), options, providers=list(provider)), name=name)


def runners(bundle: Bundle, graph: str, names: Sequence[str], threads: int | None) -> list[Any]:
    """What is compared: ONNX Runtime as the runtime uses it, then its simplest form, then the plans."""
    path, cpu, best = bundle.file(bundle.manifest.graphs[graph].file), ["CPUExecutionProvider"], ort.providers()
    result = [onnx_runner(f"ort {best[0].removesuffix('ExecutionProvider')}", path, threads, True, best)]
    result.append(onnx_runner("ort CPU -O0", path, threads, False, cpu))
    return result + [plan_runner(name, bundle, graph) for name in names if name != "ort"]


def compare(bundle: Bundle, graph: str, feeds: Feeds, these: list[Any]) -> list[Difference]:
    """Run the graph on every runner and compare each with the first."""
    from polygraphy.comparator import Comparator, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    specs = bundle.manifest.graphs[graph]
    allowed = {
        spec.name: TOLERANCE["int8"] if spec.dtype == "int8" else TOLERANCE[np.dtype(spec.dtype).kind]
        for spec in specs.outputs
    }
    function = SimpleCompareFunc(atol=allowed, rtol=0.0, check_error_stat="max", infinities_compare_equal=True)
    # Empty slots have a bias of -inf, which polygraphy's averages (unused here) do not like.
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(all="ignore"):
        outputs = Comparator.run(these, data_loader=[feeds])
        pairs = [(0, other) for other in range(1, len(these))]
        (accuracy,) = Comparator.compare_accuracy(outputs, comparisons=pairs, compare_func=function)
    result = []
    for (first, second), (matches,) in accuracy.items():
        beyond = {name: match.max_absdiff - allowed[name] for name, match in matches.items()}
        worst = max(beyond, key=lambda name: (beyond[name] > 0, matches[name].max_absdiff))
        agree, largest = all(matches.values()), float(matches[worst].max_absdiff)
        result.append(Difference(graph, specs.kind, first, second, len(matches), worst, largest, agree))
    return result


def available(bundle: Bundle, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Backends that are measured, and for the others why not."""
    statuses = [backends.status(name, bundle) for name in NAMES]
    usable = [s.name for s in statuses if s.available and s.name in wanted]
    missing = {s.name: s.reason for s in statuses if not s.available}
    missing |= {s.name: "not asked for (--backend)" for s in statuses if s.available and s.name not in wanted}
    return usable, missing


def polygraphy() -> bool:
    return importlib.util.find_spec("polygraphy") is not None


def report(
    stats: Stats, latencies: list[Latency], differences: list[Difference], missing: dict[str, str]
) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Tables, and notes."""
    notes = [
        f"level {stats.level}: {stats.images} images, {stats.prompt_tokens} prompt tokens, {stats.visual_tokens} "
        f"visual tokens kept, bucket {stats.bucket}, {stats.compactions} compactions",
        f"KV: {stats.kv_bytes:,} bytes allocated; an fp16 cache of the same {stats.prompt_tokens} + "
        f"{stats.generated_tokens} tokens has {stats.kv_bytes_uncompressed:,} "
        f"({stats.kv_bytes / stats.kv_bytes_uncompressed:.0%})",
        f"decode loop of the runtime ({stats.provider}): {1e3 * per_token(stats):.2f} ms a token",
    ]
    tables = {"latency of a call": [["backend", "graph", "median ms", "p95 ms", "provider"]]}
    for row in latencies:
        times = [f"{1e3 * seconds:.3f}" for seconds in (row.median, row.p95)]
        tables["latency of a call"].append([row.backend, row.graph, *times, row.provider])
    if not any(row.kind == "compact" for row in latencies):
        notes.append("no compact graph ran: this level never compacts its window")
    if differences:
        table = tables[f"against {differences[0].first}"] = [["graph", "runner", "outputs", "worst", "by", "agree"]]
        for d in differences:
            verdict = "yes" if d.agree else "NO"
            table.append([d.graph, d.second, str(d.outputs), d.worst, f"{d.difference:.1e}", verdict])
        notes.append(
            f"agree: floats within {TOLERANCE['f']:g}, int8 rows within {TOLERANCE['int8']:g} step, integers equal"
        )
        if all(d.first.startswith("ort CPU") and d.second.startswith("ort CPU") for d in differences):
            told = "both are ONNX Runtime on the CPU: this checks its graph optimizer (off at -O0), not another backend"
            notes.append(told)
    elif not polygraphy():
        notes.append("outputs not compared: polygraphy is not installed (pip install polygraphy)")
    return tables, notes + [f"not measured: {name}: {reason}" for name, reason in missing.items()]


def per_token(stats: Stats) -> float:
    """Seconds a token of the runtime's decode loop, compactions spread over the tokens."""
    return (stats.seconds["decode"] + stats.seconds.get("compact", 0.0)) / max(stats.generated_tokens - 1, 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="folder that export/build.py wrote")
    parser.add_argument(
        "--level", help="compression level (default: the bundle's; `python -m runtime info` lists them)"
    )
    parser.add_argument("--runs", type=int, default=50, metavar="N", help="timed calls of every graph (default: 50)")
    parser.add_argument("--images", type=int, default=1, metavar="N", help="pages drawn for the prompt (default: 1)")
    parser.add_argument(
        "--image", action="append", metavar="FILE", help="your own image instead; repeat it for several"
    )
    parser.add_argument("--question", help=f"default: {QUESTION!r}")
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help=f"only this one: {', '.join(NAMES)}; repeat it"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: ONNX Runtime's choice)")
    json_option(parser)
    arguments = parser.parse_args(argv)
    for name in ("runs", "images", "threads"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")
    for name in arguments.backend or ():
        if name not in NAMES:
            raise UserError(f"unknown backend {name!r}: choose {', '.join(NAMES)}")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    bundle, feeds, stats = ask(arguments)
    usable, missing = available(bundle, arguments.backend or NAMES)
    latencies, differences = [], []
    for name in usable:
        for graph, inputs in feeds.items():
            session, call = opened(name, bundle, graph, arguments.threads)
            median, p95 = measure(call, inputs, arguments.runs)
            provider = providers(session, bundle, graph, inputs)
            kind = bundle.manifest.graphs[graph].kind
            latencies.append(Latency(name, provider, graph, kind, median, p95, arguments.runs))
    if polygraphy():
        for graph, inputs in feeds.items():
            differences += compare(bundle, graph, inputs, runners(bundle, graph, usable, arguments.threads))
    values = {
        "bundle_sha256": bundles.sha256(bundle.file(bundles.MANIFEST)),
        "threads": arguments.threads,
        "request": dataclasses.asdict(stats),
        "seconds_per_token": per_token(stats),
        "latency": [dataclasses.asdict(row) for row in latencies],
        "differences": [dataclasses.asdict(row) for row in differences],
        "not_measured": missing,
    }
    tables, notes = report(stats, latencies, differences, missing)
    lines = {f"{row.backend} {row.graph}": [[1e3 * row.median]] for row in latencies}
    told = tables, notes, values, [Panel("a call", "", "milliseconds", lines)], versions(PACKAGES)
    Figures(typed("compare_latency.py", argv), *told).report(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
