"""ONNX Runtime behind the `Session` interface: CUDA when this machine has it, else CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines import cuda, external, products, releases
from engines.backend import Status, Tensors, check_feeds
from engines.cuda import Array, Device
from engines.cuda_session import CudaSession
from engines.errors import BackendError, UserError, one_line

NAME = "ort"
CUDA = "CUDAExecutionProvider"
PREFERRED = (CUDA, "CPUExecutionProvider")
# Passes that turn weights of float16 into float32 once and for all, in memory: twice their size.
WIDENING = ("ConstantFolding", "FuseFp16InitializerToFp32NodeTransformer")
MAX_THREADS = 256  # more is a mistake, and ONNX Runtime would start them all
BINDINGS = 16  # of one graph that are kept, each for its addresses
DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}


def _onnxruntime() -> Any:
    """Import onnxruntime on first use: it takes longer than all the rest of the runtime."""
    # Its telemetry writes a device id and a data base of events into the home directory of whoever uses a bundle.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"ONNX Runtime cannot be imported ({error}): pip install onnxruntime") from error
    releases.check("onnxruntime", onnxruntime.__version__)
    return onnxruntime


def providers() -> list[str]:
    """The providers a session here is opened with, best first."""
    available = _onnxruntime().get_available_providers()
    return [name for name in PREFERRED if name in available]


def device() -> Device | None:
    """The GPU, if tensors can stay on it between two calls, else None; `why_host` says why."""
    return None if why_host() else cuda.device()


def why_host() -> str:
    """Why tensors lie on the host between two calls; "" where they do not."""
    if providers()[0] != CUDA:
        return "no CUDA provider"
    try:
        cuda.device()
    except UserError as error:
        return str(error)
    return ""


def ort_status() -> Status:
    """Whether ONNX Runtime runs here, with its version and provider in the reason."""
    try:
        best = providers()[0]
        host = f", tensors pass through the host ({why_host()})" if best == CUDA and why_host() else ""
        return Status(NAME, True, f"onnxruntime {_onnxruntime().__version__}, {best}{host}")
    except UserError as error:
        return Status(NAME, False, str(error))


class OrtSession:
    """A static-shape ONNX graph, loaded.

    Attributes:
        provider: the provider that ONNX Runtime gave this session first.
        inputs, outputs: name -> (numpy dtype, shape), as the graph declares them.
    """

    def __init__(
        self,
        path: Path | str,
        threads: int | None = None,
        library: Path | None = None,
        stream: int | None = None,
        arena: bool = True,
        mapped: bool = False,
        few_rows: bool = False,
    ) -> None:
        """Load a graph; its external data is memory-mapped from the same folder.

        Args:
            path: the `.onnx` file.
            threads: threads inside an operator; None lets ONNX Runtime take every core.
            library: kernels of our operators (`engines/plugins/cpu_library.py`); without it their bodies run.
            stream: of CUDA, in whose order the graph is to run.
            arena: keep what a run has allocated for the next one.
            mapped: read float weights where they are mapped, once for all sessions, in every run. Else ONNX Runtime
                copies them, of each graph anew, into the order and type that its products take, and is quicker
                (`backends.load` tells by how much).
            few_rows: its products have so few (`products.few`) that our kernel multiplies by weights that are mapped.

        Raises:
            UserError: a file is missing, or ONNX Runtime refuses it.
        """
        ort = _onnxruntime()
        self.path = Path(path)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        # Every session has its own threads, and waiting by spinning they take the cores from each other and from the
        # rest of the machine (2 busy cores, demo prefill of 304 tokens: 303 ms spinning, 140 ms not, 143 ms on one).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = options.enable_mem_pattern = arena
        model: str | bytes = str(path)
        weights = _mapped(self.path) if mapped else {}
        self._weights = _shared(ort, options, weights)
        if mapped:
            options.add_session_config_entry("session.disable_prepacking", "1")
        if weights and few_rows and library is not None:
            matrices = [name for name, array in weights.items() if array.dtype == np.float32 and array.ndim == 2]
            model = products.exchange(self.path.read_bytes(), matrices)
            folder = str(self.path.parent.resolve())  # of all other weights, which the bytes alone do not tell
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        if threads is not None:
            options.intra_op_num_threads = threads
        if library is not None:
            try:
                options.register_custom_ops_library(str(library.resolve(strict=True)))
            except Exception as error:
                raise UserError(
                    f"{library}: ONNX Runtime {ort.__version__} cannot load the operators' kernels: {one_line(error)}: "
                    "compile your own (python -m engines.plugins build), or run without (--no-kernels)"
                ) from error
        try:
            settings = {CUDA: {"user_compute_stream": str(stream)}} if stream else {}
            chosen = [(name, settings[name]) if name in settings else name for name in providers()]
            halves = any(value.data_type() == "tensor(float16)" for value in self._weights)
            passes = WIDENING if halves else ()
            self._session = ort.InferenceSession(model, options, providers=chosen, disabled_optimizers=passes)
        except Exception as error:  # every failure to load is a class of its own, without a common base
            raise UserError(f"{path}: ONNX Runtime {ort.__version__} cannot load it: {one_line(error)}") from error
        self.provider: str = self._session.get_providers()[0]
        self.inputs = _declared(self._session.get_inputs())
        self.outputs = _declared(self._session.get_outputs())

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Run the graph once. Inputs are read where they lie; outputs are new arrays that the caller may write to.

        Raises:
            ValueError: an input is not as declared.
            BackendError: ONNX Runtime failed.
        """
        # A contiguous array is not copied, neither on the way in nor out (1.32: 64 MiB in, 14 us); wrapping every input
        # in an OrtValue copies as little and costs six times the overhead (60 inputs: 0.95 ms against 0.15 ms).
        contiguous = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        try:
            outputs = self._session.run(list(self.outputs), contiguous)
        except Exception as error:  # ONNX Runtime checks feeds itself, and a token takes no time for it a second time
            check_feeds(self.path.name, self.inputs, contiguous)
            raise _failed(self.path.name, error) from error
        return dict(zip(self.outputs, outputs, strict=True))


