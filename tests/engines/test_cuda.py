"""Arrays in GPU memory, on a stand-in for the CUDA runtime: what numpy does, and no byte beside it."""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import cuda
from engines.cuda import CudaError, Device, DeviceArray
from engines.errors import UserError
from engines.trt_worker import gpu
from tests.engines import cuda_standin
from tests.engines.cuda_standin import Cuda

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return cuda_standin.machine(monkeypatch)


def there(array: np.ndarray) -> DeviceArray:
    return cuda.device().send({"it": array})["it"]


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple]:
    """A shape, and basic slices of it, numbers among them."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    key: list = []
    for count in shape[: draw(st.integers(0, len(shape)))]:
        if draw(st.booleans()):
            first = draw(st.integers(-count, count))
            key.append(slice(first, draw(st.integers(first, count)) if draw(st.booleans()) else None))
        else:
            key.append(draw(st.integers(-count, count - 1)))
    if draw(st.booleans()):
        key.append(...)
    return shape, tuple(key)


DTYPES = st.sampled_from([np.float32, np.float16, np.int8, np.int32, np.int64])


@settings(max_examples=300, deadline=None)
@given(parts(), DTYPES, st.sampled_from(["view", "host", "number", "device", "strided"]))
def test_slices_and_writes_are_numpys(part: tuple, dtype: type, what: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda_standin.machine(monkeypatch)
        shape, key = part
        mirror = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
        array = there(mirror)
        cut = mirror[(*key, ...)] if ... not in key else mirror[key]
        if what == "view":
            np.testing.assert_array_equal(np.asarray(array[key]), cut)
            assert (array[key].shape, array[key].nbytes, array[key].dtype) == (cut.shape, cut.nbytes, cut.dtype)
            return
        new = np.random.default_rng(1).integers(-100, 100, cut.shape).astype(dtype)
        if what == "host":
            array[key] = new
        elif what == "number":
            new = np.full_like(new, 7)
            array[key] = 7
        elif what == "device":
            array[key] = there(new)
        else:  # what is written lies apart too
            wide = np.zeros((*new.shape[:-1], new.shape[-1] + 3), dtype) if new.ndim else np.zeros(3, dtype)
            place = (..., slice(2, 2 + new.shape[-1])) if new.ndim else 1
            wide[place] = new
            array[key] = there(wide)[place]
        cut[...] = new
        np.testing.assert_array_equal(np.asarray(array), mirror)


def test_what_the_host_has_is_broadcast_and_cast_as_numpy_does(standin: Cuda) -> None:
    mirror = np.zeros((2, 3, 4), np.int8)
    array = there(mirror)
    for target in (array, mirror):
        target[:, 1:] = np.arange(4, dtype=np.int64)
        target[0, 0, 1:3] = [5, 6]
    np.testing.assert_array_equal(np.asarray(array), mirror)
    with pytest.raises(ValueError, match="broadcast"):
        array[0] = np.zeros(7)


@pytest.mark.parametrize("key", [[0, 1], np.array([True, False]), slice(None, None, 2), None, True, "name", (0, [1])])
def test_other_indices_are_refused(key: object, standin: Cuda) -> None:
    array = there(np.zeros((2, 2), np.float32))
    with pytest.raises(TypeError, match="cut by numbers and slices"):
        array[key]
    with pytest.raises(IndexError):
        array[2]


def test_only_arrays_of_one_shape_and_dtype_are_written_to_each_other(standin: Cuda) -> None:
    array = there(np.zeros((2, 2), np.float32))
    for other in (np.zeros((2, 1), np.float32), np.zeros((2, 2), np.float16)):
        with pytest.raises(ValueError, match="cannot be written to float32"):
            array[:] = there(other)


def test_a_copy_goes_its_own_way(standin: Cuda) -> None:
    first = there(np.arange(6, dtype=np.float32).reshape(2, 3))
    second = first[:, 1:].copy()
    first[...] = 0
    assert second.ready
    assert not first[:, 1:].ready
    assert not first[1:].ready  # without gaps, but not aligned
    np.testing.assert_array_equal(np.asarray(second), [[1, 2], [4, 5]])
    np.testing.assert_array_equal(np.asarray(second, np.float16), [[1, 2], [4, 5]])
    with pytest.raises(ValueError, match="must be copied"):
        np.asarray(second, copy=False)


def test_a_window_row_is_one_copy_whatever_the_heads(standin: Cuda) -> None:
    """As a state writes the rows of a new token: 2D copies, not one a head."""
    window, new = there(np.zeros((2, 30, 64, 8), np.float16)), there(np.ones((2, 30, 4, 8), np.float16))
    cuda.device().wait()
    window[:, :, 5:7] = new[:, :, -2:]
    assert len(standin.streams[cuda.device().stream]) == 1
    assert np.asarray(window).sum() == 2 * 30 * 2 * 8


def test_blocks_are_used_again_and_only_when_free(standin: Cuda) -> None:
    device = cuda.device()
    kept = there(np.arange(4, dtype=np.float32))
    part = kept[2:]
    del kept
    others = [there(np.full(4, i, np.float32)) for i in range(3)]  # noqa: F841
    np.testing.assert_array_equal(np.asarray(part), [2, 3])
    device.wait()
    before = standin.allocations
    for i in range(20):
        array = there(np.full(4, i, np.float32))
        array[1] = 9
        np.testing.assert_array_equal(np.asarray(array), [i, 9, i, i])
        del array
    assert standin.allocations <= before + 3
    more = standin.allocations
    for i in range(20):
        array = there(np.full(4, i, np.float32))
        array[1] = 9
        np.asarray(array)
        del array
    assert standin.allocations == more


def test_pinned_memory_is_not_used_again_while_the_stream_reads_it(standin: Cuda) -> None:
    """The stream has run nothing yet when the same size is staged again."""
    arrays = [there(np.full(8, i, np.int32)) for i in range(5)]
    for i, array in enumerate(arrays):
        array[i] = 100 + i
    for i, array in enumerate(arrays):
        assert np.asarray(array).tolist() == [100 + i if j == i else i for j in range(8)]


def test_full_memory_is_one_line_and_unused_blocks_make_room(standin: Cuda) -> None:
    device = cuda.device()
    del device.empty(cuda.Layout.of({"it": (np.dtype(np.int8), (1 << 20,))}))["it"]
    standin.limit = 3 << 20
    big = device.take((5 << 20) // 2)  # not beside the other one
    assert standin.allocations == 2
    with pytest.raises(UserError, match=r"no room for 1\.0 MiB \(cudaMalloc: .*\): choose a heavier level"):
        device.take(1 << 20)
    del big
    device.take(1 << 20)


def test_a_graph_runs_again_on_its_addresses(standin: Cuda) -> None:
    device = cuda.device()
    source, target = there(np.arange(3, dtype=np.float32)), there(np.zeros(3, np.float32))

    def enqueue(stream: int) -> None:
        kind = standin.cudaMemcpyKind.cudaMemcpyDefault
        device.call("cudaMemcpyAsync", target.address, source.address, 12, kind, stream)

    graph = device.capture(enqueue)
    assert np.asarray(target).tolist() == [0, 0, 0]  # captured, not run
    source[0] = 5
    graph.launch()
    assert np.asarray(target).tolist() == [5, 1, 2]

    def fails(stream: int) -> None:
        enqueue(stream)
        raise CudaError("refused")

    with pytest.raises(CudaError, match="refused"):
        device.capture(fails)
    assert standin.capturing == {}
    standin.failing["cudaStreamEndCapture"] = standin.cudaError_t.cudaErrorStreamCaptureUnsupported
    with pytest.raises(CudaError, match=r"cudaStreamEndCapture: .*CaptureUnsupported"):
        device.capture(enqueue)
    assert standin.last == 0  # nobody else finds our error
    graphs = len([works for works in standin.graphs.values() if works])
    del graph
    gc.collect()
    assert len([works for works in standin.graphs.values() if works]) == graphs - 1


def test_threads_share_the_device(standin: Cuda) -> None:
    """Each writes and reads arrays of its own; the stand-in's stream is not for several at once, so it has a lock."""
    lock, wrong = threading.Lock(), []
    for name in ("add", "run"):
        function = getattr(standin, name)

        def locked(*arguments: object, function=function) -> None:
            with lock:
                function(*arguments)

        setattr(standin, name, locked)

    def work(seed: int) -> None:
        for i in range(60):
            array = there(np.full(16, seed, np.int32))
            array[i % 16] = i
            expected = np.full(16, seed)
            expected[i % 16] = i
            if not np.array_equal(np.asarray(array), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_the_package_or_a_driver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.device.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match=r"cannot be imported .*: pip install \"cuda-bindings==13"):
        cuda.device()
    standin = Cuda()
    standin.failing["cudaStreamCreateWithFlags"] = standin.cudaError_t.cudaErrorInsufficientDriver
    monkeypatch.setattr(cuda, "_bindings", lambda: standin)
    with pytest.raises(UserError, match=r"does not start here \(.*InsufficientDriver\): install the cuda-bindings"):
        cuda.device()
    cuda.device.cache_clear()


