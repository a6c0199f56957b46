"""export/build.py and checkpoints that are wrong: exit code 2, one line on standard error, nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from export import checkpoint as checkpoints
from export import recipe as recipes
from export.graphs import State
from tests.export import tiny

WEIGHTS = "model.safetensors"


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
        (
            TEMPLATE,
            "{% set a = range(99999) | list %}" + 3 * "{% for i in a %}" + 3 * "{% endfor %}",
            "as if it had no end",
        ),
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
