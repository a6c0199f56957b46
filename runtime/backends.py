"""Which backend runs a bundle here, and why the others do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engines import trt
from engines.backend import Status
from engines.bundle import REBUILD, Bundle
from engines.errors import UserError
from engines.ort import OrtSession, ort_status, providers
from engines.plugins import store

AUTO = "auto"
NAMES = ("ort", *trt.BACKENDS)


def status(name: str, bundle: Bundle) -> Status:
    """Whether one backend runs this bundle here, and the reason."""
    if name == "ort":
        found = ort_status()
        return Status(name, True, f"{found.reason}; {kernels(bundle)[1]}") if found.available else found
    plans = trt.status(name, bundle)
    if plans.available:
        reason = f"{plans.reason}, but this runtime does not run plans yet: use --backend ort"
        return Status(name, False, reason)
    return plans


def choose(name: str, bundle: Bundle) -> str:
    """The backend to use: `name` itself, or the first that can run when it is `auto`.

    Raises:
        UserError: there is no such backend, or it cannot run here; the message says why.
    """
    if name not in (AUTO, *NAMES):
        raise UserError(f"unknown backend {name!r}: choose {', '.join((AUTO, *NAMES))}")
    refused = []
    for candidate in NAMES if name == AUTO else [name]:
        known = status(candidate, bundle)  # one after another: asking TensorRT imports it
        if known.available:
            return candidate
        refused.append(f"backend {candidate} cannot run here: {known.reason}")
    raise UserError("; ".join(refused))


def kernels(bundle: Bundle) -> tuple[Path | None, str]:
    """The compiled kernels that run beside the bundle's graphs here, and why those, or why none."""
    if not any(graph.operators for graph in bundle.manifest.graphs.values()):
        return None, "no kernels are needed"
    if (provider := providers()[0]) != "CPUExecutionProvider":
        return None, f"no kernels for {provider}"
    return store.for_onnxruntime(bundle)


def load(bundle: Bundle, graph: str, threads: int | None, library: Path | None = None) -> OrtSession:
    """Load one graph of the bundle, with these kernels, and compare what it declares with the manifest."""
    described = bundle.manifest.graphs[graph]
    session = OrtSession(bundle.file(described.file), threads, library if described.operators else None)
    for specs, declared in ((described.inputs, session.inputs), (described.outputs, session.outputs)):
        expected = {spec.name: (np.dtype(spec.dtype), tuple(spec.shape)) for spec in specs}
        for name in sorted(expected.keys() | declared.keys()):
            if expected.get(name) != declared.get(name):
                raise UserError(
                    f"{session.path}: {name!r} is {declared.get(name)} in the graph, but {expected.get(name)} in the "
                    f"manifest: {REBUILD} --out {bundle.path}"
                )
    return session
