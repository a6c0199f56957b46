"""The report from command to page, and the page in a browser: all of it shows, and nothing leaves the file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibration import __main__ as command_line
from calibration import samples as sampling
from calibration import survey
from calibration.report import SAMPLES, budget
from calibration.report.assemble import spread_out
from calibration.tune import Trial
from engines.guard import Failure, Limits, Task, Verdict
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.graphs import State
from export.pipeline import Prepared
from tests import browser
from tests.export import tiny

DEMO = Path(__file__).parents[3] / "models" / "demo-vlm"
EVIL = "what color is <script>alert(1)</script> ?"
SECTIONS = {
    "Budget",
    "Attention by depth",
    "Attention by head",
    "Which tokens get it",
    "What the cache holds",
    "Recipes",
}
PICTURES = {"Where it looks", "What each selector keeps", "What each level keeps in the cache"}
MEASURED = {"Guard", "Accuracy against bytes", "Latency", "Search for a recipe"}

VERDICT = Verdict(
    recipe="balanced",
    later=True,
    holds=False,
    reasons=[EVIL],
    warnings=[EVIL],
    limits=Limits(),
    calibrated=9,
    held_out=3,
    tokens=12,
    read=9,
    layers=[1, 2],
    attention_kl=[[0.01, 0.02], [0.5, 0.7]],
    logit_kl=0.01,
    perplexity=2.0,
    perplexity_compressed=2.5,
    perplexity_change=25.0,
    tasks={EVIL: Task(3, 100.0, 66.7, -33.3, 27.2)},
    failures=[Failure("semantic drift", None, None, 2.0, 0, EVIL)],
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.llava(bias=True)
    model.lm_head.weight[4] = 0  # the answer of a random model could be an image's token
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint", model)
    lines = [
        {"images": ["0.png"], "prompt": EVIL, "answer": "red", "task": EVIL},
        {"images": ["1.png", "0.png"], "prompt": "how many digits ?"},
    ]
    (folder / "samples" / sampling.FILE).write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def accuracy_file(path: Path) -> Path:
    cell = {"suite": "$a_b$ " + EVIL, "questions": 9, "accuracy": 0.5, "standard_error": 0.1, "kv_ratio_mean": 0.2}
    cells = [
        cell | {"regime": regime, "level": level, "kv_ratio_mean": share}
        for regime in ("prompt", "later")
        for level, share in (("off", 1.0), ("balanced", 0.2), ("refused", None))
    ]
    path.write_text(json.dumps({"command": "python scripts/accuracy.py", "cells": cells}))
    return path


def latency_file(path: Path, level: str, kv_bytes: int) -> Path:
    times = [{"backend": "ort", "kind": kind, "median": 1.5} for kind in ("vision", "prefill", "decode")]
    request = {"level": level, "kv_bytes": kv_bytes, "kv_bytes_uncompressed": 4096}
    path.write_text(json.dumps({"request": request, "seconds_per_token": 0.001, "latency_ms": times}))
    return path


def trials_file(path: Path) -> Path:
    known = Trial("layers", EVIL, {}, 100.0, 0.2, 98.0, VERDICT, True, "better")
    trials = [known, Trial("bits", "wider", {}, why="not possible")]
    path.write_text(json.dumps({"trials": [dataclasses.asdict(trial) for trial in trials]}))
    return path


def guard_file(path: Path) -> Path:
    path.write_text(json.dumps({"recipe": None, "verdicts": [dataclasses.asdict(VERDICT)]}))
    return path


@pytest.fixture(scope="module")
def pages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a random model, without and with what other commands measure, and of the demo model."""
    made = tmp_path_factory.mktemp("pages")
    files = [
        "--guard",
        guard_file(made / "guard.json"),
        "--accuracy",
        accuracy_file(made / "accuracy.json"),
        "--trials",
        trials_file(made / "trials.json"),
        "--latency",
        latency_file(made / "off.json", "off", 4096),
        "--latency",
        latency_file(made / "balanced.json", "balanced", 1024),
    ]
    runs: dict[str, list[Any]] = {
        "bare": [folder],
        "full": [folder, *files],
        "demo": [DEMO, "--limit", "2", "--recipe", "balanced", "--recipe", "chat"],
    }
    for name, arguments in runs.items():
        out = made / f"{name}.html"
        assert command_line.main(["report", *map(str, arguments), "--out", str(out)]) == 0
    assert sorted(path.suffix for path in made.iterdir()) == [".html"] * 3 + [".json"] * 5
    return {name: made / f"{name}.html" for name in runs}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", ["bare", "full", "demo"])
