"""`python -m runtime`, as a user types it: answers, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import runtime
from engines.errors import command
from runtime.__main__ import main
from tests.runtime import toy

ROOT = Path(__file__).resolve().parents[2]


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "runtime", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def here(*arguments: object) -> int:
    """The same in this process: a process a case would take half a minute."""
    return command(main)([str(argument) for argument in arguments])


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)).save(path)
    return path


def test_answer_on_stdout_statistics_on_stderr(bundle_path: Path, picture: Path) -> None:
    done = cli("ask", bundle_path, "--image", picture, "--max-new-tokens", 5, "--threads", 1, "what is it")
    assert done.returncode == 0
    expected = runtime.open(bundle_path).generate("what is it", images=[picture], max_new_tokens=5)
    assert done.stdout == expected.text + "\n"
    why, statistics = done.stderr.splitlines()
    assert why.startswith("backend ort: onnxruntime ")
    assert why.endswith("; not trt nor trt-rtx: no NVIDIA GPU here, and plans run on one only")
    assert "loose, ort (CPUExecutionProvider)" in statistics
    assert "prompt tokens, 4 visual tokens kept" in statistics


def test_json(bundle_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ask", bundle_path, "--image", picture, "--image", picture, "--json", "--level", "tight"]
    assert here(*arguments, "--question-later", "--backend", "ort", "--max-new-tokens", 7, "how many") == 0
    out, err = capsys.readouterr()
    values = json.loads(out)
    vlm = runtime.open(bundle_path, level="tight")
    expected = vlm.generate("how many", images=[picture, picture], max_new_tokens=7, question_later=True)
    assert err == ""
    assert (values["answer"], values["tokens"]) == (expected.text, expected.tokens)
    assert values["kv_bytes"] == expected.stats.kv_bytes
    assert values["kv_bytes_uncompressed"] == expected.stats.kv_bytes_uncompressed
    assert (values["level"], values["backend"]) == ("tight", "ort")
    assert values["seconds"] == pytest.approx(sum(values["seconds_by_part"].values()))
    assert {"load", "images", "vision", "prefill", "extend", "decode"} <= set(values["seconds_by_part"])


def test_info_json(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("info", bundle_path, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["model"]["kv_heads"] == toy.KV_HEADS
    assert values["level"] == "loose"
    assert values["recipe"] == {"name": "loose"}
    assert values["buckets"] == [16, 40]
    assert values["capacities"] == {"16": [12, 12], "40": [36, 36]}
    assert values["levels"]["tight"]["buckets"][1]["capacities"] == [10, 12]
    assert list(values["backends"]) == ["ort", "trt-rtx", "trt"]
    assert values["backends"]["ort"]["available"] is True
    for backend in values["backends"].values():
        assert backend["reason"]
    names = {path.name for path in bundle_path.iterdir()} - {"manifest.json", "manifest.sha256"}
    assert {name: file["bytes"] for name, file in values["files"].items()} == {
        name: (bundle_path / name).stat().st_size for name in names
    }


def test_info_for_people(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("info", bundle_path) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "level loose (default)",
        "level tight",
        "window 8 (4 recent, compacts)",
        "weights.bin",
        "weights: float32; ",
        "trt-rtx  no",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "BUNDLE", "--image", "missing.png", "what is it"], "missing.png: no such file"),
        (["ask", "BUNDLE", "--image", "", "what is it"], "path is empty: name a file"),
        (["ask", "BUNDLE", "--video", "", "what is it"], "path is empty: name a file"),
        (["ask", "BUNDLE", "--image", "TRUNCATED", "what is it"], "not a readable image"),
        (["ask", "BUNDLE", "--image", "PICTURE", ""], "the question is empty"),
        (["ask", "BUNDLE", "--image", "PICTURE", "what is <image>"], "2 image placeholders, but 1 image was given"),
        (["ask", "BUNDLE", "red " * 60], "longest bucket's 40"),
        (["ask", "BUNDLE", "--level", "heavy", "what"], "no level 'heavy'"),
        (["ask", "BUNDLE", "--backend", "cuda", "what"], "unknown backend 'cuda'"),
        (["ask", "BUNDLE", "--backend", "trt", "what"], "backend trt cannot run here"),
        (["ask", "BUNDLE", "--max-new-tokens", "0", "what"], "max_new_tokens must be at least 1"),
        (["ask", "BUNDLE", "--max-new-tokens", "many", "what"], "invalid int value: 'many'"),
        (["ask", "BUNDLE", "--threads", "-3", "what"], "threads must be from 1 to 256"),
        (["ask", "BUNDLE", "--question-later", "what"], "needs an image"),
        (["ask", "BUNDLE"], "arguments are required: question"),
        (["ask", "nowhere", "what"], "nowhere is not a folder"),
        (["ask", "DAMAGED", "what"], "prefill_loose_16.onnx is damaged"),
        (["info", "DAMAGED"], "prefill_loose_16.onnx is damaged"),
        (["info", "/"], "is not a bundle"),
        (["shout", "BUNDLE"], "invalid choice: 'shout'"),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, bundle_path: Path, picture: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "truncated.png").write_bytes(picture.read_bytes()[:500])
    if "DAMAGED" in arguments:
        shutil.copytree(bundle_path, tmp_path / "damaged")
        graph = tmp_path / "damaged" / "prefill_loose_16.onnx"
        graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    places = {
        "BUNDLE": bundle_path, "PICTURE": picture, "TRUNCATED": tmp_path / "truncated.png",
        "DAMAGED": tmp_path / "damaged",
    }  # fmt: skip
    assert here(*(places.get(argument, argument) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_mistake_through_the_shell(bundle_path: Path) -> None:
    done = cli("ask", bundle_path, "--image", "missing.png", "what is it")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: missing.png: no such file\n"


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["ask", "--help"])
    assert stop.value.code == 0
    assert "--question-later" in capsys.readouterr().out
