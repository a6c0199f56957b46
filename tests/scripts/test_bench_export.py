"""scripts/bench_export.py: whose memory is counted, and what the random checkpoints are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bench_export
import figures
import random_checkpoint
from calibration import samples
from export import checkpoint as checkpoints

HELD, MAPPED = 48 * 2**20, 96 * 2**20
TAKES = f"""
import mmap, sys
held = bytearray(b"x" * {HELD})
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = sum(mapped[i] for i in range(0, len(mapped), 4096))
print("ready", flush=True)
sys.stdin.read()
"""


def test_pages_of_a_mapped_file_are_not_a_process_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(MAPPED))
    command = [sys.executable, "-c", TAKES, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        watch = bench_export.Watch(child.pid)
        watch.look()
        child.communicate()
    assert HELD <= watch.own < HELD + MAPPED
    assert watch.resident >= HELD + MAPPED


def test_workers_count_too() -> None:
    """A parent that holds nothing, and its child that does."""
    child = f"held = bytearray(b'x' * {HELD}); print('ready', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watch = bench_export.Watch(process.pid)
        watch.look()
        process.communicate(b"\n")
    assert watch.own >= HELD


@pytest.mark.parametrize(("name", "published"), [("smolvlm-256m", 256_484_928), ("qwen2-vl-2b", 2_208_985_600)])
def test_models_have_as_many_parameters_as_those_they_are_called_after(name: str, published: int) -> None:
    model = random_checkpoint.skeleton(random_checkpoint.configuration(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_a_random_checkpoint_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "SHARD", 2 * 144_128 // 3)
    path = random_checkpoint.write(tmp_path / "tiny", "tiny")
    shards = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    assert len(shards) >= 3
    assert {tensor.dtype for shard in shards for tensor in shard.values()} == {torch.bfloat16}
    checkpoint = checkpoints.load(path)
    stored = {name: tensor for shard in shards for name, tensor in shard.items()}
    for name, parameter in checkpoint.model.named_parameters():
        assert torch.equal(parameter, stored[name].float())
    assert len(samples.read(path / "samples")) == random_checkpoint.SAMPLES


@pytest.mark.slow
def test_a_build_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["tiny", "--keep", str(tmp_path), "--json", str(tmp_path / "export.json")]
    build = ["--recipe", "off", "--buckets", "16", "--kernels", "never", "--no-report", "--jobs", "1"]
    assert bench_export.main([*own, "--", *build]) == 0
    (row,) = figures.read(tmp_path / "export.json").values["rows"]
    assert row["parameters"] == 144_128
    assert row["weights"] == sum(file.stat().st_size for file in (tmp_path / "tiny").glob("*.safetensors"))
    assert row["stored"] == (tmp_path / "tiny.bundle" / "weights.bin").stat().st_size
    assert row["graphs"] == len(list((tmp_path / "tiny.bundle").glob("*.onnx")))
    assert 0 < row["own"] < row["resident"]
    assert row["cpu_seconds"] > 0
    assert "| tiny " in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_export.main(["gigantic"]) == 2
    assert bench_export.main(["tiny", "--keep", str(tmp_path), "--", "--recipe", "none-such"]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "no model 'gigantic'" in first
    assert "tiny could not be built" in last
