"""The TensorRT plugins on the host: plugin_host.cpp from Python."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

from engines.plugins import cuda_library, host_library

# DataType and PluginFieldType of TensorRT.
TYPES = ["float32", "float16", "int8", "int32", "bool", "uint8", "float8", "bfloat16", "int64"]
FIELDS = {"float32": 1, "float64": 2, "int32": 5, "int64": 10}


class Tensor(Structure):
    _fields_ = (("type", c_int32), ("rank", c_int32), ("dims", c_int64 * 4), ("data", c_void_p))


class Field(Structure):
    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class Refused(Exception):
    """A plugin's complaint."""


class Plugins:
    """The plugins compiled into one library with plugin_host.cpp, kernels through simt.h.

    Raises:
        UserError: nvcc or TensorRT's headers are missing.
    """

    def __init__(self, folder: Path) -> None:
        nvcc, headers = cuda_library.find_nvcc(), cuda_library.find_headers()
        library = folder / "plugins.so"
        sources = [*host_library.kernels(), *cuda_library.plugins(), Path(__file__).with_suffix(".cpp")]
        # nvcc since it knows where CUDA's headers are; but as C++, so that everything runs on the host.
        command = [nvcc, "-shared", "-x", "c++", "-O1", "-std=c++17", "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror"]
        subprocess.run([*command, "-isystem", headers, *sources, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.unicache_complaint.restype = c_char_p

    def run(
        self, name: str, attributes: Mapping[str, np.generic], inputs: Sequence[np.ndarray], outputs: int
    ) -> list[np.ndarray]:
        """Make the plugin, store and load it, run it.

        Raises:
            Refused: at any step.
        """
        values = [np.array([value]) for value in attributes.values()]
        described = zip(attributes, values, strict=True)
        fields = [Field(key.encode(), value.ctypes.data, FIELDS[value.dtype.name], 1) for key, value in described]
        tensors = (Tensor * (len(inputs) + outputs))()
        for tensor, array in zip(tensors, inputs, strict=False):
            tensor.type, tensor.rank, tensor.data = TYPES.index(array.dtype.name), array.ndim, array.ctypes.data
            tensor.dims[: array.ndim] = array.shape
        arguments = (Field * len(fields))(*fields), len(fields), tensors, len(inputs), outputs
        self._call(name, *arguments, 0)
        results = []
        for tensor in tensors[len(inputs) :]:
            dtype = np.dtype(TYPES[tensor.type])
            results.append(np.full(tensor.dims[: tensor.rank], np.nan if dtype.kind == "f" else 77, dtype))
            tensor.data = results[-1].ctypes.data
        self._call(name, *arguments, 1)
        return results

    def _call(self, name: str, *arguments: object) -> None:
        step = self.library.run_plugin(name.encode(), *arguments)
        complaint = self.library.unicache_complaint().decode()
        if step:
            raise Refused(complaint or f"step {step} of plugin_host.cpp")
        assert complaint == ""
