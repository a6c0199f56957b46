"""What `runtime.triton` uses of `triton_python_backend_utils`, which exists only inside NVIDIA Triton."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class TritonModelException(Exception):
    pass


class TritonError:
    INTERNAL, INVALID_ARG = 1, 3

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self._array = name, array

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.as_numpy() for tensor in output_tensors or []}
        self.error = error


class Sender:
    """Keeps what is sent, and takes nothing after the final flag."""

    def __init__(self, cancelled_after: int) -> None:
        self.sent: list[InferenceResponse] = []
        self.ended, self._cancelled_after = False, cancelled_after

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self.ended
        self.sent.append(response)
        self.ended = flags == 1

    def is_cancelled(self) -> bool:
        return len(self.sent) >= self._cancelled_after


class Request:
    def __init__(self, inputs: dict[str, np.ndarray], cancelled_after: int = 10**9) -> None:
        self.inputs, self.sender = inputs, Sender(cancelled_after)

    def get_response_sender(self) -> Sender:
        return self.sender


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.inputs[name]) if name in request.inputs else None


def module() -> ModuleType:
    made: Any = ModuleType("triton_python_backend_utils")
    for each in (TritonModelException, TritonError, Tensor, InferenceResponse, get_input_tensor_by_name):
        setattr(made, each.__name__, each)
    made.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    return made