class OrtCudaSession(CudaSession):
    """A loaded graph on CUDA, its inputs and outputs bound where they lie."""

    device_type = "cuda"

    def __init__(self, opened: OrtSession, device: Device, wanted: Collection[str]) -> None:
        """
        Args:
            opened: with the device's stream.
            wanted: outputs that are brought to the host.
        """
        super().__init__(opened.path.name, device, opened.inputs, opened.outputs, wanted)
        self.provider, self._session = opened.provider, opened._session
        self._bound = functools.lru_cache(BINDINGS)(self._bind)

    def execute(self, addresses: tuple[int, ...]) -> None:
        try:
            self._session.run_with_iobinding(self._bound(addresses))
        except Exception as error:
            raise _failed(self.title, error) from error

    def _bind(self, addresses: tuple[int, ...]) -> Any:
        binding, places = self._session.io_binding(), iter(addresses)
        for bind, tensors in ((binding.bind_input, self.inputs), (binding.bind_output, self.outputs)):
            for name, (dtype, shape) in tensors.items():
                bind(name, self.device_type, 0, dtype.type, shape, next(places))
        return binding


def load(
    path: Path,
    threads: int | None,
    library: Path | None,
    wanted: Collection[str],
    arena: bool = True,
    mapped: bool = False,
    few_rows: bool = False,
) -> OrtSession | OrtCudaSession:
    """A graph whose tensors stay on the GPU, but for the outputs `wanted` on the host, where that can be; see above."""
    gpu, cpu = device(), providers()[0] != CUDA
    opened = OrtSession(path, threads, library, gpu.stream if gpu else None, arena, mapped and cpu, few_rows)
    return OrtCudaSession(opened, gpu, wanted) if gpu and opened.provider == CUDA else opened


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """Weights as they are mapped; where the file is wrong none, and ONNX Runtime says what is wrong with it."""
    try:
        return external.mapped(path)
    except (OSError, ValueError):
        return {}


def _shared(ort: Any, options: Any, weights: Mapping[str, np.ndarray]) -> list[Any]:
    """Give a session the weights as they are mapped -> what has to live as long as it does."""
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in weights.items()}  # nothing is copied
    for name, value in values.items():
        options.add_initializer(name, value)
    return [*values.values()]


def _failed(title: str, error: Exception) -> BackendError:
    return BackendError(f"{title}: ONNX Runtime failed while it ran: {one_line(error)}")


def _declared(tensors: list[Any]) -> Tensors:
    return {x.name: (np.dtype(DTYPES[x.type]), tuple(x.shape)) for x in tensors}
