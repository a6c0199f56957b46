"""The package as a device installs it: base requirements only, in an environment of its own, from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with `pip install .`, which is done on a copy: it writes into its source."""
    folder = tmp_path_factory.mktemp("lean")
    source = folder / "source"
    for package in ("calibration", "engines", "export", "runtime"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    subprocess.run([*pip, "-c", source / "constraints.txt", source], check=True, timeout=600)
    return python


def run(python: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Without this checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_it_answers_where_only_its_requirements_are_installed(
    lean_python: Path, bundle_path: Path, tmp_path: Path
) -> None:
    listed = run(lean_python, tmp_path, "-m", "pip", "list", "--format", "json")
    installed = {package["name"] for package in json.loads(listed.stdout)}
    assert {"onnxruntime", "numpy", "pillow", "tokenizers", "jinja2", "unicache-edge"} <= {n.lower() for n in installed}
    assert installed.isdisjoint({"torch", "transformers", "onnx", "onnxscript", "safetensors", "tensorrt"})

    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).save(tmp_path / "a.png")
    asked = ("ask", bundle_path, "--image", tmp_path / "a.png", "--json", "what is it")
    lean, here = (run(Path(python), tmp_path, "-m", "runtime", *asked) for python in (lean_python, sys.executable))
    assert (lean.returncode, lean.stderr) == (0, "")
    answers = [json.loads(done.stdout) for done in (lean, here)]
    told = ("answer", "tokens", "level", "backend", "kv_bytes", "kv_bytes_uncompressed")
    assert [answers[0][key] for key in told] == [answers[1][key] for key in told]

    info = run(lean_python, tmp_path, "-m", "runtime", "info", bundle_path)
    assert (info.returncode, info.stderr) == (0, "")