def loops(to: np.ndarray, source: np.ndarray) -> list[tuple[int, int]]:
    """Every byte's place in both, element by element."""
    pairs = []
    for index in itertools.product(*map(range, to.shape)):
        places = [sum(i * s for i, s in zip(index, a.strides, strict=True)) for a in (to, source)]
        pairs += [(places[0] + byte, places[1] + byte) for byte in range(to.itemsize)]
    return sorted(pairs)


@settings(max_examples=200, deadline=None)
@given(parts(), parts(), DTYPES)
def test_rectangles_are_every_byte_once(first: tuple, second: tuple, dtype: type) -> None:
    a = np.empty(first[0], dtype)[(*(k for k in first[1] if k is not ...), ...)]
    b = np.empty((*a.shape, 2), dtype)[..., 1] if len(second[0]) % 2 else np.empty((3, *a.shape), dtype)[1]
    if a.size == 0:
        return
    width, (height, pitch, other), outer = cuda.rectangles(a, b)
    pairs = []
    for index in itertools.product(*(range(count) for count, _, _ in outer)):
        to = sum(i * stride for i, (_, stride, _) in zip(index, outer, strict=True))
        source = sum(i * stride for i, (_, _, stride) in zip(index, outer, strict=True))
        pairs += [(to + r * pitch + c, source + r * other + c) for r in range(height) for c in range(width)]
    assert sorted(pairs) == loops(a, b)


