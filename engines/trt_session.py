"""A TensorRT or TensorRT-RTX plan behind the `Session` interface.

TensorRT takes one address a tensor and puts its kernels into our stream. A decode step is some hundred small kernels,
which the CPU takes longer to launch than the GPU to run; so decoding is captured as a CUDA graph. A graph is bound to
the addresses that it was captured with. Those of a state change when its outputs take the place of its inputs, and come
back when two blocks have taken turns, so a few graphs are kept, each by all its addresses. To copy the outputs over the
inputs instead would need one graph, and a copy a tensor in each step.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from engines import cuda, trt, trt_plugins
from engines.bundle import Bundle
from engines.cuda import CudaError, Device, Graph
from engines.cuda_session import CudaSession
from engines.errors import UserError, one_line
from engines.trt_worker import make_logger

GRAPHS = 16  # kept, and sets of addresses that are remembered


class TrtSession(CudaSession):
    """A plan, loaded."""

    def __init__(
        self,
        title: str,
        name: str,
        package: ModuleType,
        engine: Any,
        device: Device,
        wanted: Collection[str],
        captured: bool,
    ) -> None:
        """
        Args:
            name: of TensorRT, with its version.
            package: its Python package.
            captured: whether calls with addresses that came before are run as a CUDA graph.
        """
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        taken = {name for name in names if engine.get_tensor_mode(name) == package.TensorIOMode.INPUT}
        tensors = {
            name: (np.dtype(package.nptype(engine.get_tensor_dtype(name))), tuple(engine.get_tensor_shape(name)))
            for name in names
        }
        inputs = {name: tensor for name, tensor in tensors.items() if name in taken}
        super().__init__(title, device, inputs, {n: t for n, t in tensors.items() if n not in taken}, wanted)
        self._engine, self._context = engine, engine.create_execution_context()
        if self._context is None:
            raise UserError(f"{title}: the GPU's memory has no room to run it: choose a heavier level or fewer images")
        self._graphs: dict[tuple[int, ...], Graph | None] = {}  # None: these addresses came once
        self._captured, self._refused = captured, ""
        self._name = name

    @property
    def provider(self) -> str:  # type: ignore[override]
        if self._refused:
            return f"{self._name}, no CUDA graph ({self._refused})"
        return self._name + ", CUDA graph" * any(self._graphs.values())

    def execute(self, addresses: tuple[int, ...]) -> None:
        graph = self._graph(addresses) if self._captured else None
        if graph:
            graph.launch()
        else:
            self._enqueue(addresses, self._device.stream)

    def _graph(self, addresses: tuple[int, ...]) -> Graph | None:
        """The graph for these addresses; the first time there is none, as TensorRT must have run before a capture."""
        known = addresses in self._graphs
        graph = self._graphs.pop(addresses, None)
        if known and graph is None:
            try:
                graph = self._device.capture(functools.partial(self._enqueue, addresses))
            except CudaError as error:
                self._captured, self._refused = False, one_line(error)
        self._graphs[addresses] = graph  # the latest is the last
        if len(self._graphs) > GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _enqueue(self, addresses: tuple[int, ...], stream: int) -> None:
        for name, address in zip((*self.inputs, *self.outputs), addresses, strict=True):
            if not self._context.set_tensor_address(name, address):
                raise CudaError(f"{self.title}: TensorRT does not take the address of {name}")
        if not self._context.execute_async_v3(stream):
            raise CudaError(f"{self.title}: TensorRT could not run it")


def load(
    backend: str, bundle: Bundle, graph: str, wanted: Collection[str], library: Path | None, captured: bool = False
) -> TrtSession:
    """Load the plan of a graph; `engines.trt.status` has found that it is for this machine.

    Args:
        wanted: outputs that are brought to the host.
        library: of the plugins, if the plan has some.

    Raises:
        UserError: TensorRT refuses it, and what rebuilds it.
    """
    module, logger, service = _service(backend)
    built = next(plan for plan in bundle.manifest.plans if (plan.backend, plan.graph) == (backend, graph))
    if built.plugins:
        trt_plugins.load(module, logger, str(library))
    logger.errors.clear()
    file = bundle.file(built.file)
    try:
        plan = np.memmap(file, np.uint8, "r")  # on a Jetson a copy would take the GPU's memory
    except (OSError, ValueError) as error:  # a file without a byte
        raise UserError(f"{file} cannot be read: {one_line(error)}: {trt.rebuild(backend, bundle)}") from error
    engine = service.deserialize_cuda_engine(plan)
    if engine is None:
        why = "; ".join(logger.errors[:1]) or "it gave no reason"
        raise UserError(f"{file}: TensorRT does not load this plan: {why}: {trt.rebuild(backend, bundle)}")
    name = f"{trt.table(backend).title} {built.version}"
    return TrtSession(built.file, name, module, engine, cuda.device(), wanted, captured)


@functools.cache
def _service(backend: str) -> tuple[ModuleType, Any, Any]:
    """The package, its logger and its runtime, one a process."""
    module = importlib.import_module(trt.table(backend).module)
    logger = make_logger(module, module.ILogger.Severity.WARNING)
    return module, logger, module.Runtime(logger)
