"""Every script says what to type where the packages are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STARTED = sorted(file.name for file in SCRIPTS.glob("*.py") if 'if __name__ == "__main__"' in file.read_text())
# One runs in an environment of its own, one is started by bench_load.py, which has looked before.
OTHERS = {"kvpress_reference.py", "cold_start.py"}


@pytest.mark.parametrize("script", [script for script in STARTED if script not in OTHERS])
def test_missing_packages_are_one_line(script: str) -> None:
    # -I -S: no site-packages, as with a Python that has nothing installed; it also takes the script's folder away.
    code = f"import sys, runpy; sys.path.insert(0, {str(SCRIPTS)!r}); sys.argv = ['x', 'nowhere']; "
    code += f"runpy.run_path({str(SCRIPTS / script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    # The first needs nothing but the runtime before it opens the bundle, the second names its own packages.
    if script not in ("ask_easy_vqa.py", "smollm2.py"):
        assert ". .venv/bin/activate" in done.stderr


def test_a_script_runs_this_folder_not_an_installed_copy(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/__init__.py").write_text("raise SystemExit('a copy')")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}  # as site-packages, before what was at the end
    line = [sys.executable, "-S", str(SCRIPTS / "ask_easy_vqa.py"), "nowhere"]
    assert "a copy" not in subprocess.run(line, env=env, capture_output=True, text=True).stderr


def test_what_is_missing_is_not_hidden_by_what_is_too_old(tmp_path: Path) -> None:
    """As in an environment of a peer's, with another release of transformers and without what our exporter needs."""
    (tmp_path / "transformers-5.2.0.dist-info").mkdir()
    (tmp_path / "transformers-5.2.0.dist-info/METADATA").write_text("Name: transformers\nVersion: 5.2.0\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{SCRIPTS}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import installed, onnx"], env=env, capture_output=True, text=True
    )
    told = "error: No module named 'onnx': transformers 5.2.0 is too old: pip install 'transformers>=5.24'\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("script", ["kvpress_curve", "kvpress_needles"])
def test_scripts_for_kvpress_need_nothing_of_the_exporter(script: str) -> None:
    """Its environment has older releases, and neither onnx nor onnxruntime."""
    code = f"import sys; sys.modules |= dict.fromkeys(('export', 'onnx', 'onnxruntime')); import {script}"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, check=True)
