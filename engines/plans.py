"""Build a bundle's plans on the machine that will run them: from the bundle alone, without checkpoint or PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from engines import bundle as bundles
from engines import trt
from engines.bundle import Bundle, Plan
from engines.errors import UserError
from engines.plugins import store
from engines.trt import Built


def describe(plans: list[Plan]) -> str:
    """One backend's plans, as the manifest tells of them."""
    layers = sum(sum(plan.plugins.values()) for plan in plans)
    return (
        f"{len(plans)} plans by version {plans[0].version} for {', '.join(plans[0].compute_capabilities)}, {layers} "
        "operators as plugin layers; not run at build time"
    )


def plugins(bundle: Bundle, backend: str) -> Path | None:
    """The library whose layers the plans will have; None where the graphs have no operators.

    Raises:
        UserError: there is none for this machine, and where to get it.
    """
    if not any(graph.operators for graph in bundle.manifest.graphs.values()):
        return None
    return store.for_tensorrt(bundle, trt.gpu() or trt.check(backend)[0])


def build(bundle: Bundle, backend: str, library: Path | None, progress: Callable[[Built], None]) -> str:
    """Put new plans of all graphs into the bundle, in the place of those of this backend; the rest stays.

    Returns:
        What was built.

    Raises:
        UserError: TensorRT is missing, or refuses a graph; the bundle is as it was.
    """
    trt.check(backend)
    manifest = bundle.manifest
    others = [plan for plan in manifest.plans if plan.backend != backend]
    old = {plan.file for plan in manifest.plans} - {plan.file for plan in others}
    with bundles.writing(bundle.path) as folder:
        for name in manifest.files.keys() - old:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link(bundle.file(name).resolve(), folder / name)
        graphs = {name: folder / graph.file for name, graph in manifest.graphs.items()}
        plans = trt.build_plans(backend, graphs, folder, progress, plugins=library)
        notes = {**manifest.backends, backend: describe(plans)}
        bundles.seal(folder, dataclasses.replace(manifest, plans=[*others, *plans], backends=notes))
    return notes[backend]


def _link(source: Path, target: Path) -> None:
    """The same file where the disk allows it: weights are large. Nobody writes into a bundle's files."""
    with contextlib.suppress(OSError):
        return os.link(source, target)
    shutil.copyfile(source, target)


def command(path: Path, backend: str, bodies: bool) -> None:
    """`python -m engines plans`."""
    bundle = bundles.read(path)
    trt.check(backend)
    library = None
    if not bodies:
        try:
            library = plugins(bundle, backend)
        except UserError as error:
            raise UserError(f"{error}; or build the operators' bodies, which are slower, with  --bodies") from error
    total, done = len(bundle.manifest.graphs), 0

    def built(plan: Built) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{total}] {plan.plan.graph}: {plan.bytes / 2**20:,.1f} MiB, {plan.seconds:.0f} s", flush=True)

    print(f"{path}: {build(bundle, backend, library, built)}")
