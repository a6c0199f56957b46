"""Which backend runs a bundle here, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines import cuda, ort, products, trt, trt_session
from engines.backend import Session, Status
from engines.bundle import Bundle, Graph, rebuild
from engines.cuda import Device
from engines.errors import UserError
from engines.manifest import WEIGHTS
from engines.plugins import store
from engines.trt import AUTO, NAMES

LARGE = 256 << 20  # bytes of weights that no cache holds: they come from memory in every step, however they lie there
MANY = 256  # rows for which copying the weights into the order of a product is little beside the product
PREFERRED = ("trt", "trt-rtx", "ort")  # by `auto`; asking for plans costs nothing where there is no GPU or none are


def status(name: str, bundle: Bundle) -> Status:
    """Whether one backend runs this bundle here, and the reason."""
    if name == "ort":
        found = ort.ort_status()
        return Status(name, True, f"{found.reason}; {kernels(bundle)[1]}") if found.available else found
    plans = trt.status(name, bundle)
    if not plans.available:
        return plans
    try:
        cuda.device()
        _plugins(name, bundle)
    except UserError as error:
        return Status(name, False, str(error))
    return plans


@dataclass(frozen=True)
class Choice:
    """The backend to use, and why it."""

    name: str
    reason: str


def choose(name: str, bundle: Bundle) -> Choice:
    """The backend to use: `name` itself, or the first that can run when it is `auto`.

    Raises:
        UserError: there is no such backend, or it cannot run here; the message says why.
    """
    if name not in (AUTO, *NAMES):
        raise UserError(f"unknown backend {name!r}: choose {', '.join((AUTO, *NAMES))}")
    refused: list[Status] = []
    for candidate in PREFERRED if name == AUTO else [name]:
        known = status(candidate, bundle)  # one after another: asking TensorRT imports it
        if known.available:
            others = [f"not {' nor '.join(names)}: {why}" for why, names in _by_reason(refused).items()]
            return Choice(candidate, "; ".join([known.reason, *others]))
        refused.append(known)
    said = [f"backend {' and '.join(names)} cannot run here: {why}" for why, names in _by_reason(refused).items()]
    raise UserError("; ".join(said))


def _by_reason(refused: list[Status]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for each in refused:
        names.setdefault(each.reason, []).append(each.name)
    return names


def kernels(bundle: Bundle) -> tuple[Path | None, str]:
    """The compiled kernels that run beside the bundle's ONNX graphs here, and why those, or why none."""
    if not any(graph.operators or _by_rows(bundle, graph) for graph in bundle.manifest.graphs.values()):
        return None, "no kernels are needed"
    if not (here := ort.ort_status()).available:
        return None, here.reason
    if (provider := ort.providers()[0]) != "CPUExecutionProvider":
        return None, f"no kernels for {provider}"
    return store.for_onnxruntime(bundle)


def library(name: str, bundle: Bundle) -> Path | None:
    """What a backend loads beside the bundle's graphs: kernels for ONNX Runtime, the plugins of plans."""
    return kernels(bundle)[0] if name == "ort" else _plugins(name, bundle)


def _plugins(name: str, bundle: Bundle) -> Path | None:
    if not any(plan.plugins for plan in bundle.manifest.plans if plan.backend == name):
        return None
    return store.for_tensorrt(bundle, trt.gpu() or "no GPU")


def device(name: str) -> Device | None:
    """Where a backend's tensors lie between two calls; None: on the host."""
    return ort.device() if name == "ort" else cuda.device()


def load(
    bundle: Bundle,
    graph: str,
    threads: int | None,
    library: Path | None = None,
    backend: str = "ort",
    arena: bool = True,
) -> Session:
    """Load one graph of the bundle, with what `library` found, and compare what it declares with the manifest."""
    described = bundle.manifest.graphs[graph]
    # The rest of what a graph returns is only ever given to another.
    wanted = {spec.name for spec in described.outputs if described.kind == "vision" or spec.name == "logits"}
    session: Session
    if backend == "ort":
        by_rows = arena and library is not None and _by_rows(bundle, described)
        own = library if described.operators or by_rows else None
        mapped = by_rows or (arena and _mapped(bundle, described))
        session = ort.load(bundle.file(described.file), threads, own, wanted, arena, mapped, by_rows)
    else:
        session = trt_session.load(backend, bundle, graph, wanted, library, captured=described.kind == "decode")
    for specs, declared in ((described.inputs, session.inputs), (described.outputs, session.outputs)):
        expected = {spec.name: (np.dtype(spec.dtype), tuple(spec.shape)) for spec in specs}
        for tensor in sorted(expected.keys() | declared.keys()):
            if expected.get(tensor) != declared.get(tensor):
                what = f"{described.file} as {backend} loads it: {tensor!r} is {declared.get(tensor)} in the graph"
                raise UserError(f"{what}, but {expected.get(tensor)} in the manifest: {rebuild(bundle.path)}")
    return session


def _large(bundle: Bundle) -> bool:
    manifest = bundle.manifest
    return manifest.weights.dtype == "float32" and manifest.files[WEIGHTS].bytes >= LARGE


def _by_rows(bundle: Bundle, graph: Graph) -> bool:
    """Whether our kernel, if there is one, multiplies by the weights where they are mapped."""
    return _large(bundle) and products.few(graph)


def _mapped(bundle: Bundle, graph: Graph) -> bool:
    """Whether ONNX Runtime reads the weights where they are mapped, once for all graphs, rather than a copy of its own.

    With products of SmolLM2-135M's shapes and one thread one row takes 2 % more time and 64 take 16 %; the more there
    are, the less it is of the whole. Of the demo's, which a cache holds, one row takes 22 % more. Codes of int8 and
    int4 have to be copied, and float16 turned into float32.
    """
    return _large(bundle) and (products.rows(graph) == 1 or products.rows(graph) >= MANY)
