"""A loaded graph whose inputs and outputs lie in GPU memory, whoever runs it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from engines.backend import Tensors, check_feeds
from engines.cuda import Array, Device, DeviceArray, Layout


class CudaSession(ABC):
    """Behind the `Session` interface. A call like the one before it allocates nothing, and uses the same addresses.

    The outputs of a call lie in one block, which is used again when none of them is needed any more: a state that keeps
    some of them until the next call makes two blocks take turns.

    Attributes:
        inputs, outputs: name -> (numpy dtype, shape).
    """

    provider: str

    def __init__(self, title: str, device: Device, inputs: Tensors, outputs: Tensors, wanted: Collection[str]) -> None:
        """
        Args:
            title: of the graph, in messages.
            wanted: outputs that are brought to the host.
        """
        self.title, self.inputs, self.outputs = title, inputs, outputs
        self._device, self._layout = device, Layout.of(outputs)
        self._wanted = [name for name in outputs if name in wanted]
        self._lock = threading.Lock()  # who runs a graph has one set of addresses

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Run the graph once; what lies on the host is sent to the GPU first. The outputs are the caller's."""
        check_feeds(self.title, self.inputs, feeds)
        device = self._device
        there = device.send({name: array for name, array in feeds.items() if isinstance(array, np.ndarray)})
        for name, array in feeds.items():
            if isinstance(array, DeviceArray):
                there[name] = array if array.ready else array.copy()
        outputs = device.empty(self._layout)
        with self._lock:
            self.execute((*(there[name].address for name in self.inputs), *(x.address for x in outputs.values())))
        return {**outputs, **device.fetch({name: outputs[name] for name in self._wanted})}

    @abstractmethod
    def execute(self, addresses: tuple[int, ...]) -> None:
        """Put the graph's work into the device's stream.

        Args:
            addresses: of the inputs and the outputs, in the order of `inputs` and `outputs`.
        """
