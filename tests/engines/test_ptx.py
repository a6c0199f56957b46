"""The kernels use nothing newer than PTX ISA 8.5, what the driver of JetPack 6.2 (CUDA 12.6) takes.

nvcc writes the ISA of its own release, and has no option for an older one. So what it writes is labelled 8.5 and given
to the assembler of CUDA 12.6, from the package nvidia-cuda-nvcc-cu12.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from engines.errors import UserError
from engines.plugins import cuda_library
from engines.plugins.host_library import kernels

ISA = "8.5"


@pytest.fixture(scope="module")
def assembler() -> Path:
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvcc")
    except ModuleNotFoundError:
        package = None
    places = [Path(place, "bin", "ptxas") for place in (package and package.submodule_search_locations) or ()]
    if not (found := next((place for place in places if place.is_file()), None)):
        pytest.skip("the assembler of CUDA 12.6 is not installed: pip install nvidia-cuda-nvcc-cu12==12.6.85")
    said = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    assert "release 12.6" in said
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.stem)
def test_the_assembler_of_jetpack_6_takes_the_kernels(assembler: Path, tmp_path: Path, kernel: Path) -> None:
    try:
        nvcc = cuda_library.find_nvcc()
    except UserError as error:
        pytest.skip(str(error))
    ptx = tmp_path / "kernel.ptx"
    subprocess.run([nvcc, "-std=c++17", "-O3", "-arch=compute_80", "-ptx", kernel, "-o", ptx], check=True)
    text, labels = re.subn(r"(?m)^\.version \S+", f".version {ISA}", ptx.read_text())
    assert labels == 1
    ptx.write_text(text)
    for architecture in ("sm_80", "sm_87", "sm_90"):
        command: list[str | Path] = [assembler, f"-arch={architecture}", "-v", ptx, "-o", tmp_path / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        frames = set(re.findall(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads", done.stderr))
        assert frames == {"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"}