# --- that the stand-in is like the real package ---

CALLED = sorted(
    name for name in vars(Cuda) if name.startswith("cuda") and name[4].isupper() and callable(vars(Cuda)[name])
)


@pytest.fixture(scope="module")
def real():
    return pytest.importorskip(
        "cuda.bindings.runtime", reason="cuda-bindings is not installed: pip install cuda-bindings"
    )


@pytest.mark.parametrize("name", [name for name in CALLED if not name.endswith(("_t", "Kind", "Mode"))])
def test_the_real_functions_take_what_the_stand_ins_take(name: str, real) -> None:
    signature = getattr(real, name).__doc__.splitlines()[0]
    arguments = signature.removeprefix(f"{name}(").removesuffix(")")
    names = [part.split(":")[0].split("=")[0].split()[-1] for part in arguments.split(",") if part.strip()]
    assert names == [*inspect.signature(getattr(Cuda(), name)).parameters]


def test_the_real_functions_take_numbers_and_return_as_many_results(real) -> None:
    """Addresses and handles are numbers here. Without a driver each function says so; a wrong type is another error."""
    if gpu():
        pytest.skip("there is a GPU here, and the addresses are made up")
    numbers = {"stream": 1000, "mode": real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal, "flags": 0}
    numbers |= {"kind": real.cudaMemcpyKind.cudaMemcpyDefault, "error": real.cudaError_t.cudaSuccess}
    standin = Cuda()
    for name in CALLED:
        if name.endswith(("_t", "Kind", "Mode")):
            continue
        arguments = [numbers.get(each, 4096) for each in inspect.signature(getattr(standin, name)).parameters]
        error, *results = getattr(real, name)(*arguments)
        assert int(error) in (0, 35), name  # 0: of those that need no driver
        gives = ("cudaMalloc", "cudaHostAlloc", "Create", "EndCapture", "Instantiate", "ErrorString")
        assert len(results) == any(each in name for each in gives), name


