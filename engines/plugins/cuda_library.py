"""Build of the TensorRT plugin library with nvcc: the kernels, for several GPUs, and their plugins.

On a device without Python's packages, engines/plugins/CMakeLists.txt builds the same.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engines.errors import UserError
from engines.plugins.host_library import kernels

NAME = "libunicache_trt.so"
# Ampere in datacenters and desktops, Orin, Hopper. What is built for one runs on later GPUs of the same generation too
# (sm_86 on Ada's sm_89), and the last one's PTX on all that come after it.
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_90")

FOLDER = Path(__file__).resolve().parent
CUDA_HOME = "/usr/local/cuda"
HEADER = "NvInferRuntime.h"
HEADER_FOLDERS = (
    "/usr/include/aarch64-linux-gnu",
    "/usr/include/x86_64-linux-gnu",
    "/usr/include",
)  # of JetPack, Debian
HEADER_PACKAGE, HEADER_RELEASE = "kernel_lens", "2.0.1"


def sources() -> list[Path]:
    """All files that go into the library."""
    return [*kernels(), *(file for pattern in ("*.h", "*.cuh", "tensorrt/*") for file in sorted(FOLDER.glob(pattern)))]


def plugins() -> list[Path]:
    """C++ sources of the plugins, without the kernels."""
    return sorted(FOLDER.glob("tensorrt/*.cpp"))


def find_nvcc() -> str:
    """The CUDA compiler.

    Raises:
        UserError: there is none.
    """
    homes = [home for home in (os.environ.get("CUDA_HOME"), CUDA_HOME) if home]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        raise UserError(
            f"nvcc, the CUDA compiler, is not on PATH, in $CUDA_HOME or in {CUDA_HOME}: on a Jetson it comes with "
            "JetPack (apt install nvidia-jetpack); elsewhere install the CUDA toolkit"
        )
    return nvcc


def find_headers() -> Path:
    """Folder of TensorRT's headers, of any version from 10.3.

    Raises:
        UserError: they are not installed.
    """
    named = os.environ.get("TENSORRT_INCLUDE")
    package = None if named else importlib.util.find_spec(HEADER_PACKAGE)  # found, not imported: it wants a GPU
    places = (package.submodule_search_locations if package else None) or []
    folders = [named] if named else [*HEADER_FOLDERS, *(f"{place}/include/tensorrt" for place in places)]
    for folder in folders:
        if Path(folder, HEADER).is_file():
            return Path(folder)
    if named:
        raise UserError(f"TENSORRT_INCLUDE={named} does not hold {HEADER}: name the folder of TensorRT's headers")
    raise UserError(
        f"TensorRT's headers ({HEADER}) are not installed: on a Jetson they come with JetPack (apt install "
        f"nvidia-jetpack); elsewhere name their folder with  export TENSORRT_INCLUDE=... , or take those in a package: "
        f"pip install --no-deps {HEADER_PACKAGE.replace('_', '-')}=={HEADER_RELEASE}"
    )


def build(out: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile the library to the file `out`; it is there whole, or not at all.

    Args:
        architectures: compute capabilities, ascending, for example `sm_87`.

    Raises:
        UserError: nvcc or TensorRT's headers are missing, or nvcc refuses the sources or an architecture.
    """
    nvcc, headers = find_nvcc(), find_headers()
    codes = [(each, each) for each in architectures] + [(architectures[-1], architectures[-1].replace("sm", "compute"))]
    gencode = [f"-gencode=arch={arch.replace('sm', 'compute')},code={code}" for arch, code in codes]
    compiled = [str(file) for file in (*kernels(), *plugins())]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        library = Path(folder, out.name)
        command = [nvcc, "-shared", "-O3", "-std=c++17", "-Xcompiler=-fPIC", "--threads=0", *gencode, *compiled]
        command += ["-isystem", str(headers), "-cudart=static"]
        command += ["-Xlinker", f"--version-script={FOLDER / 'tensorrt' / 'library.map'}", "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr + done.stdout).splitlines()
            first = next((line for line in lines if "error" in line or "fatal" in line), f"exit code {done.returncode}")
            raise UserError(f"{nvcc} could not build the TensorRT plugin library: {first.strip()}")
        os.replace(library, out)
