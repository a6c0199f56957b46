"""Stand-ins for a machine with a GPU: the CUDA runtime in host memory, and TensorRT and ONNX Runtime's CUDA on it.

What they catch: every copy and every tensor must lie within one allocation; new memory, and blocks that are used again,
hold nonsense first; a stream runs nothing before somebody waits for it, so that reading early, or using pinned memory
again too soon, gives nonsense too; a graph runs on the addresses that it was captured with.
"""

from __future__ import annotations

import ctypes
import enum
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from engines import cuda, ort, trt, trt_session

NONSENSE = 0xFF  # NaN in every float, -1 in every integer
PLAN = "a plan of "


class Error(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorStreamCaptureUnsupported = 900


class Kind(enum.IntEnum):
    cudaMemcpyDefault = 4


class Mode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


OK, INVALID = Error.cudaSuccess, Error.cudaErrorInvalidValue
Work = Callable[[], None]


class Cuda:
    """Those functions of cuda.bindings.runtime that we call; the same names, arguments and results.

    Attributes:
        allocations, launches: of cudaMalloc and cudaHostAlloc; of graphs.
        limit: bytes that can be allocated.
        failing: function -> error that it returns.
    """

    cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode = Error, Kind, Mode
    cudaStreamNonBlocking = 1

    def __init__(self) -> None:
        self.allocations = self.launches = 0
        self.limit = 1 << 30
        self.failing: dict[str, Error] = {}
        self.memory: dict[int, tuple[Any, int, bool]] = {}  # address: what keeps it, bytes, whether pinned
        self.streams: dict[int, list[Work]] = {}
        self.capturing: dict[int, list[Work]] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.last = OK

    # --- what tests ask ---

    def bytes_at(self, address: int, nbytes: int) -> Any:
        """The bytes, if they all lie within one allocation."""
        for start, (_, size, _) in self.memory.items():
            if start <= address and address + nbytes <= start + size:
                return (ctypes.c_char * nbytes).from_address(address)
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not within an allocation")

    def array(self, address: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(self.bytes_at(address, nbytes), dtype).reshape(shape)

    def add(self, stream: int, work: Work) -> None:
        """Put work into a stream, or into the graph that is captured from it."""
        assert stream in self.streams, "no such stream"
        (self.capturing[stream] if stream in self.capturing else self.streams[stream]).append(work)

    def run(self, stream: int) -> None:
        assert stream not in self.capturing, "a stream that is captured cannot be waited for"
        while self.streams[stream]:
            self.streams[stream].pop(0)()

    # --- the CUDA runtime ---

    def _fails(self, name: str) -> bool:
        self.last = self.failing.get(name, OK)
        return self.last != OK

    def _allocate(self, size: int, pinned: bool) -> tuple[Error, int | None]:
        used = sum(nbytes for _, nbytes, _ in self.memory.values())
        if used + size > self.limit:
            self.last = Error.cudaErrorMemoryAllocation
            return self.last, None
        assert size > 0
        block = ctypes.create_string_buffer(size + 512)
        address = (ctypes.addressof(block) + 255) // 256 * 256
        ctypes.memset(address, NONSENSE, size)
        self.memory[address] = block, size, pinned
        self.allocations += 1
        return OK, address

    def cudaMalloc(self, size: int) -> Any:
        return self._allocate(size, False)

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        assert flags == 0
        return self._allocate(size, True)

    def cudaFree(self, devPtr: int) -> Any:
        assert self.memory.pop(devPtr)[2] is False
        return (OK,)

    def cudaFreeHost(self, ptr: int) -> Any:
        assert self.memory.pop(ptr)[2] is True
        return (OK,)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        if self._fails("cudaStreamCreateWithFlags"):
            return self.last, None
        assert flags == self.cudaStreamNonBlocking
        stream = 1000 + len(self.streams)
        self.streams[stream] = []
        return OK, stream

    def cudaStreamSynchronize(self, stream: int) -> Any:
        self.run(stream)
        return (OK,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Kind, stream: int) -> Any:
        return self.cudaMemcpy2DAsync(dst, count, src, count, count, 1, kind, stream)

    def cudaMemcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: Kind, stream: int
    ) -> Any:
        assert kind is Kind.cudaMemcpyDefault
        if min(dpitch, spitch) < width or min(width, height) < 1:
            self.last = INVALID
            return (INVALID,)

        def work() -> None:
            for row in range(height):
                target = self.bytes_at(dst + row * dpitch, width)
                origin = self.bytes_at(src + row * spitch, width)
                ctypes.memmove(target, origin, width)

        for address, pitch in ((dst, dpitch), (src, spitch)):
            self.bytes_at(address, pitch * (height - 1) + width)
        self.add(stream, work)
        return (OK,)

    def cudaStreamBeginCapture(self, stream: int, mode: Mode) -> Any:
        assert mode is Mode.cudaStreamCaptureModeThreadLocal
        assert stream not in self.capturing
        self.capturing[stream] = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        works = self.capturing.pop(stream)
        if self._fails("cudaStreamEndCapture"):
            return self.last, None
        self.graphs[graph := 5000 + len(self.graphs)] = works
        return OK, graph

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        assert flags == 0
        self.graphs[executable := 9000 + len(self.graphs)] = self.graphs[graph]
        return OK, executable

    def cudaGraphDestroy(self, graph: int) -> Any:
        self.graphs[graph] = []
        return (OK,)

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> Any:
        self.launches += 1
        for work in self.graphs[graphExec]:
            self.add(stream, work)
        return (OK,)

    def cudaGraphExecDestroy(self, graphExec: int) -> Any:
        self.graphs[graphExec] = []
        return (OK,)

    def cudaGetErrorString(self, error: Error) -> Any:
        return OK, error.name.encode()

    def cudaGetLastError(self) -> Any:
        last, self.last = self.last, OK
        return (last,)


def nonsense_first(device: cuda.Device, standin: Cuda) -> None:
    """Let every block that is taken hold nonsense: on the GPU in the order of the stream, pinned ones at once."""
    take = device.take

    def taking(nbytes: int, pinned: bool = False) -> np.ndarray:
        block = take(nbytes, pinned)
        address = block.__array_interface__["data"][0]

        def fill() -> None:
            ctypes.memset(address, NONSENSE, len(block))

        if pinned:
            fill()
        else:
            standin.add(device.stream, fill)
        return block

    device.take = taking  # type: ignore[method-assign]


# --- TensorRT ---


class TensorIOMode(enum.Enum):
    INPUT, OUTPUT = 1, 2


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None: ...


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._addresses: dict[str, int] = {}

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0
        self._addresses[name] = memory
        return name in self._engine.tensors

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, addresses = self._engine, dict(self._addresses)
        assert addresses.keys() == engine.tensors.keys()
        if stream_handle in engine.standin.capturing and engine.refuses_capture:
            return False

        def work() -> None:
            arrays = {name: engine.standin.array(addresses[name], *engine.tensors[name]) for name in engine.tensors}
            outputs = engine.session.run(None, {name: arrays[name].copy() for name in engine.inputs})
            for name, output in zip(engine.outputs, outputs, strict=True):
                arrays[name][...] = output

        engine.standin.add(stream_handle, work)
        return True


class ICudaEngine:
    """Runs the ONNX graph that its "plan" names, in ONNX Runtime."""

    def __init__(self, file: str, standin: Cuda, refuses_capture: bool, no_context: bool) -> None:
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.inputs = [x.name for x in self.session.get_inputs()]
        self.outputs = [x.name for x in self.session.get_outputs()]
        both = (*self.session.get_inputs(), *self.session.get_outputs())
        self.tensors = {x.name: (np.dtype(ort.DTYPES[x.type]), tuple(x.shape)) for x in both}
        self.standin, self.refuses_capture, self.no_context = standin, refuses_capture, no_context
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return [*self.tensors][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> np.dtype:
        return self.tensors[name][0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][1]

    def create_execution_context(self) -> IExecutionContext | None:
        return None if self.no_context else IExecutionContext(self)


def tensorrt(standin: Cuda, refuses_capture: bool = False, no_context: bool = False) -> types.ModuleType:
    """A package `tensorrt` without a builder."""

    class Runtime:
        def __init__(self, logger: ILogger) -> None:
            self.logger: Any = logger

        def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
            text = bytes(memoryview(serialized_engine)).decode(errors="replace")
            if not text.startswith(PLAN):
                self.logger.log(ILogger.Severity.ERROR, "magicTag == kEXPECTED_MAGIC_TAG failed")
                return None
            return ICudaEngine(text.removeprefix(PLAN), standin, refuses_capture, no_context)

    module: Any = types.ModuleType("tensorrt")
    module.__version__ = "10.3.0"
    module.ILogger, module.TensorIOMode, module.Runtime = ILogger, TensorIOMode, Runtime
    module.nptype = lambda dtype: dtype.type
    return module


# --- ONNX Runtime with a CUDA provider ---


class OnnxRuntime:
    """The real one on the CPU, in the place of its CUDA: bound tensors are in host memory, and the stream is ours."""

    def __init__(self, standin: Cuda) -> None:
        self.SessionOptions, self.__version__ = onnxruntime.SessionOptions, onnxruntime.__version__
        self.standin = standin

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def InferenceSession(self, path: str, options: Any, providers: list[Any], **passes: Any) -> Any:
        (cuda_provider, settings), cpu = providers
        assert (cuda_provider, cpu) == ("CUDAExecutionProvider", "CPUExecutionProvider")
        stream, standin = int(settings["user_compute_stream"]), self.standin
        session = onnxruntime.InferenceSession(path, options, providers=[cpu], **passes)

        class Session:
            get_inputs, get_outputs, io_binding = session.get_inputs, session.get_outputs, session.io_binding

            @staticmethod
            def get_providers() -> list[str]:
                return ["CUDAExecutionProvider", "CPUExecutionProvider"]

            @staticmethod
            def run_with_iobinding(binding: Any) -> None:
                standin.run(stream)
                session.run_with_iobinding(binding)

        return Session


# --- the machine ---


def machine(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """This machine has a GPU, for the rest of the test."""
    standin = Cuda()
    monkeypatch.setattr(cuda, "_bindings", lambda: standin)
    device = cuda.Device()
    nonsense_first(device, standin)
    monkeypatch.setattr(cuda, "device", lambda: device)
    return standin


def with_tensorrt(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Cuda:
    """And TensorRT."""
    standin = machine(monkeypatch)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", tensorrt(standin, **options))
    monkeypatch.setattr(trt, "gpu", lambda: "sm_87")
    trt_session._service.cache_clear()
    return standin


def with_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """And ONNX Runtime's CUDA provider."""
    standin = machine(monkeypatch)
    monkeypatch.setattr(ort, "_onnxruntime", lambda: OnnxRuntime(standin))
    monkeypatch.setattr(ort.OrtCudaSession, "device_type", "cpu")
    return standin


def with_plans(bundle: Path, out: Path) -> Path:
    """A copy of a bundle with plans for this machine."""
    import dataclasses
    import shutil

    from engines import bundle as bundles
    from engines.bundle import Plan

    manifest = bundles.read(bundle).manifest
    shutil.copytree(bundle, out)
    plans = []
    for name, graph in manifest.graphs.items():
        plans.append(Plan(name, f"{name}.trt.plan", "trt", "10.3.0", ["sm_87"]))
        (out / plans[-1].file).write_text(f"{PLAN}{out / graph.file}")
    bundles.seal(out, dataclasses.replace(manifest, plans=plans))
    return out