GEOMETRY = """
import ctypes, mmap
import numpy as np
from engines import cuda

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
address = libc.mmap(None, 1 << 20, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # PROT_NONE: nobody may read it
block = np.asarray(cuda.Block(address, 1 << 20, []))
layout = cuda.Layout.of({"a": (np.dtype("f4"), (2, 3, 8, 4)), "b": (np.dtype("i1"), (5,))})
arrays = {name: cuda.DeviceArray(None, at) for name, at in layout.cut(block).items()}
part = arrays["a"][:, 1:, 2:4][0, ..., -1]
assert (part.shape, part.dtype, part.ready, part.nbytes) == ((2, 2), np.float32, False, 16)
assert part.address == address + 4 * (1 * 32 + 2 * 4 + 3)
assert arrays["b"][3].shape == () and arrays["b"].address % 256 == 0
assert cuda.rectangles(arrays["a"][:, :, 1:3]._at, arrays["a"][:, :, 4:6]._at) == (32, (6, 128, 128), [])
del part, arrays, block
print("untouched")
"""


def test_nothing_reads_gpu_memory_from_the_host() -> None:
    """Slices and copies are planned on memory whose every access would end the process."""
    done = subprocess.run([sys.executable, "-c", GEOMETRY], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "untouched\n"), done.stderr


def test_the_real_constants_are_there(real) -> None:
    assert real.cudaStreamNonBlocking == Cuda.cudaStreamNonBlocking
    for name in ("cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode"):
        for member in getattr(Cuda, name):
            assert int(getattr(getattr(real, name), member.name)) == member


def test_engines_call_only_what_the_stand_in_has() -> None:
    source = inspect.getsource(cuda)
    called = set(re.findall(r'"(cuda[A-Z]\w+)"', source)) | set(re.findall(r"(?:self\.)?_?cuda\.(cuda\w+)", source))
    assert {"cudaMalloc", "cudaMemcpy2DAsync", "cudaStreamNonBlocking", "cudaGetErrorString"} <= called
    assert called <= set(dir(Cuda))


def test_the_real_package_without_a_driver_is_one_line(real) -> None:
    if gpu():
        pytest.skip("there is a GPU here")
    cuda.device.cache_clear()
    with pytest.raises(UserError, match="CUDA does not start here"):
        cuda.device()


def test_on_a_gpu(real) -> None:
    """The real device: what a state does, against numpy."""
    if gpu() is None:
        pytest.skip("no NVIDIA GPU here")
    device = Device()
    mirror = np.arange(2 * 3 * 8 * 4, dtype=np.float32).reshape(2, 3, 8, 4)
    array = device.send({"it": mirror})["it"]
    new = np.random.default_rng(0).normal(size=(2, 3, 2, 4)).astype(np.float32)
    array[:, :, 3:5] = device.send({"it": new})["it"]
    mirror[:, :, 3:5] = new
    np.testing.assert_array_equal(np.asarray(array), mirror)
