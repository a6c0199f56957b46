"""export/build.py and mistakes in what is typed: exit code 2, one line on standard error, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import bundle
from engines.errors import UserError
from export import build
from tests.export import tiny
from tests.export.conftest import ROOT, one_line


def test_a_size_that_the_processor_does_not_make(refused: Callable[..., str], tiny_path: Path) -> None:
    side = tiny.IMAGE_SIZE
    line = refused(tiny_path, "--recipe", "off", "--image-sizes", f"{side}x{side}", f"{side}x{2 * side}")
    assert f"--image-sizes {side}x{2 * side}: " in line
    assert f"makes {side}x{side} of every picture" in line


@pytest.mark.parametrize("text", ["448", "448x", "0x448", "448x448x3", "4e2x4"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text}' is no HEIGHTxWIDTH in pixels, as 448x672"):
        build.arguments("").parse_args(["--image-sizes", text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "unknown key 'colour'"),
        ("[perception]\nkeeep = 0.5", "unknown key 'keeep'"),
        ("[perception]\nkeep = 'half'", "perception.keep"),
        ("perception = 0.5", "perception"),
        ("[perception]\nkeep = 2.0", "keep must be in (0, 1], got 2.0"),
        ("[importance]\npool = 4", "pool must be odd"),
        ("[importance]\npool = 1000000001", "pool must be odd and below 1000"),
        ("[protect]\nsinks = 100000000000000000000000", "expected a smaller number"),
        ("[perception]\nmethod = 'coverage'\nalpha = 1e300", "alpha must be from 0.001 to 1000"),
        ("[importance]\nmethod = 'best'", "no method 'best': choose from snapkv, vl-cache"),
        ("[window]\nleast = 9\nmost = 8", "least <= most"),
        ("store = 'int8'", "unknown key 'store'"),
        ("[quantize]\nmethod = 'int3'", "no method 'int3': choose from int8"),
        ("[budget]\nkeep = nan", "budget.keep: expected a finite number, got nan"),
        ("[budget]\nkv_bytes = inf", "expected a finite number, got inf"),
        ("[window]\nshare = -inf", "expected a finite number"),
        ("[quantize]\nmargin = 1e30", "margin must be from 1 to 100"),
        ("unknown = 'talk.toml'", "a recipe's name is letters, digits, '-' and '_', got 'talk.toml'"),
        ("[budget]\nmethod = ['cosine']", "no method ['cosine']: choose from cosine"),
        ("[budget.method]", "no method {}: choose from cosine"),
        ("[quantize]\nmethod = 'kivi'\nbits = 2.0", "quantize.bits: 2.0 is none of 2, 3, 4"),
        (f"description = {'[' * 3000}", "cannot be read"),
        ("store = [", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_wrong_recipe(refused: Callable[..., str], tiny_path: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    line = refused(tiny_path, "--recipe", file)
    assert message in line
    assert "mine.toml" in line


def test_a_layer_that_the_decoder_has_not(refused: Callable[..., str], tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[perception]\nmethod = 'attention'\nkeep = 0.5\nlayers = [1, 3]")
    line = refused(tiny_path, "--recipe", tmp_path / "mine.toml")
    assert "mine: perception reads layer 3 of the decoder, and the model has layers 0 to 2" in line


@pytest.mark.parametrize(
    "text", ["[budget]\nkeep = 1e9", "[budget]\nleast = 100000", "[window]\nleast = 1000\nmost = 1000"]
)
def test_a_cache_beyond_the_models_positions(
    refused: Callable[..., str], tiny_path: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    assert f"the model has {tiny.POSITIONS} positions" in refused(tiny_path, "--recipe", tmp_path / "mine.toml")


def test_two_recipes_of_one_name(refused: Callable[..., str], tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "off.toml").write_text("")
    assert "two recipes are called off" in refused(tiny_path, "--recipe", "off", "--recipe", tmp_path / "off.toml")


def test_no_such_recipe(refused: Callable[..., str], tiny_path: Path) -> None:
    presets = "balanced, chat, dense-document, extreme, light, long-video, off, realtime-chat"
    assert f"presets are {presets}" in refused(tiny_path, "--recipe", "tiny")


def test_no_recipe_for_unknown_questions(refused: Callable[..., str], tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('unknown = "talk"')
    line = refused(tiny_path, "--recipe", tmp_path / "mine.toml")
    assert "recipe mine names 'talk' for unknown questions: no recipe 'talk': presets are" in line


def test_recipes_bring_those_for_unknown_questions(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('unknown = "two"')
    folder = tmp_path / "checkpoint"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "two.toml").write_text('unknown = "three"')
    (folder / "recipes" / "three.toml").write_text('unknown = "three"')
    args = build.arguments("").parse_args([str(folder), "--recipe", "off", "--recipe", str(tmp_path / "one.toml")])
    levels = build._levels(args)
    assert list(levels) == ["off", "one", "two", "three"]
    assert [recipe.unknown for recipe in levels.values()] == [None, "two", "three", "three"]


@pytest.mark.parametrize("place", ["bundle", "samples/bundle", "recipes"])
def test_the_checkpoint_is_not_written_into(copy: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    before = content(copy)
    assert build.main([str(copy), "--recipe", "off", "--out", str(copy / place)]) == 2
    assert "which is read: choose a place outside of it" in one_line(capsys.readouterr().err)
    assert content(copy) == before


def test_no_such_recipe_file(refused: Callable[..., str], tiny_path: Path, tmp_path: Path) -> None:
    assert "none.toml does not exist" in refused(tiny_path, "--recipe", tmp_path / "none.toml")


def test_no_such_level(refused: Callable[..., str], tiny_path: Path) -> None:
    assert "--level mild is none of this bundle's levels: off" in refused(
        tiny_path, "--recipe", "off", "--level", "mild"
    )


@pytest.mark.parametrize("length", [tiny.POSITIONS + 1, 10**9])
def test_a_bucket_that_the_model_has_no_positions_for(
    refused: Callable[..., str], tiny_path: Path, length: int
) -> None:
    line = refused(tiny_path, "--recipe", "off", "--buckets", "48", length)
    assert f"--buckets {length}: the model has positions 1 to {tiny.POSITIONS}" in line


def test_more_images_than_positions(refused: Callable[..., str], tiny_path: Path) -> None:
    line = refused(tiny_path, "--recipe", "off", "--images", "1", "99")
    assert "a prompt of 99 images and --text-tokens 24 takes" in line
    assert f"the model has {tiny.POSITIONS} positions" in line


def test_more_text_than_a_shortened_prompt_has_room_for(
    refused: Callable[..., str], tiny_path: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "short.toml"
    recipe.write_text('[quantize]\nmethod = "float32"\n[shorten]\nmethod = "fastv"\nkeep = 0.3\n')
    line = refused(tiny_path, "--recipe", recipe, "--images", "1")
    assert "recipe short: a prompt of 1 image has 32 text tokens" in line
    assert "shortened to 14 it has room for 12: shorten it less" in line


@pytest.mark.parametrize("option", ["--images", "--text-tokens", "--jobs", "--buckets"])
def test_no_room_asked_for(refused: Callable[..., str], tiny_path: Path, option: str) -> None:
    assert "must be at least 1" in refused(tiny_path, "--recipe", "off", option, "0")


@pytest.mark.parametrize("arguments", [["--recipi", "off"], ["--backend", "tpu"], ["--buckets", "many"]])
def test_a_wrong_option(refused: Callable[..., str], arguments: list[str]) -> None:
    assert "--help" in refused(*arguments)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("error", "code", "jobs"), [(UserError("broke"), 2, 1), (UserError("broke"), 2, 2), (KeyboardInterrupt(), 130, 1)]
)
def test_a_build_that_fails_leaves_the_old_bundle(
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    jobs: int,
) -> None:
    old = tmp_path / "out" / "bundle"
    old.mkdir(parents=True)
    manifest = {"format": bundle.FORMAT, "files": {bundle.WEIGHTS: "a bundle's, be it damaged"}}
    (old / bundle.MANIFEST).write_text(json.dumps(manifest))
    (old / bundle.WEIGHTS).write_bytes(b"weights")
    before = content(tmp_path / "out")

    def fail(_graph: object, name: str, weights: Any) -> None:
        """Perhaps in a process of its own: what it saw is left in a file."""
        (weights.folder / f"{name}.onnx").write_bytes(b"half")
        part = tmp_path / f"seen.{os.getpid()}"  # in one step: the other process's error may end this one at any time
        part.write_text(str(len(list((tmp_path / "out").iterdir()))))
        part.replace(tmp_path / "seen")
        raise error

    monkeypatch.setattr("export.pipeline.export", fail)
    assert build.main([str(tiny_path), "--recipe", "off", "--jobs", str(jobs), "--out", str(old)]) == code
    one_line(capsys.readouterr().err)
    assert (tmp_path / "seen").read_text() == "2"  # it did write something: a folder beside the old one
    assert content(tmp_path / "out") == before


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "export" / "build.py", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd)


def test_a_folder_that_is_no_bundle_is_not_replaced(tmp_path: Path) -> None:
    """As a process, from another directory: refused before anything heavy is loaded."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    done = run("--out", mine, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a bundle" in one_line(done.stderr)
    assert content(tmp_path) == {"mine/thesis.txt": b"all of it"}


def test_a_wrong_folder_as_a_process(tmp_path: Path) -> None:
    done = run("nothing", "--out", "bundle", "--recipe", "off", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing is not a Hugging Face checkpoint" in one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_help_teaches() -> None:
    done = run("--help", cwd=ROOT)
    assert done.returncode == 0
    assert all(
        word in done.stdout for word in ("python export/build.py", "--recipe", "balanced", "trt-rtx", "default:")
    )
