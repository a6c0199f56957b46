"""python -m engines triton: what it writes, by Triton's own schema, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from engines import bundle as bundles
from engines.__main__ import main


def config(folder: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text("utf-8"), model_config_pb2.ModelConfig())


def test_repository(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made" / "triton"
    options = ["--name", "vlm-1.0", "--instances", "3", "--level", "light", "--threads", "2"]
    assert main(["triton", str(out), "--out", str(target), *options]) == 0
    assert f"tritonserver --model-repository {target}   (model vlm-1.0)" in capsys.readouterr().out
    found = sorted(each.relative_to(target).as_posix() for each in target.rglob("*") if each.parent.name != "bundle")
    assert found == [
        "README.md", "vlm-1.0", "vlm-1.0/1", "vlm-1.0/1/bundle", "vlm-1.0/1/model.py", "vlm-1.0/config.pbtxt",
    ]  # fmt: skip
    assert bundles.read(target / "vlm-1.0" / "1" / "bundle").manifest == bundles.read(out).manifest
    made = config(target / "vlm-1.0")
    assert (made.name, made.backend, made.max_batch_size) == ("vlm-1.0", "python", 0)
    assert made.model_transaction_policy.decoupled
    assert not made.HasField("dynamic_batching")
    (group,) = made.instance_group
    assert (group.count, group.kind) == (3, model_config_pb2.ModelInstanceGroup.KIND_MODEL)
    inputs = {
        each.name: (model_config_pb2.DataType.Name(each.data_type), [*each.dims], each.optional) for each in made.input
    }
    assert inputs == {
        "text_input": ("TYPE_STRING", [1], False),
        "image": ("TYPE_STRING", [-1], True),
        "stream": ("TYPE_BOOL", [1], True),
        "sampling_parameters": ("TYPE_STRING", [1], True),
    }
    assert [(each.name, [*each.dims]) for each in made.output] == [("text_output", [1]), ("stats", [1])]
    assert {key: value.string_value for key, value in made.parameters.items()} == {"level": "light", "threads": "2"}
    readme = (target / "README.md").read_text().splitlines()
    assert len(readme) == 3
    assert all(len(line) <= 200 for line in readme)


def test_the_name_is_the_bundles_and_a_link_is_one(out: Path, tmp_path: Path) -> None:
    assert main(["triton", str(out), "--out", str(tmp_path / "triton"), "--link"]) == 0
    link = tmp_path / "triton" / out.name / "1" / "bundle"
    assert link.is_symlink()
    assert link.resolve() == out.resolve()
    assert bundles.read(link)
    made = config(tmp_path / "triton" / out.name)
    assert made.name == out.name
    assert not made.parameters


def test_mistakes_are_one_line_and_leave_nothing(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = {each.name for each in tmp_path.iterdir()}
    free = str(tmp_path / "free")
    for options, message in (
        (["--out", str(target)], "there exists: choose another --out or remove it"),
        (["--out", str(tmp_path / "dangling")], "dangling exists"),
        (["--out", free, "--name", "../up"], "'../up' is no name of a model"),
        (["--out", free, "--level", "heavy"], "no level 'heavy' in"),
        (["--out", free, "--backend", "foo"], "unknown backend 'foo': choose auto, ort, trt-rtx, trt"),
        (["--out", free, "--threads", "257"], "threads must be from 1 to 256, got 257"),
        (["--out", free, "--instances", "0"], "argument --instances: must be at least 1, got 0: see "),
        (
            ["--out", str(out / "triton")],
            f"lies in the bundle {out}: choose a place outside",
        ),
        ([], "required: --out"),
    ):
        assert main(["triton", str(out), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert bundles.read(out)
    (out / "vision.onnx").write_bytes(b"x")
    assert main(["triton", str(out), "--out", free]) == 2
    assert "vision.onnx is damaged" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == before


def test_what_breaks_off_leaves_nothing(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("shutil.copyfile", full)
    before = {each.name for each in tmp_path.iterdir()}
    assert main(["triton", str(out), "--out", str(tmp_path / "free")]) == 2
    assert {each.name for each in tmp_path.iterdir()} == before
