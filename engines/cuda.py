"""GPU memory for what a request's state holds: arrays that are cut and written like numpy's, in blocks used again.

All work is in the order of one stream, and the host waits for it where it reads what came of it. So a block that
nothing refers to may be used again at once: whatever still reads it comes first. What goes to the GPU or comes from it
passes through pinned memory, whose blocks are kept until the stream was waited for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.errors import BackendError, UserError, one_line

ALIGNMENT = 256  # of a tensor in its block, bytes: as cudaMalloc aligns
MIB = 2**20


class CudaError(BackendError):
    """A call of the CUDA runtime that failed."""


class Block:
    """Memory that goes back to the free list when the last array that lies in it is gone."""

    def __init__(self, address: int, nbytes: int, free: list[int]) -> None:
        self._address, self._free = address, free
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._free.append(self._address)


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in one block.

    Attributes:
        places: name -> dtype, shape and first byte.
    """

    places: dict[str, tuple[np.dtype, tuple[int, ...], int]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> Layout:
        places, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            places[name] = dtype, shape, end
            end += -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(places, max(end, ALIGNMENT))

    def cut(self, block: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.ndarray(shape, dtype, block, start) for name, (dtype, shape, start) in self.places.items()}


class DeviceArray:
    """An array in GPU memory, as far as a state needs one: basic slices, assignment to them, and a copy to the host.

    `_at` is a numpy array at the GPU's addresses. numpy computes dtype, shape and strides of its slices, keeps their
    block alive, and never reads an element.
    """

    __slots__ = ("_at", "_device", "address")

    def __init__(self, device: Device, at: np.ndarray) -> None:
        self._device, self._at = device, at
        self.address = _address(at)  # asked for in each call of a graph

    @property
    def dtype(self) -> np.dtype:
        return self._at.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._at.shape

    @property
    def nbytes(self) -> int:
        return self._at.nbytes

    @property
    def ready(self) -> bool:
        """Whether a graph takes it where it lies: without gaps, and aligned, which a row of a batch may not be."""
        return self._at.flags.c_contiguous and self.address % ALIGNMENT == 0

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self._device, self._at[_basic(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write another array of this shape, or what the host has, which is broadcast and cast as numpy does."""
        at = self._at[_basic(key)]
        if isinstance(value, DeviceArray):
            self._device.move(at, value._at)
        else:
            self._device.write(at, value)

    def copy(self) -> DeviceArray:
        twin = DeviceArray(self._device, np.ndarray(self.shape, self.dtype, self._device.take(self.nbytes)))
        twin[...] = self
        return twin

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array in GPU memory must be copied to be read")
        array = self._device.fetch({"": self})[""]
        return array if dtype is None else array.astype(dtype, copy=False)


Array = np.ndarray | DeviceArray


class Device:
    """The first GPU.

    Attributes:
        stream: its handle, in whose order everything runs.
    """

    def __init__(self) -> None:
        self._cuda = _bindings()
        self.stream = self._stream()
        self._capturing = self._stream()  # nothing is ever run in it: other threads' work stays out of a graph
        self._free: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        # Pinned memory that the stream may still use; added after the copy: who waits before has not waited for it.
        self._moving: list[np.ndarray] = []

    def _stream(self) -> int:
        return int(self.call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the CUDA runtime -> its result.

        Raises:
            CudaError: it failed.
        """
        error, *results = getattr(self._cuda, name)(*arguments)
        if int(error) != 0:
            why = self._cuda.cudaGetErrorString(error)[1].decode()
            self._cuda.cudaGetLastError()  # else whoever asks next takes it for his own
            raise CudaError(f"{name}: {why}")
        return results[0] if results else None

    def take(self, nbytes: int, pinned: bool = False) -> np.ndarray:
        """A block, as bytes: a used one of this size, or a new one.

        Args:
            pinned: in the host's memory, for copies to and from the GPU; else in the GPU's.
        """
        nbytes = max(nbytes, 1)
        free = self._free[nbytes, pinned]
        try:
            address = free.pop()
        except IndexError:
            address = self._allocate(nbytes, pinned)
        return np.asarray(Block(address, nbytes, free))

    def _allocate(self, nbytes: int, pinned: bool) -> int:
        function, *flags = ("cudaHostAlloc", 0) if pinned else ("cudaMalloc",)
        try:
            return int(self.call(function, nbytes, *flags))
        except CudaError:
            self.trim()
        try:
            return int(self.call(function, nbytes, *flags))
        except CudaError as error:
            advice = "choose a heavier level or fewer images, or end what else uses it"
            raise UserError(f"the GPU's memory has no room for {nbytes / MIB:,.1f} MiB ({error}): {advice}") from error

    def trim(self) -> None:
        """Give back the blocks that wait for being used again."""
        self.wait()
        for (_, pinned), free in list(self._free.items()):
            with contextlib.suppress(IndexError):
                while True:
                    self.call("cudaFreeHost" if pinned else "cudaFree", free.pop())

    def empty(self, layout: Layout) -> dict[str, DeviceArray]:
        """Arrays side by side in a block of theirs, whose content is anything."""
        return {name: DeviceArray(self, at) for name, at in layout.cut(self.take(layout.nbytes)).items()}

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, DeviceArray]:
        """The host's arrays, on the GPU."""
        if not arrays:
            return {}
        layout = Layout.of({name: (array.dtype, array.shape) for name, array in arrays.items()})
        block, stage = self.take(layout.nbytes), self.take(layout.nbytes, pinned=True)
        for name, at in layout.cut(stage).items():
            at[...] = arrays[name]
        self.move(block, stage)
        self._moving.append(stage)
        return {name: DeviceArray(self, at) for name, at in layout.cut(block).items()}

    def place(self, arrays: Mapping[str, np.ndarray]) -> dict[str, DeviceArray]:
        """As `send`, each in a block of its own, through no more pinned memory than the largest take."""
        placed: dict[str, DeviceArray] = {}
        for name, array in arrays.items():
            placed |= self.send({name: array})
            self.wait()
        return placed

    def write(self, to: np.ndarray, value: Any) -> None:
        """Copy what the host has to a place on the GPU."""
        stage = np.ndarray(to.shape, to.dtype, self.take(to.nbytes, pinned=True))
        stage[...] = value
        self.move(to, stage)
        self._moving.append(stage)

    def fetch(self, arrays: Mapping[str, DeviceArray]) -> dict[str, np.ndarray]:
        """The GPU's arrays, on the host, once all that was asked for before is done."""
        layout = Layout.of({name: (array.dtype, array.shape) for name, array in arrays.items()})
        stage = self.take(layout.nbytes, pinned=True)
        found = layout.cut(stage)
        for name, array in arrays.items():
            self.move(found[name], array._at)
        self._moving.append(stage)
        self.wait()
        return found

    def wait(self) -> None:
        """Until all that was asked for is done."""
        moved, self._moving = self._moving, []  # another thread may add to it meanwhile
        self.call("cudaStreamSynchronize", self.stream)
        del moved

    def move(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy, in the order of the stream, between arrays of one dtype and shape, on the GPU or pinned."""
        if (to.dtype, to.shape) != (source.dtype, source.shape):
            raise ValueError(f"{source.dtype} {list(source.shape)} cannot be written to {to.dtype} {list(to.shape)}")
        if to.size == 0:
            return
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault  # by the addresses
        width, (height, pitch, source_pitch), outer = rectangles(to, source)
        for index in itertools.product(*(range(count) for count, _, _ in outer)):
            target = _address(to) + sum(i * stride for i, (_, stride, _) in zip(index, outer, strict=True))
            origin = _address(source) + sum(i * stride for i, (_, _, stride) in zip(index, outer, strict=True))
            if height == 1:
                self.call("cudaMemcpyAsync", target, origin, width, kind, self.stream)
            else:
                pitches = target, pitch, origin, source_pitch
                self.call("cudaMemcpy2DAsync", *pitches, width, height, kind, self.stream)

    def capture(self, enqueue: Callable[[int], None]) -> Graph:
        """A CUDA graph of what `enqueue` puts into the stream that it is given; nothing of it runs yet.

        Raises:
            CudaError: something of it cannot be captured.
        """
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self._capturing, mode)
        try:
            enqueue(self._capturing)
        except BaseException:
            with contextlib.suppress(CudaError):  # it was told already
                self.call("cudaGraphDestroy", self.call("cudaStreamEndCapture", self._capturing))
            raise
        captured = self.call("cudaStreamEndCapture", self._capturing)
        try:
            return Graph(self, self.call("cudaGraphInstantiate", captured, 0))
        finally:
            self.call("cudaGraphDestroy", captured)


class Graph:
    """A captured CUDA graph, ready to run: on the addresses that it was captured with."""

    def __init__(self, device: Device, executable: Any) -> None:
        self._device, self._executable = device, executable

    def launch(self) -> None:
        self._device.call("cudaGraphLaunch", self._executable, self._device.stream)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the process may be ending
            self._device.call("cudaGraphExecDestroy", self._executable)


@functools.cache
def device() -> Device:
    """The GPU, the same for everybody in this process.

    Raises:
        UserError: CUDA's Python package is missing, or does not fit the driver.
    """
    try:
        return Device()
    except CudaError as error:
        advice = "install the cuda-bindings whose major version is that of the driver's CUDA (nvidia-smi shows it)"
        raise UserError(f"CUDA does not start here ({one_line(error)}): {advice}") from error


def _bindings() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        advice = 'pip install "cuda-bindings==13.*" (for CUDA 12: "cuda-bindings==12.*")'
        raise UserError(f"CUDA's Python package cannot be imported ({one_line(error)}): {advice}") from error
    return runtime


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _basic(key: Any) -> tuple[Any, ...]:
    """An index by whole numbers, slices without a step and an ellipsis: it is a part of the array, and never a number.

    Raises:
        TypeError: it is another one.
    """
    keys = key if isinstance(key, tuple) else (key,)
    for each in keys:
        plain = each is Ellipsis or (isinstance(each, int | np.integer) and not isinstance(each, bool))
        if not plain and not (isinstance(each, slice) and each.step in (None, 1)):
            raise TypeError(f"an array in GPU memory is cut by numbers and slices without a step, not by {each!r}")
    return keys if Ellipsis in keys else (*keys, ...)


def rectangles(to: np.ndarray, source: np.ndarray) -> tuple[int, tuple[int, int, int], list[tuple[int, int, int]]]:
    """How to copy between two arrays of one shape: rows of bytes, so many of them, and so often.

    Returns:
        The bytes of a row; the number of rows, and how far apart they are in both; the same of each axis around them.
    """
    width = to.itemsize
    axes: list[tuple[int, int, int]] = []
    for count, stride, other in zip(to.shape[::-1], to.strides[::-1], source.strides[::-1], strict=True):
        if count == 1:
            continue
        if not axes and stride == other == width:  # it lies without gaps in both
            width *= count
        elif axes and (stride, other) == (
            axes[-1][0] * axes[-1][1],
            axes[-1][0] * axes[-1][2],
        ):  # it goes on where the last ended
            axes[-1] = (count * axes[-1][0], *axes[-1][1:])
        else:
            axes.append((count, stride, other))
    rows, *outer = axes or [(1, width, width)]
    return width, rows, outer
