"""What the lean runtime does not drag in, asked of a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "safetensors", "export", "calibration", "scipy", "pandas"}


def modules_after(code: str) -> set[str]:
    code += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_it_brings_nothing_at_all() -> None:
    """So that it stays quick: neither ONNX Runtime nor Pillow nor even numpy before a bundle is opened."""
    lazy = {"onnxruntime", "PIL", "numpy", "tokenizers", "jinja2", "tensorrt", "tensorrt_rtx"}
    assert modules_after("import runtime") & (HEAVY | lazy) == set()


def test_the_command_line_brings_nothing_of_the_server() -> None:
    extra = {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "python_multipart"}
    assert modules_after("import runtime.__main__") & (HEAVY | extra) == set()


def test_answering_needs_only_the_lean_packages(bundle_path: Path) -> None:
    code = f"""
import numpy, runtime
vlm = runtime.open({str(bundle_path)!r}, threads=1)
vlm.generate("what is it", images=[numpy.zeros((9, 9, 3), "uint8")], max_new_tokens=3)
"""
    loaded = modules_after(code)
    assert loaded & (HEAVY | {"tensorrt", "tensorrt_rtx"}) == set()
    assert {"onnxruntime", "PIL", "numpy", "tokenizers", "jinja2"} <= loaded


def test_it_runs_where_the_heavy_packages_are_missing(bundle_path: Path) -> None:
    """Not only unused: a device does not have them."""
    code = f"""
import sys
for name in {sorted(HEAVY)!r}:
    sys.modules[name] = None
import numpy, runtime
vlm = runtime.open({str(bundle_path)!r}, level="tight", threads=1)
print(vlm.generate("what is it", images=[numpy.zeros((9, 9, 3), "uint8")], max_new_tokens=9).stats.backend)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ort\n", "")