def test_in_a_browser(chromium: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    browser.screen(chromium, width, scheme)
    asked = browser.opened(chromium, pages[name].as_uri())
    assert asked[0] == pages[name].as_uri()
    assert [url for url in asked[1:] if not url.startswith("data:")] == []
    assert chromium.get_log("browser") == []
    run = chromium.execute_script
    sizes = run("return [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.clientWidth])")
    assert len(sizes) > 10
    assert all(done and min(size) > 0 for done, *size in sizes)
    drawings = run(
        "return [...document.querySelectorAll('svg')].map(s => [s.clientWidth, s.querySelectorAll('path').length])"
    )
    assert len(drawings) > 20
    assert all(wide > 200 and paths > 5 for wide, paths in drawings)
    targets = run("return [...document.querySelectorAll('nav a')].map(a => !!document.querySelector(a.hash))")
    assert len(targets) >= 10
    assert all(targets)
    assert (
        run("const all = [...document.querySelectorAll('[id]')].map(e => e.id); return all.length - new Set(all).size")
        == 0
    )
    assert run("return document.documentElement.scrollWidth") <= width
    # On a phone too: words are whole, and what a level saves is beside its name.
    widths = run("return [...document.querySelectorAll('figcaption, pre, p')].map(e => [e.scrollWidth, e.clientWidth])")
    assert all(needed <= wide for needed, wide in widths)
    ends = "return [...document.querySelectorAll('th')].filter(e => e.innerText == 'of fp16')[0]"
    assert run(f"{ends}.getBoundingClientRect().right") <= width
    # Ink and paper differ, and drawings take the page's ink.
    paper, ink = (run(f"return getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
    bright = {what: sum(map(int, color[4:-1].split(","))) for what, color in (("paper", paper), ("ink", ink))}
    assert (bright["paper"] > bright["ink"] + 300) == (scheme == "light")
    assert run("return getComputedStyle(document.querySelector('svg text')).fill") == ink


def headings(page: Path) -> set[str]:
    text = page.read_text()
    return {part.split("</h2>")[0].split(">")[1] for part in text.split("<h2 ")[1:]}


@pytest.mark.parametrize("name", ["bare", "full", "demo"])
def test_the_page_holds_all_sections(pages: dict[str, Path], name: str) -> None:
    assert headings(pages[name]) == SECTIONS | PICTURES | (MEASURED if name == "full" else {"Not measured"})
    text = pages[name].read_text()
    assert all(f"{title}</h" in text for title in MEASURED)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/", "")
    assert pages[name].stat().st_size < 3 * 2**20


def test_what_samples_and_files_say_is_escaped(pages: dict[str, Path]) -> None:
    for name in ("bare", "full"):
        text = pages[name].read_text()
        assert "<script" not in text.lower()
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_the_same_command_writes_the_same_page(folder: Path, pages: dict[str, Path], tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    assert command_line.main(["report", str(folder), "--out", str(again)]) == 0
    assert again.read_bytes() == pages["bare"].read_bytes()


def test_the_demo_has_samples_enough_to_go_without_a_warning() -> None:
    few = spread_out(sampling.read(DEMO / "samples", text_only=True), SAMPLES)
    assert survey.warnings(len(few), sum(bool(sample.images) for sample in few), checkpoints.load(DEMO)) == []


def test_every_level_keeps_its_color() -> None:
    """`off` is larger than an fp16 cache: it is drawn by slots and not by bytes."""
    checkpoint = checkpoints.load(DEMO)
    levels = {name: recipes.load(name, DEMO) for name in ("off", "balanced", "chat")}
    section = budget.budget(checkpoint, levels, dict.fromkeys(levels, Prepared(checkpoint.decoder)))
    slots, layers, total = (colors(plot.svg) for plot in section.plots)
    assert {*levels, "prompt"} <= set(slots)
    assert "off" not in layers
    assert all(slots[name] == layers[name] for name in ("balanced", "chat"))
    assert total["fp16 cache"] == layers["fp16 cache"] == slots["prompt"] == "currentColor"
    known = {slots[name] for name in levels}
    assert len(known) == 3
    assert not known & {total["store"], total["window"]}


def colors(svg: str) -> dict[str, str]:
    """Of a legend's entries, by name: the text lies behind the line or patch."""
    found: dict[str, str] = {}
    last = ""
    for color, text in re.findall(r"(?:stroke|fill): (#\w+|currentColor)|<text[^>]*>([^<]*)</text>", svg):
        last, found = color or last, found | ({text: last} if text else {})
    return found


@pytest.mark.parametrize("name", ["off", "balanced", "dense-document"])
def test_bytes_of_layers_and_window_are_all_bytes(folder: Path, name: str) -> None:
    checkpoint, recipe = checkpoints.load(folder), recipes.load(name)
    size = budget.size_of(checkpoint, recipe, Prepared(checkpoint.decoder))
    tensors = State(checkpoint.decoder, recipe, size.length).specs().values()
    each = {spec.name: np.zeros(spec.shape, spec.dtype).nbytes for spec in tensors}
    assert size.total == sum(each.values())
    for layer, (slots, held) in enumerate(zip(size.slots, size.layers, strict=True)):
        mine = [spec for spec in tensors if spec.name.endswith(f".{layer}")]
        assert held == sum(each[spec.name] for spec in mine)
        assert {spec.shape[2] for spec in mine if spec.name.startswith("store_")} == {slots}
    assert size.total - sum(size.layers) == sum(held for name, held in each.items() if "." not in name)
    template = len(checkpoint.processor.tokenizer(text_around(checkpoint))["input_ids"])
    assert (
        size.uncompressed == (template + 24 + tiny.IMAGE_TOKENS) * 3 * 2 * 2 * 16 * 2
    )  # layers, K and V, heads, channels, bytes


def text_around(checkpoint: Any) -> str:
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ""}]}
    text = checkpoint.processor.apply_chat_template([message], add_generation_prompt=True)
    return text.replace(checkpoint.processor.image_token, "")


def test_text_alone_leaves_out_what_it_cannot_tell(folder: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    (samples / sampling.FILE).write_text(json.dumps({"images": [], "prompt": "how many digits ?", "answer": "3"}))
    out = tmp_path / "text.html"
    assert command_line.main(["report", str(folder), "--samples", str(samples), "--out", str(out)]) == 0
    assert headings(out) == SECTIONS | {"Not measured"}
    assert survey.TEXT_ONLY in out.read_text().replace("&#39;", "'")


@pytest.mark.parametrize("option", ["--guard", "--accuracy", "--latency", "--trials"])
@pytest.mark.parametrize("content", ["{}", "[1]", '{"cells": [], "trials": [{}], "verdicts": 1}', "no json", None])
def test_a_foreign_file_is_one_line(
    folder: Path, tmp_path: Path, capsys: Any, option: str, content: str | None
) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    assert command_line.main(["report", str(folder), option, str(file), "--out", str(tmp_path / "x.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(file) in error
    assert not list(tmp_path.glob("*.html"))


def test_another_models_map_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    known = survey.measure(checkpoints.load(folder), sampling.read(folder / "samples"))
    dataclasses.replace(known, facts=dataclasses.replace(known.facts, weights="other")).save(tmp_path / "map")
    arguments = ["report", str(folder), "--map", str(tmp_path / "map"), "--out", str(tmp_path / "x.html")]
    assert command_line.main(arguments) == 2
    assert "with other weights" in capsys.readouterr().err
    known.save(tmp_path / "map")
    assert command_line.main(arguments) == 0


def test_nowhere_to_write_is_told_before_the_work(folder: Path, tmp_path: Path, capsys: Any) -> None:
    for out in (tmp_path, tmp_path / "missing" / "x.html"):
        assert command_line.main(["report", str(folder), "--out", str(out)]) == 2
        assert "give one by --out" in capsys.readouterr().err
    assert command_line.main(["report", str(folder), "--out", str(folder / "x.html")]) == 2
    assert "which is read: choose a place outside of it" in capsys.readouterr().err
