"""`python -m calibration plan` as a user meets it: its table, its JSON, its devices, and mistakes in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calibration import __main__ as command_line
from calibration.commands.plan import PLANNED
from calibration.devices import Figure, devices
from calibration.plan import Chat, Planner, Row, size
from engines.bundle import Bundle
from engines.config import parse
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.graphs import Prefill, State
from export.recipe import Recipe
from tests.export import tiny
from tests.export.test_every_method import TABLES, cases

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, model: Path = DEMO) -> tuple[int, str, str]:
    code = command_line.main(["plan", "--device", "orin-nano-8gb", "--model", str(model), *arguments])
    return code, *capsys.readouterr()


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--images", "4", "--turns", "2", "--recipe", "balanced", "--recipe", "extreme", "--weights", "int4")
    code, out, _ = plan(capsys, *asked, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["chat"] == {"images": 4, "text": 24, "turns": 2, "answer": 64}
    assert told["device"]["memory"]["source"]
    assert [row["recipe"] for row in told["recipes"]] == ["balanced", "extreme"]
    assert {field.name for field in dataclasses.fields(Row)} == set(told["recipes"][0])
    _, table, _ = plan(capsys, *asked)
    for row in told["recipes"]:
        line = next(line for line in table.splitlines() if row["recipe"] in line and "│" in line)
        assert f" {row['bucket']} " in line
        assert f" {size(row['kv_bytes'])} " in line
        assert f"{row['recipe']}: {row['verdict']}" in " ".join(table.split())


def test_default_recipes_are_the_levels_of_the_default_bundle(
    capsys: pytest.CaptureFixture[str], demo_bundle: Bundle
) -> None:
    rows = json.loads(plan(capsys, "--json")[1])["recipes"]
    assert set(demo_bundle.manifest.levels) == set(PLANNED)
    assert [row["recipe"] for row in rows] == [*PLANNED, "pages", "tuned"]  # the checkpoint's own, once


def test_weights_are_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DEMO, tmp_path / "demo", ignore=shutil.ignore_patterns("*.safetensors", "samples", "*.svg"))
    with_weights = plan(capsys, "--recipe", "balanced")[1].replace("demo-vlm", "demo")
    assert plan(capsys, "--recipe", "balanced", model=tmp_path / "demo")[1] == with_weights


def test_what_one_recipe_cannot_do_is_told_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.toml"
    short.write_text('[shorten]\nmethod = "fastv"\nkeep = 0.3\n')
    code, out, _ = plan(capsys, "--recipe", "light", "--recipe", str(short))
    assert code == 0
    assert "short: not planned: recipe short: a prompt of 1 image has" in " ".join(out.split())
    code, out, error = plan(capsys, "--recipe", str(short))
    assert (code, out, error.count("\n")) == (2, "", 1)


def test_every_known_device_says_where_its_numbers_are_from() -> None:
    known = devices()
    assert {"orin-nano-8gb", "orin-nx-16gb", "agx-orin-64gb", "h200"} <= set(known)
    for device in known.values():
        figures = [value for value in vars(device).values() if isinstance(value, Figure)]
        assert len(figures) == 4
        assert all(len(figure.source) > 10 for figure in figures)
        assert device.int8.value / device.fp16.value == pytest.approx(2, rel=0.01)
    for name in ("orin-nano-8gb", "orin-nx-16gb"):
        assert known[f"{name}-super"].int8.value > known[name].int8.value


def test_a_device_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n' + "".join(f"{n}.value = 1e9\n" for n in ("memory", "bandwidth", "fp16", "int8")))
    arguments = ["plan", "--model", str(DEMO), "--recipe", "light", "--reserve", "0", "--json"]
    assert command_line.main([*arguments, "--device", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["free_bytes"] == 10**9 - told["weight_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "toaster"], "no device 'toaster': choose from orin-nano-8gb, "),
        (["--device", "nowhere.toml"], "device file nowhere.toml does not exist"),
        (["--model", "nowhere"], "nowhere is not a Hugging Face checkpoint: it has no config.json"),
        (["--recipe", "nothing"], "no recipe 'nothing': presets are "),
        (["--images", "0"], "must be at least 1, got 0"),
        (["--images", "40"], "tokens and an answer of 64 pass the 1024 positions of the model"),
        (["--reserve", "much"], "must be a number of GiB from 0, got 'much'"),
        (["--reserve", "-1"], "must be a number of GiB from 0, got '-1'"),
        (["--weights", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = plan(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1", "mine.toml.name: expected str"),
        ('name = "a"', "missing key 'memory'"),
        ('name = "a"\nmemory.value = 0', "value must be above 0, got 0"),
        ('name = "a"\nram.value = 1', "unknown key 'ram'"),
        ("name =", "cannot be read"),
    ],
)
def test_a_device_file_with_a_mistake(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    code, out, error = plan(capsys, "--device", str(tmp_path / "mine.toml"))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert message in error


def test_a_configuration_that_makes_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(edit: Callable[[dict], None]) -> str:
        shutil.copytree(DEMO, tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        config = json.loads((DEMO / "config.json").read_text())
        edit(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
        code, out, error = plan(capsys, model=tmp_path)
        assert (code, out, error.count("\n")) == (2, "", 1)
        return error

    assert "makes no model" in change(lambda config: config["text_config"].update(hidden_act="sing"))
    assert "model type 'other' is not supported" in change(lambda config: config.update(model_type="other"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("small") / "checkpoint")


@pytest.fixture(scope="module")
def both(small: Path) -> tuple[Checkpoint, Checkpoint]:
    """With weights, and without."""
    return checkpoints.load(small), checkpoints.load(small, weights=False)


@pytest.mark.parametrize(("slot", "table"), list(cases()))
def test_every_method_is_planned_as_its_prefill_allocates(
    both: tuple[Checkpoint, Checkpoint], slot: str, table: dict[str, Any]
) -> None:
    loaded, skeleton = both
    recipe = parse(Recipe, {"name": "test", **TABLES, slot: {**TABLES.get(slot, {}), **table}}, "test")
    row = Planner(skeleton, devices()["h200"], "fp16", 0, Chat(images=8, text=4)).row(recipe)
    decoder = loaded.decoder
    prefill = Prefill(State(decoder, recipe, row.bucket), tiny.statistics(decoder)).eval()
    with torch.no_grad():
        made = prefill(*(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in prefill.inputs.values()))
    state = [tensor for name, tensor in zip(prefill.outputs, made, strict=True) if name != "logits"]
    assert row.kv_bytes == sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert row.decode_seconds > 0
