"""What graphs and images take is measured, and the budget is kept on the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import Bundle
from engines.errors import UserError
from engines.plugins import store
from runtime import probe
from runtime.memory import MIB, Cost
from tests.runtime.onnx_builder import Builder

if not Path("/proc/self/statm").exists():
    pytest.skip("a memory budget needs Linux", allow_module_level=True)


def heavy_graph(path: Path) -> None:
    """64 MiB of activations from one number, 32 MiB of weights."""
    g = Builder()
    x = g.input("x", "float32", 1)
    wide = g("Mul", g("Expand", x, g.const([16 * MIB])), g("Sqrt", x))
    weights = g.const(np.random.default_rng(0).normal(size=(8, MIB)))
    both = g("Add", g("ReduceSum", wide, keepdims=0), g("ReduceSum", g("Mul", weights, x), keepdims=0))
    g.output("y", both, "float32")
    g.save(path, "decode")


def test_what_a_graph_takes_is_measured(tmp_path: Path) -> None:
    heavy_graph(tmp_path / "heavy.onnx")
    ((_, cost),) = probe._measured({"heavy": [str(tmp_path / "heavy.onnx"), 1, None]})
    assert 32 * MIB <= cost.loaded < 80 * MIB
    assert 64 * MIB <= cost.running < 300 * MIB


def test_a_graph_that_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"the memory of graph broken cannot be measured: .*broken\.onnx"):
        [*probe._measured({"broken": [str(tmp_path / "broken.onnx"), 1, None]})]


def test_measures_are_kept(opened: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    runs: list[int] = []

    def measured(wanted: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
        runs.append(len(wanted))
        return ((name, Cost(i, 2 * i)) for i, name in enumerate(wanted))

    monkeypatch.setattr(probe, "_measured", measured)
    first = probe.costs(opened, 1, None)
    assert probe.costs(opened, 1, None) == first
    assert runs == [len(opened.manifest.graphs)]
    probe.costs(opened, 2, None)  # other threads
    assert len(runs) == 2
    for damage in (
        b"",
        b"[]",
        b'{"a": 1}',
        json.dumps({name: {"loaded": "x", "running": 1} for name in first}).encode(),
    ):
        for file in (tmp_path / "memory").iterdir():
            file.write_bytes(damage)
        assert probe.costs(opened, 1, None) == first
    assert len(runs) == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), UserError("out of memory")])
def test_measuring_that_is_interrupted_goes_on(
    opened: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    total, runs = len(opened.manifest.graphs), list[list[str]]()

    def measured(wanted: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
        runs.append([*wanted])
        for number, name in enumerate(wanted):
            if number == 3 and len(runs) == 1:
                raise error
            yield name, Cost(len(runs), number)

    monkeypatch.setattr(probe, "_measured", measured)
    told = "the same command goes on" if isinstance(error, KeyboardInterrupt) else None
    with pytest.raises(type(error), match=told):
        probe.costs(opened, 1, None)
    told = capsys.readouterr().err
    assert told.startswith(f"measuring the memory that each of {total} graphs takes, once for this bundle")
    assert told.count("\n") == 1  # no terminal: no counting
    (file,) = (tmp_path / "memory").iterdir()
    assert len(json.loads(file.read_text())) == 3
    costs = probe.costs(opened, 1, None)
    assert runs[1] == runs[0][3:]
    assert [costs[name].loaded for name in runs[0]] == [1] * 3 + [2] * (total - 3)
    began, ended = capsys.readouterr().err.splitlines()
    assert began.startswith(f"measuring the memory that each of {total - 3} graphs takes")
    assert re.fullmatch(rf"measured the memory that each of {total - 3} graphs takes, in \d+ s", ended)
    assert probe.costs(opened, 1, None) == costs
    assert capsys.readouterr().err == ""


MEASURES = """
import sys
from runtime import probe
graphs = {str(number): [sys.argv[1], 1, None] for number in range(1000)}
for name, _ in probe._measured(graphs):
    print(name, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_measures_for_a_terminal_ends_with_it_and_says_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to all of a terminal's processes; what they say is the first one's."""
    heavy_graph(tmp_path / "heavy.onnx")
    command = [sys.executable, "-c", MEASURES, str(tmp_path / "heavy.onnx")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "0\n"
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=60)  # which waits for all that hold its pipes
    assert told.count("Traceback") == (number == signal.SIGINT)  # the program's own here
    assert "_main" not in told


def test_what_is_not_awaited_is_not_measured_to_its_end(tmp_path: Path) -> None:
    heavy_graph(tmp_path / "heavy.onnx")
    graphs = probe._measured({str(number): [str(tmp_path / "heavy.onnx"), 1, None] for number in range(1000)})
    assert next(graphs)[0] == "0"
    graphs.close()  # type: ignore[attr-defined]


DECODING = """
import io, os, sys
import numpy as np
from PIL import Image
from engines.layout import Layout
from engines.preprocessor import AnyRes, Grid, ImagePreprocessor, Patches, Plain, Split
from runtime.memory import settle
from runtime.preprocess import decoding_bytes, preprocess
from tests.layouts import made_by
settings = ImagePreprocessor(Plain({"height": 64, "width": 64}, None), 3, 1 / 255, [0.5] * 3, [0.5] * 3)
KINDS = [Split(1536, 512), Grid(512, 512, 1, 6), AnyRes(512, [[1024, 1536]]), Patches(16, 2, 2, 1572864, 1572864)]
status = lambda name: next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))
pixels = np.random.default_rng(0).integers(0, 256, (100, 150, 4), np.uint8).repeat(8, 0).repeat(8, 1)
Image.init()
kinds = {"PNG": 4, "JPEG": 3, "WEBP": 4, "JPEG2000": 4, "TIFF": 4, "GIF": 3, "TGA": 4}
sources = [pixels, pixels[..., :3], pixels[..., 0], Image.fromarray(pixels)]
for kind, channels in kinds.items():
    if kind in Image.SAVE:
        Image.fromarray(pixels[..., :channels]).save(file := io.BytesIO(), kind)
        sources.append(file.getvalue())
