"""That the stand-in for TensorRT (cuda_standin.py) has the names and arguments of the real ones.

TensorRT-RTX and TensorRT's lean runtime 11.4 are asked themselves. JetPack 6.2's 10.3 has the same: its names are those
of the guide "Migrating Python Code from TensorRT 8.x to 10.x" (docs.nvidia.com/deeplearning/tensorrt).
"""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType

import numpy as np
import pytest

from engines import trt, trt_session
from tests.engines import cuda_standin


@pytest.fixture(params=["tensorrt_rtx", "tensorrt_lean_bindings", "tensorrt"])
def real(request: pytest.FixtureRequest) -> ModuleType:
    return pytest.importorskip(request.param, reason=f"{request.param} is not installed")


@pytest.mark.parametrize("name", ["ICudaEngine", "IExecutionContext"])
def test_the_real_classes_have_what_the_stand_ins_have(name: str, real: ModuleType) -> None:
    methods = {
        key: f for key, f in vars(getattr(cuda_standin, name)).items() if inspect.isfunction(f) and key[0] != "_"
    }
    assert len(methods) >= 2
    for method, function in methods.items():
        documented = getattr(getattr(real, name), method).__doc__
        arguments = [*inspect.signature(function).parameters][1:]
        assert re.search(
            rf"{method}\(self[^)]*" + "".join(rf"\b{argument}: [^)]*" for argument in arguments), documented
        )
    if name == "ICudaEngine":
        assert hasattr(real.ICudaEngine, "num_io_tensors")


def test_the_rest_that_is_called_is_there(real: ModuleType) -> None:
    assert "serialized_engine: " in real.Runtime.deserialize_cuda_engine.__doc__
    assert real.TensorIOMode.INPUT != real.TensorIOMode.OUTPUT
    assert real.ILogger.Severity.ERROR.value < real.ILogger.Severity.WARNING.value < real.ILogger.Severity.INFO.value
    for name, dtype in {"FLOAT": "f4", "HALF": "f2", "INT8": "i1", "INT32": "i4", "INT64": "i8", "BOOL": "?"}.items():
        assert np.dtype(real.nptype(getattr(real.DataType, name))) == np.dtype(dtype)


@pytest.mark.parametrize("backend", trt.BACKENDS)
def test_the_real_one_refuses_what_is_no_plan(backend: str, tmp_path) -> None:
    """As far as it goes without a GPU: a runtime of its own opens, and says no to bytes of a file that is mapped."""
    try:
        importlib.import_module(trt.table(backend).module)
    except ImportError as error:
        pytest.skip(str(error))
    (tmp_path / "some.plan").write_bytes(b"no plan" * 100)
    trt_session._service.cache_clear()
    _, logger, service = trt_session._service(backend)
    assert service.deserialize_cuda_engine(np.memmap(tmp_path / "some.plan", np.uint8, "r")) is None
    assert "incompatible serialization version" in logger.errors[0]
    trt_session._service.cache_clear()
