"""engines/plugins/simt.h: what CUDA does, on the host."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.engines.simt import LAUNCH_FAILURE, compiled


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", LAUNCH_FAILURE),
        ("if (threadIdx.x != 5) __ballot_sync(~0u, true);", LAUNCH_FAILURE),
        ("if (threadIdx.x == 3) __syncthreads(); else __ballot_sync(~0u, true);", LAUNCH_FAILURE),
        ("__syncthreads(); __ballot_sync(~0u, true); __syncthreads();", 0),
    ],
)
def test_the_shim_refuses_a_barrier_that_some_threads_never_reach(tmp_path: Path, body: str, code: int) -> None:
    source = tmp_path / "barrier.cu"
    source.write_text(
        f'#include "simt.h"\n__global__ void body() {{ {body} }}\n'
        'extern "C" int run() { SIMT_LAUNCH(body, dim3(2), dim3(64), nullptr); return last_error(); }\n'
    )
    library = compiled(source, tmp_path)
    assert [library.run(), library.run()] == [code, code]


def test_halves_are_converted_as_numpy_does(tmp_path: Path) -> None:
    source = tmp_path / "half.cu"
    source.write_text(
        '#include "simt.h"\nextern "C" float up(unsigned short x) { return half_to_float(x); }\n'
        'extern "C" unsigned short down(float x) { return float_to_half(x); }\n'
    )
    library = compiled(source, tmp_path)
    library.up.restype, library.down.restype, library.down.argtypes = ctypes.c_float, ctypes.c_uint16, [ctypes.c_float]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(np.array([library.up(int(x)) for x in halves.view(np.uint16)]), halves)
    floats = (
        np.random.default_rng(0).standard_normal(2000).astype(np.float32) * 10.0 ** np.arange(-9, 6).repeat(200)[:2000]
    )
    floats = floats.astype(np.float32)
    with np.errstate(over="ignore"):
        stated = floats.astype(np.float16)
    np.testing.assert_array_equal(np.array([library.down(x) for x in floats], np.uint16).view(np.float16), stated)


@pytest.mark.parametrize("flags", [[], ["-DSIMT_BACKWARDS"]])
def test_bytes_are_permuted_and_votes_are_counted(tmp_path: Path, flags: list[str]) -> None:
    source = tmp_path / "words.cu"
    source.write_text(
        '#include "simt.h"\n__global__ void vote(int* any, unsigned who) {\n'
        "    any[threadIdx.x] = __any_sync(~0u, threadIdx.x == who);\n}\n"
        'extern "C" int run(int* any, unsigned who) { SIMT_LAUNCH(vote, dim3(1), dim3(64), nullptr, any, who);'
        " return last_error(); }\n"
        'extern "C" unsigned perm(unsigned low, unsigned high, unsigned by) { return __byte_perm(low, high, by); }\n'
    )
    library = compiled(source, tmp_path, *flags)
    library.perm.restype = ctypes.c_uint32
    assert library.perm(0x33221100, 0x77665544, 0x7416) == 0x77441166
    votes = (ctypes.c_int * 64)()
    assert library.run(votes, 40) == 0
    assert list(votes) == [0] * 32 + [1] * 32