del pixels
tiles, size = [ImagePreprocessor(kind, 3, 1 / 255, [0.5] * 3, [0.5] * 3) for kind in KINDS], (1024, 1536)
jobs = [(source, settings, made_by(settings)) for source in sources]
small, shapes = np.zeros((60, 90, 3), np.uint8), ([7, 3, 512, 512], [7, 3, 512, 512], [7, 3, 512, 512], [6144, 1536])
jobs += [(small, own, Layout("1024x1536", *size, shape, "x", 1)) for own, shape in zip(tiles, shapes, strict=True)]
preprocess(np.zeros((9, 9, 3), np.uint8), settings, made_by(settings))
for source, settings, layout in jobs:
    settle()
    if os.fork() == 0:
        before = status("VmRSS")
        made = preprocess(source, settings, layout)
        print(status("VmHWM") - before - made.nbytes, decoding_bytes(source, settings, layout), flush=True)
        os._exit(0)
    os.wait()
"""


def test_decoding_an_image_takes_no_more_than_its_header_says() -> None:
    done = subprocess.run([sys.executable, "-c", DECODING], capture_output=True, text=True, check=True)
    rows = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) >= 12
    for took, bound in rows:
        assert took <= bound + 4 * MIB  # code of the decoder
        assert bound < 200 * 1024 * 1536


PROMISE = """
import json, sys, threading
import numpy as np
import runtime
from engines.errors import UserError
from runtime.memory import OverBudget
from runtime.session import Session

pictures = [np.random.default_rng(k).integers(0, 256, (300 + 200 * k, 500, 3), np.uint8) for k in range(8)]
vlm = runtime.open(sys.argv[1], level=sys.argv[3], threads=1, memory_budget=int(sys.argv[2]))
told = []

def attempt(what, run):
    try:
        told.append((what, "answered", run().stats.level))
    except OverBudget as error:
        told.append((what, "refused", str(error)))
    except UserError as error:  # a level that never compacts is full
        told.append((what, "full", str(error)))

def work():
    attempt("small", lambda: vlm.generate("what color is the shape?", [pictures[0][:64, :64]]))
    for count in (1, 4, 8, 2):
        ask = lambda: vlm.generate("what color is the shape?", pictures[:count], max_new_tokens=8, ignore_eos=True)
        attempt(f"ask {count}", ask)
    try:
        chat = Session(vlm)
    except OverBudget as error:
        told.append(("session", "refused", str(error)))
        return
    for count in (1, 0, 2):
        attempt(f"turn {count}", lambda: chat.ask("what is it?", pictures[:count], max_new_tokens=16, ignore_eos=True))
    attempt("fork", lambda: chat.fork().ask("how many shapes?", max_new_tokens=8))

threads = [threading.Thread(target=work) for _ in range(int(sys.argv[4]))]
[thread.start() for thread in threads], [thread.join() for thread in threads]
# Not ru_maxrss, in which the process that started this one counts too.
highest = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([highest * 1024, told]))
"""


@pytest.mark.slow
def test_the_budget_is_never_exceeded(demo_bundle: Bundle) -> None:
    """The promise, on the real model: the most that was ever resident, in a process of its own."""

    def run(mib: int, level: str, threads: int) -> tuple[int, list[list[str]], str]:
        line = [sys.executable, "-c", PROMISE, str(demo_bundle.path), str(mib * MIB), level, str(threads)]
        done = subprocess.run(line, capture_output=True, text=True)
        highest, told = json.loads(done.stdout) if done.returncode == 0 else (0, [])
        return highest, told, done.stderr

    least = re.search(r"give at least  (\d+)MiB", run(50, "off", 1)[2])
    assert least
    kinds: set[str] = set()
    for mib, level, threads in ((int(least[1]) + 1, "off", 1), (240, "balanced", 3), (400, "off", 4)):
        highest, told, error = run(mib, level, threads)
        assert told, error
        assert highest <= mib * MIB, (mib, level, threads)
        kinds |= {kind for _, kind, _ in told}
        assert ("small", "answered") in [(what, kind) for what, kind, _ in told]
    assert kinds >= {"answered", "refused"}
