"""export/build.py and the user's mistakes: exit code 2, one line on standard error, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import bundle
from engines.errors import UserError
from export import build
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.graphs import State
from tests.export import tiny
from tests.export.conftest import ROOT

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(tiny_path, tmp_path / "checkpoint")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a build that must fail; the line it prints."""

    def run(*arguments: object) -> str:
        folder = tmp_path / "built"
        folder.mkdir()
        assert build.main([*map(str, arguments), "--out", str(folder / "bundle")]) == 2
        assert list(folder.iterdir()) == []
        return one_line(capsys.readouterr().err)

    return run


def one_line(text: str) -> str:
    assert text.startswith("error: "), text
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    return text


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def test_no_checkpoint_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path / "nothing", "--recipe", "off")


def test_a_checkpoint_without_config(refused: Callable[..., str], copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "has no config.json" in refused(copy, "--recipe", "off")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_config_that_is_none(refused: Callable[..., str], copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert "config.json" in refused(copy, "--recipe", "off")


def test_an_unsupported_model_type(refused: Callable[..., str], copy: Path) -> None:
    edit_config(copy, model_type="bert")
    line = refused(copy, "--recipe", "off")
    assert "'bert' is not supported; supported: " in line
    assert " llava, " in line


def test_a_size_that_the_processor_does_not_make(refused: Callable[..., str], tiny_path: Path) -> None:
    side = tiny.IMAGE_SIZE
    line = refused(tiny_path, "--recipe", "off", "--image-sizes", f"{side}x{side}", f"{side}x{2 * side}")
    assert f"--image-sizes {side}x{2 * side}: " in line
    assert f"makes {side}x{side} of every picture" in line


@pytest.mark.parametrize("text", ["448", "448x", "0x448", "448x448x3", "4e2x4"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text}' is no HEIGHTxWIDTH in pixels, as 448x672"):
        build.arguments("").parse_args(["--image-sizes", text])


def test_pickled_weights_are_not_loaded(refused: Callable[..., str], copy: Path) -> None:
    torch.save(load_file(copy / WEIGHTS), copy / "pytorch_model.bin")
    (copy / WEIGHTS).unlink()
    assert "no .safetensors weights" in refused(copy, "--recipe", "off")


def rename(weights: dict[str, torch.Tensor]) -> None:
    name = next(name for name in weights if "vision" in name)
    weights[name.replace("vision", "visionary")] = weights.pop(name)


def lose(weights: dict[str, torch.Tensor]) -> None:
    del weights[next(name for name in weights if "q_proj" in name)]


def add(weights: dict[str, torch.Tensor]) -> None:
    weights["model.language_model.layers.0.self_attn.extra.weight"] = torch.zeros(3)


def reshape(weights: dict[str, torch.Tensor]) -> None:
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = weights[name][:-1].clone()


@pytest.mark.parametrize(
    ("edit", "word"), [(rename, "missing"), (lose, "missing"), (add, "unexpected"), (reshape, "mismatched")]
)
def test_weights_that_do_not_fit_the_model(
    refused: Callable[..., str], copy: Path, edit: Callable[[dict[str, torch.Tensor]], object], word: str
) -> None:
    edit_weights(copy, edit)
    assert word in refused(copy, "--recipe", "off")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["q_proj", "vision_tower", "lm_head"])
def test_weights_that_are_no_numbers(refused: Callable[..., str], copy: Path, part: str, value: float) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[next(name for name in weights if part in name and name.endswith("weight"))].flatten()[3] = value

    edit_weights(copy, spoil)
    assert "is not finite" in refused(copy, "--recipe", "off")


TEMPLATE = "chat_template.jinja"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": ["llava"]}, "is not supported"),
        ("config.json", {"vision_feature_layer": 77}, "vision encoder cannot be run"),
        ("config.json", {"image_token_index": 9999, "image_token_id": 9999}, "0 image tokens (id 9999)"),
        ("config.json", {"image_token_index": 7, "image_token_id": 7}, "image tokens (id 7)"),
        ("processor_config.json", {"patch_size": 32}, "patch size of the processor do not fit"),
        (TEMPLATE, "", "makes no prompt with an image"),
        (TEMPLATE, "{{ 1 / 0 }}", "makes no prompt with an image"),
        (TEMPLATE, "{% if %}", "makes no prompt with an image"),
        (TEMPLATE, "user : {{ messages[0]['content'][1]['text'] }}", "makes no prompt with an image"),
        ("adapter_config.json", {}, "merge it into the model"),
    ],
)
def test_a_checkpoint_whose_parts_do_not_fit(
    refused: Callable[..., str], copy: Path, file: str, change: Any, message: str
) -> None:
    if file == TEMPLATE:
        (copy / file).write_text(change)
    else:
        known = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
        (copy / file).write_text(json.dumps(known | change))
    assert message in refused(copy, "--recipe", "off")


def test_a_sliding_window_bounds_its_layers_and_not_the_prompt(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"] |= {"model_type": "mistral", "sliding_window": 80}
    (copy / "config.json").write_text(json.dumps(config))
    checkpoint = checkpoints.load(copy)
    assert checkpoint.max_positions() == tiny.POSITIONS
    assert checkpoint.max_positions(scale=2.0) == 2 * tiny.POSITIONS
    assert checkpoint.decoder.sliding_windows == [80] * checkpoint.decoder.num_layers
    assert State(checkpoint.decoder, recipes.load("off"), 128).capacities == [80] * checkpoint.decoder.num_layers


@pytest.mark.parametrize("prompt", [None, 3, "what is in this <image> ?"])
def test_a_sample_that_makes_no_prompt(refused: Callable[..., str], copy: Path, prompt: Any) -> None:
    line = json.dumps({"images": ["0.png"], "prompt": prompt})
    (copy / "samples" / "samples.jsonl").write_text(line)
    assert "prompt" in refused(copy, "--recipe", "light")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(refused: Callable[..., str], copy: Path, share: float) -> None:
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[: int(share * len(data))])
    assert str(copy) in refused(copy, "--recipe", "off")


def test_no_tokenizer(refused: Callable[..., str], copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert "processor" in refused(copy, "--recipe", "off")


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


def test_no_samples(refused: Callable[..., str], copy: Path) -> None:
    shutil.rmtree(copy / "samples")
    assert "--samples" in refused(copy, "--recipe", "light")


def test_a_sample_without_its_image(refused: Callable[..., str], copy: Path) -> None:
    (copy / "samples" / "1.png").unlink()
    assert "1.png does not exist" in refused(copy, "--recipe", "light")


def test_a_sample_with_a_truncated_image(refused: Callable[..., str], copy: Path) -> None:
    image = copy / "samples" / "1.png"
    image.write_bytes(image.read_bytes()[:100])
    assert "1.png cannot be read" in refused(copy, "--recipe", "light")


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
