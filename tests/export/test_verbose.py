"""`build.py --verbose`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from export import build


def test_every_graph_is_told_with_its_size_its_time_and_its_error(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    once = ["--guard", "off", "--kernels", "never", "--no-report", "--jobs", "1"]
    assert (
        build.main([str(tiny_path), "--out", str(out), "--recipe", "off", "--buckets", "16", *once, "--verbose"]) == 0
    )
    said, files = capsys.readouterr().out, list(out.glob("*.onnx"))
    assert len(files) > 2
    for file in files:
        assert re.search(rf"\b{re.escape(file.stem)}: \d+ KiB, \d+\.\d s, equal to PyTorch to ", said)
