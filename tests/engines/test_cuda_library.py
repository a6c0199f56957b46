"""The TensorRT plugin library: how it is built, what it shows, and that TensorRT's registries take it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import UserError
from engines.plugins import cuda_library

NVCC = """#!/bin/sh
echo "$@" >"$(dirname "$0")/asked"
for last; do :; done
echo "half" >"$last"
[ "$REFUSES" ] && echo "kernel.cu(3): error: $REFUSES" >&2 && exit 2
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nvcc and TensorRT's headers, neither in the usual place; nvcc writes down what it was asked."""
    monkeypatch.setattr(cuda_library, "CUDA_HOME", str(tmp_path / "no cuda"))
    monkeypatch.setattr(cuda_library, "HEADER_FOLDERS", ())
    monkeypatch.setattr(cuda_library, "HEADER_PACKAGE", "no_such_package")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("TENSORRT_INCLUDE", str(tmp_path / "include"))
    for name, text in (("cuda/bin/nvcc", NVCC), ("include/NvInferRuntime.h", "")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_nvcc_is_asked_for_every_architecture_and_for_later_gpus(machine: Path) -> None:
    cuda_library.build(machine / "out" / cuda_library.NAME, ["sm_80", "sm_87"])
    asked = (machine / "cuda/bin/asked").read_text()
    assert re.findall(r"-gencode=(\S+)", asked) == [
        "arch=compute_80,code=sm_80",
        "arch=compute_87,code=sm_87",
        "arch=compute_87,code=compute_87",
    ]
    assert f"-isystem {machine / 'include'}" in asked
    assert {Path(word).name for word in asked.split() if word.endswith((".cu", ".cpp"))} == {
        path.name for path in cuda_library.sources() if path.suffix in (".cu", ".cpp")
    }
    assert [path.name for path in (machine / "out").iterdir()] == [cuda_library.NAME]


def test_a_refused_build_is_one_line_and_leaves_what_was_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = machine / "out" / cuda_library.NAME
    cuda_library.build(library)
    before = library.stat()
    monkeypatch.setenv("REFUSES", "too many registers")
    with pytest.raises(UserError, match=r"could not build .*: kernel.cu\(3\): error: too many registers$"):
        cuda_library.build(library)
    assert library.stat() == before
    assert [path.name for path in (machine / "out").iterdir()] == [cuda_library.NAME]


def test_a_missing_tool_is_one_line_that_says_how_to_get_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "include/NvInferRuntime.h").unlink()
    with pytest.raises(UserError, match=r"TENSORRT_INCLUDE=\S+ does not hold NvInferRuntime\.h"):
        cuda_library.build(machine / "library.so")
    monkeypatch.delenv("TENSORRT_INCLUDE")
    with pytest.raises(
        UserError, match=r"headers .* not installed: .*JetPack.*pip install --no-deps no-such-package==2"
    ):
        cuda_library.build(machine / "library.so")
    monkeypatch.delenv("CUDA_HOME")
    with pytest.raises(UserError, match=r"nvcc.* is not on PATH.*apt install nvidia-jetpack"):
        cuda_library.build(machine / "library.so")


def test_headers_of_jetpack_come_before_those_of_the_package(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = machine / "headers_package"
    (package / "include/tensorrt").mkdir(parents=True)
    (package / "include/tensorrt/NvInferRuntime.h").touch()
    (package / "__init__.py").write_text("raise ImportError('wants a GPU')")
    monkeypatch.syspath_prepend(machine)
    monkeypatch.setattr(cuda_library, "HEADER_PACKAGE", package.name)
    monkeypatch.delenv("TENSORRT_INCLUDE")
    assert cuda_library.find_headers() == package / "include/tensorrt"
    monkeypatch.setattr(cuda_library, "HEADER_FOLDERS", (str(machine / "include"),))
    assert cuda_library.find_headers() == machine / "include"


def test_every_file_of_the_library_is_a_source() -> None:
    found = {path for path in cuda_library.FOLDER.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".map")}
    assert found - set(cuda_library.FOLDER.glob("cpu/*")) == set(cuda_library.sources())


def read(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed: apt install binutils")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def exports(library: Path) -> set[str]:
    return {line.split()[-1] for line in read("nm", "-D", "--defined-only", library).splitlines()}


ENTRIES = {
    "getCreators",
    "setLoggerFinder",
    "unicache_complaint",
    "unicache_quant_kv_attention",
    "unicache_quant_kv_attention_workspace",
    "unicache_topk_gather",
}


@pytest.mark.slow
def test_the_library_shows_its_entries_only_and_needs_neither_tensorrt_nor_cuda(plugin_library: Path) -> None:
    assert exports(plugin_library) == ENTRIES
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", read("readelf", "-d", plugin_library))
    assert needed
    assert not [name for name in needed if re.search("nvinfer|tensorrt|cuda", name)]


@pytest.mark.slow
def test_cmake_builds_the_same(plugin_library: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed: apt install cmake")
    command = ["cmake", "-B", str(tmp_path), "-S", str(cuda_library.FOLDER), "-DCMAKE_CUDA_ARCHITECTURES=87"]
    found = [f"-DCMAKE_CUDA_COMPILER={cuda_library.find_nvcc()}", f"-DTENSORRT_INCLUDE={cuda_library.find_headers()}"]
    subprocess.run([*command, *found], check=True)
    subprocess.run(["cmake", "--build", tmp_path, "--parallel", "2"], check=True)
    assert exports(tmp_path / cuda_library.NAME) == exports(plugin_library)


# Both registries take the library without a GPU. In a process of its own: TensorRT may end it.
REGISTER = """
import ctypes, importlib, sys
import numpy as np
module, library = sys.argv[1:]
trt = importlib.import_module(module)
registry = trt.get_plugin_registry()
assert registry.load_library(library)
creators = {(c.name, c.plugin_version, c.plugin_namespace): c for c in registry.all_creators if c.plugin_namespace}
for key, creator in creators.items():
    fields = [trt.PluginField(f.name, np.ones(1, {"INT32": np.int32, "FLOAT32": np.float32}[f.type.name]), f.type)
              for f in creator.field_names]
    plugin = creator.create_plugin("one", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)
    for capability in ("CORE", "BUILD", "RUNTIME"):
        assert plugin.get_capability_interface(getattr(trt.PluginCapabilityType, capability)) is not None
    assert creator.create_plugin("one", trt.PluginFieldCollection([]), trt.TensorRTPhase.RUNTIME) is None
    complaint = ctypes.CDLL(library).unicache_complaint
    complaint.restype = ctypes.c_char_p
    print(*key, complaint().decode(), sep=" | ")
"""
REGISTERED = [
    "QuantKVAttention | 1 | unicache | QuantKVAttention: attribute scale is missing",
    "TopKGather | 1 | unicache | TopKGather: attribute k is missing",
]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_lean_bindings", "tensorrt"])
def test_a_registry_takes_the_library(module: str, plugin_library: Path) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-c", REGISTER, module, str(plugin_library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == REGISTERED, done.stderr
