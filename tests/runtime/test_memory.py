"""The memory budget: sizes, the ledger, which level a request gets, and that a refusal comes before any allocation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from gc import collect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime
from engines import bundle as bundles
from engines.bundle import Bundle
from engines.errors import UserError, command
from engines.gate import Fallback
from engines.plugins import store
from runtime import admit, memory, probe
from runtime.__main__ import main
from runtime.admit import Admission
from runtime.generate import Request
from runtime.memory import MIB, Cost, Memory, Need, OverBudget, parse_size
from runtime.model import VLM
from runtime.preprocess import preprocess
from runtime.sampling import GREEDY
from runtime.session import Session
from tests.runtime import toy
from tests.runtime.asking import Recorder, ask, image
from tests.runtime.onnx_builder import Builder

if not Path("/proc/self/statm").exists():
    pytest.skip("a memory budget needs Linux", allow_module_level=True)


@pytest.fixture(scope="module")
def opened(bundle_path: Path) -> Bundle:
    return bundles.read(bundle_path)


@pytest.fixture(scope="module")
def costs(opened: Bundle) -> dict[str, Cost]:
    """Of the toy's graphs, as if they were large: what they take is what the test says, not what was measured."""
    return {name: Cost(20 * MIB, 10 * MIB) for name in opened.manifest.graphs}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process of 100 MiB that holds what the test says."""
    state = SimpleNamespace(resident=100 * MIB)
    monkeypatch.setattr(memory, "resident", lambda: state.resident)
    bare(monkeypatch)
    return state


def bare(patch: pytest.MonkeyPatch) -> None:
    """Nothing is done to the real process."""
    for name in ("settle", "populate"):
        patch.setattr(memory, name, lambda *_: None)
    patch.setattr(memory.gc, "collect", lambda: 0)


@pytest.fixture
def limited(
    bundle_path: Path, costs: dict[str, Cost], process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., VLM]:
    """Opens the toy with a budget of so many MiB; each loaded graph takes 20 of them."""
    monkeypatch.setattr(probe, "costs", lambda *_: costs)
    return lambda mib, level="loose": runtime.open(bundle_path, level=level, threads=1, memory_budget=f"{mib}MiB")


def reserved(vlm: VLM) -> int:
    """Bytes in use beside what is resident."""
    assert vlm.memory
    collect()
    return vlm.memory.in_use() - memory.resident()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 1024**3), ("512MiB", 512 * 1024**2), ("1.5 GB", 1_500_000_000), ("7kb", 7000), ("3K", 3000),
     ("12345", 12345), ("12345 B", 12345), ("1tib", 1024**4), (" 0.5Mi ", 524288)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "2 GiBs", "two", "1e9", "nan", "2Gi B", "0x10"])
def test_what_is_no_size_is_one_line(text: str, bundle_path: Path) -> None:
    with pytest.raises(UserError, match="no size: write it like"):
        runtime.open(bundle_path, memory_budget=text)


def test_a_budget_of_nothing_is_refused(bundle_path: Path) -> None:
    with pytest.raises(UserError, match="memory_budget must be at least 1"):
        runtime.open(bundle_path, memory_budget="0")


@given(data=st.data())
def test_the_ledger(data: st.DataObject) -> None:
    """Whatever is reserved, loaded, allocated and given back: resident + what is still to come, graphs once."""
    graphs = {f"g{i}": Cost(data.draw(st.integers(0, 50)), 0) for i in range(4)}
    with pytest.MonkeyPatch.context() as patch:
        resident = data.draw(st.integers(0, 100))
        patch.setattr(memory, "resident", lambda: resident)
        bare(patch)
        ledger = Memory(data.draw(st.integers(1, 400)), graphs)
        held: list[Any] = []
        for _ in range(data.draw(st.integers(1, 12))):
            need = Need(data.draw(st.frozensets(st.sampled_from([*graphs]))), data.draw(st.integers(0, 80)))
            step = data.draw(st.sampled_from(["reserve", "change", "release", "drop", "load", "allocated"]))
            live = [each.need for each in held if each.need.bytes or each.need.graphs]
            if step == "load":
                names = sorted(set().union(*(each.graphs for each in live)) - ledger.loaded.keys())
                if names:
                    ledger.loaded[names[0]] = object()  # type: ignore[assignment]
                    ledger.use(names[0])
                    resident += graphs[names[0]].loaded
            elif step == "reserve":
                # what is loaded for nobody may have to go, but its memory is not freed in this test: it stays resident
                before = len(held)
                held += filter(None, [ledger.reserve(need)])
                assert len(held) == before or ledger.in_use() <= ledger.budget
            elif held:
                chosen = held[data.draw(st.integers(0, len(held) - 1))]
                if step == "change":
                    kept = chosen.need
                    changed = ledger.change(chosen, need)
                    assert chosen.need == (need if changed else kept)
                elif step == "release":
                    chosen.release()
                elif step == "drop":
                    held.remove(chosen)
                elif step == "allocated":
                    moved = min(chosen.need.bytes, need.bytes)
                    chosen.allocated(moved)
                    resident += moved
            chosen = None
            expected = resident + sum(each.need.bytes for each in held)
            for name, cost in graphs.items():
                if name not in ledger.loaded and any(name in each.need.graphs for each in held):
                    expected += cost.loaded
            assert ledger.in_use() == expected


def test_graphs_that_nobody_needs_make_room_the_one_used_last_stays(process: SimpleNamespace) -> None:
    ledger = Memory(200 * MIB, {name: Cost(20 * MIB, 0) for name in "abcd"})
    ledger.loaded = Freed({name: None for name in "abcd"}, process)
    process.resident = 180 * MIB
    for name in "cabd":
        ledger.use(name)
    held = ledger.reserve(Need(frozenset("c"), 10 * MIB))
    assert held
    assert ledger.loaded.keys() == set("abcd")  # there was room
    other = ledger.reserve(Need(frozenset("d"), 40 * MIB))
    assert other
    assert ledger.loaded.keys() == set("cd")  # a and b went; c is needed, though it was used first
    assert ledger.reserve(Need(frozenset(), 31 * MIB)) is None
    assert ledger.loaded.keys() == set("cd")


class Freed(dict):
    """Loaded graphs of 20 MiB, whose memory is free when they are dropped."""

    def __init__(self, graphs: dict[str, None], process: SimpleNamespace) -> None:
        super().__init__(graphs)
        self.process = process

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.process.resident -= 20 * MIB


def chosen(needs: dict[str, int], drops: dict[str, float], in_use: int, budget: int, heavy: bool, rate: float) -> Any:
    """The level by the rule as README states it, and whether memory is short from then on."""
    own, *heavier = needs
    if (in_use + needs[own]) / budget <= (0.6 if heavy else 0.8):
        return own, False
    right = [name for name in heavier if drops[name] <= rate]
    for name in right:
        if in_use + needs[name] <= 0.8 * budget:
            return name, True
    for name in [*right[::-1], own, *(name for name in heavier if name not in right)]:
        if in_use + needs[name] <= budget:
            return name, True
    return None, True


@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=4),
    shares=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    in_use=st.integers(0, 80), heavy=st.booleans(), images=st.integers(0, 9), text=st.integers(1, 300),
)  # fmt: skip
def test_which_level_a_request_gets(
    opened: Bundle, sizes: list[int], shares: list[float], in_use: int, heavy: bool, images: int, text: int
) -> None:
    names = [f"l{i}" for i in range(len(sizes))]
    needs, drops = dict(zip(names, sizes, strict=True)), dict(zip(names, shares, strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "resident", lambda: in_use)
        bare(patch)
        patch.setattr(Admission, "need", lambda self, request, name, decoding=0: Need(frozenset(), needs[name]))
        patch.setattr(Admission, "drops", lambda self, name: drops[name])
        lines = {False: names[::-1], True: names[::-1]}
        roomy = Memory(100 * MIB, {})
        gate = Admission(opened, roomy, lines, lambda later: "l0")
        roomy.budget, roomy.heavy = 100, heavy
        request = Request([toy.IMAGE] * images + [5] * text, [], "l0", 1, False, False, GREEDY)
        rate = Fallback().rate(images * toy.IMAGE_TOKENS, text)
        expected, short = chosen(needs, drops, in_use, 100, heavy, rate)
        if expected is None:
            with pytest.raises(OverBudget):
                gate.admit(request, 0, names)
        else:
            admitted, why = gate.admit(request, 0, names)
            assert admitted.level == expected
            assert bool(why) is short
            assert admitted.reserved is not None
            assert admitted.reserved.need.bytes == needs[expected]
        assert roomy.heavy is short
        assert roomy.pressed == (expected not in ("l0", None))


def test_a_complex_prompt_keeps_its_level_where_a_simple_one_yields(
    limited: Callable[..., VLM], process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = limited(400)
    monkeypatch.setattr(Admission, "drops", lambda self, name: 0.5)
    monkeypatch.setattr(admit, "COMPLEXITY", Fallback(simple=2, complex=6))  # rate 0.5 at 4.86
    process.resident = 260 * MIB  # with three graphs and what they run on it is 84 %
    for words, images, level in (("red", 1, "tight"), ("red " * 20, 3, "loose")):
        stats = ask(vlm, words, [image(i) for i in range(images)], max_new_tokens=2).stats
        text = stats.prompt_tokens - images * toy.IMAGE_TOKENS
        assert (np.log(images * toy.IMAGE_TOKENS) + np.log(text) > 4.86) == (level == "loose")
        assert stats.level == level
        assert stats.reason.startswith("with loose, 85% of the memory budget would be in use (more than ")
        assert stats.reason.endswith("no heavier level is right for this prompt") == (level == "loose")


def test_it_is_refused_before_anything_is_loaded(
    limited: Callable[..., VLM], process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, vlm = Recorder(monkeypatch), limited(400)
    process.resident = 350 * MIB
    decoded: list[object] = []

    def noted(*given: Any) -> np.ndarray:
        decoded.append(given)
        return preprocess(*given)

    monkeypatch.setattr("runtime.model.preprocess", noted)
    with pytest.raises(OverBudget) as refused:
        vlm.stream("what is it", [image(0)])
    assert recorder.loaded == decoded == []
    need = re.fullmatch(
        r"this takes ([\d.]+) MiB, and 350.0 MiB of the memory budget of 400.0 MiB are in use: give smaller or fewer "
        r"images, less text, or a budget of at least  (\d+)MiB",
        str(refused.value),
    )
    assert need
    assert 0 < int(need[2]) - 350 - float(need[1]) < 1.1  # rounded up
    assert not refused.value.waits
    process.resident = 100 * MIB
    assert vlm.stream("what is it", [image(0)])


def test_a_request_waits_for_those_that_run(limited: Callable[..., VLM], process: SimpleNamespace) -> None:
    vlm = limited(230)
    first = vlm.stream("what is it", [image(0)], max_new_tokens=2)
    next(first)
    process.resident = 175 * MIB  # its graphs are loaded
    large = np.zeros((600, 600, 3), np.uint8)
    with pytest.raises(OverBudget, match="try again when others have ended") as refused:
        vlm.stream("what is it", [large])
    assert refused.value.waits
    first.close()
    assert vlm.stream("what is it", [large])
    with pytest.raises(OverBudget, match="give smaller") as refused:
        vlm.stream("what is it", [np.zeros((2000, 2000, 3), np.uint8)])
    assert not refused.value.waits


def test_room_is_given_back_however_a_request_ends(
    limited: Callable[..., VLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = limited(1000)
    assert reserved(vlm) == 0
    stream = vlm.stream("what is it", [image(0)], max_new_tokens=4)
    assert reserved(vlm) > 70 * MIB  # vision, prefill, decode, and what runs
    for _ in stream:
        assert reserved(vlm) > 10 * MIB
    assert reserved(vlm) == 0
    cancelled = vlm.stream("what is it", max_new_tokens=40, ignore_eos=True)
    next(cancelled)
    cancelled.cancel()
    list(cancelled)
    assert reserved(vlm) == 0
    left = vlm.stream("what is it")
    left.close()  # never read
    assert reserved(vlm) == 0
    dropped = vlm.stream("what is it")
    del dropped
    assert reserved(vlm) == 0
    monkeypatch.setattr(vlm, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vlm.generate("what is it")
    assert reserved(vlm) == 0
    with pytest.raises(UserError, match="no such image file"):
        vlm.stream("what is it", ["missing.png"])
    assert reserved(vlm) == 0


def test_what_a_request_needs_is_its_graphs_and_what_they_run_on(limited: Callable[..., VLM]) -> None:
    """Graphs are those that a run loads; the state is what it allocates."""
    vlm = limited(2000, "tight")
    ledger = vlm.memory
    assert ledger
    for words, images, tokens in [("red", 0, 1), ("red", 1, 1), ("red " * 9, 2, 12), ("red " * 40, 1, 3)]:
        ledger.loaded.clear()
        stream = vlm.stream(words, [image(i) for i in range(images)], max_new_tokens=tokens, ignore_eos=True)
        request = stream._request
        need = request.reserved.need  # type: ignore[union-attr]
        for _ in stream:
            pass
        assert ledger.loaded.keys() <= need.graphs
        extra = need.graphs - ledger.loaded.keys()
        assert {name.partition("_")[0] for name in extra} <= {"compact", "extend"}  # what may have been needed
        bucket = next(b for b in vlm.bundle.manifest.levels["tight"].buckets if b.length == stream.result.stats.bucket)
        assert vlm.bundle.manifest.state_bytes(bucket) == stream.result.stats.kv_bytes
        wanted = stream.result.stats.kv_bytes + 10 * MIB + 3 * images * 8 * 8 * 3 * 4
        assert wanted + 8 * MIB < need.bytes < wanted + 8.1 * MIB


def test_answers_are_those_without_a_budget(bundle_path: Path, limited: Callable[..., VLM]) -> None:
    for level in ("loose", "tight", "gated"):
        got = ask(limited(2000, level), "what is it", [image(0), image(1)], max_new_tokens=12, ignore_eos=True)
        free = ask(
            runtime.open(bundle_path, level=level, threads=1), "what is it", [image(0), image(1)], max_new_tokens=12,
            ignore_eos=True,
        )  # fmt: skip
        assert got.stats.reason == ""
        if level != "gated":  # whose pressure is that of the budget
            assert got.tokens == free.tokens


def test_the_visual_gate_follows_the_budget(limited: Callable[..., VLM], process: SimpleNamespace) -> None:
    vlm = limited(1000, "gated")
    process.resident = 120 * MIB
    relaxed = ask(vlm, "what is it", [image(0)], max_new_tokens=1).stats.visual_tokens
    process.resident = 900 * MIB
    pressed = ask(vlm, "what is it", [image(0)], max_new_tokens=1).stats.visual_tokens
    assert pressed < relaxed


def test_sessions_hold_their_state(limited: Callable[..., VLM], process: SimpleNamespace) -> None:
    vlm = limited(1000, "tight")
    buckets = vlm.bundle.manifest.levels["tight"].buckets
    small, large = map(vlm.bundle.manifest.state_bytes, buckets)
    chat = Session(vlm)
    assert reserved(vlm) == small
    longer = Session(vlm, room=40)
    assert reserved(vlm) == small + large
    del longer
    assert reserved(vlm) == small
    chat.ask("what is it", max_new_tokens=2)
    chat._settle()
    assert reserved(vlm) == 0  # all of it is resident
    twin = chat.fork()
    assert chat.context
    shared = sum(array.nbytes for name, array in chat.context.state.arrays.items() if "store" in name)
    assert reserved(vlm) == shared
    twin.ask("how many big red blue", max_new_tokens=8, ignore_eos=True)
    twin._settle()
    assert twin.context
    assert twin.context.state.compactions > 0  # it has its own store
    assert reserved(vlm) == 0
    del twin
    process.resident = 1000 * MIB - shared
    for begin in (lambda: Session(vlm), chat.fork):
        with pytest.raises(OverBudget):
            begin()


def test_a_turn_that_does_not_fit_leaves_the_session_as_it_was(
    limited: Callable[..., VLM], process: SimpleNamespace
) -> None:
    def answers(short: bool) -> list[str]:
        chat, texts = Session(limited(1000, "tight")), []
        for question in ("what is it", "how many", "left right"):
            if short:
                process.resident = 990 * MIB
                with pytest.raises(OverBudget):
                    chat.ask(question, [image(1)])
                process.resident = 100 * MIB
            texts.append(chat.ask(question, max_new_tokens=3).text)
        return texts

    assert answers(short=True) == answers(short=False)


def test_a_saved_session_needs_room_to_be_read(
    limited: Callable[..., VLM], process: SimpleNamespace, tmp_path: Path
) -> None:
    vlm = limited(1000, "tight")
    chat = Session(vlm)
    chat.ask("what is it", max_new_tokens=2)
    chat.save(tmp_path / "chat")
    assert Session.load(vlm, tmp_path / "chat").ask("how many").text == chat.ask("how many").text
    assert reserved(vlm) == 0
    with pytest.raises(UserError, match="missing"):
        Session.load(vlm, tmp_path / "missing")
    process.resident = 1000 * MIB
    with pytest.raises(OverBudget):
        Session.load(vlm, tmp_path / "chat")


def test_the_least_budget_that_would_do_does(limited: Callable[..., VLM], process: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="too small") as refused:
        limited(101)
    least = re.search(r"give at least  (\d+)MiB$", str(refused.value))
    assert least
    with pytest.raises(UserError, match="too small"):
        limited(int(least[1]) - 1)
    assert ask(limited(int(least[1])), "red", [image(0)]).tokens


def test_other_systems_and_devices_have_no_budget(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise FileNotFoundError("/proc/self/statm")

    with monkeypatch.context() as patch:
        patch.setattr(admit, "resident", missing)
        with pytest.raises(UserError, match="needs Linux"):
            runtime.open(bundle_path, memory_budget="1GiB")
    monkeypatch.setattr(admit, "providers", lambda: ["CUDAExecutionProvider"])
    with pytest.raises(UserError, match="CUDAExecutionProvider has its own: leave it out"):
        runtime.open(bundle_path, memory_budget="1GiB")


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
    cost = probe._measured({"heavy": [str(tmp_path / "heavy.onnx"), 1, None]})["heavy"]
    assert 32 * MIB <= cost.loaded < 80 * MIB
    assert 64 * MIB <= cost.running < 300 * MIB


def test_a_graph_that_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"the memory of graph broken cannot be measured: .*broken\.onnx"):
        probe._measured({"broken": [str(tmp_path / "broken.onnx"), 1, None]})


def test_measures_are_kept(opened: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    runs: list[int] = []

    def measured(wanted: dict[str, Any]) -> dict[str, Cost]:
        runs.append(len(wanted))
        return {name: Cost(i, 2 * i) for i, name in enumerate(wanted)}

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


DECODING = """
import io, os, sys
import numpy as np
from PIL import Image
from engines.preprocessor import ImagePreprocessor
from runtime.memory import settle
from runtime.preprocess import decoding_bytes, preprocess
settings = ImagePreprocessor({"height": 64, "width": 64}, 3, None, 1 / 255, [0.5] * 3, [0.5] * 3)
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
preprocess(np.zeros((9, 9, 3), np.uint8), settings)
for source in sources:
    settle()
    if os.fork() == 0:
        before = status("VmRSS")
        preprocess(source, settings)
        print(status("VmHWM") - before, decoding_bytes(source, settings), flush=True)
        os._exit(0)
    os.wait()
"""


def test_decoding_an_image_takes_no_more_than_its_header_says() -> None:
    done = subprocess.run([sys.executable, "-c", DECODING], capture_output=True, text=True, check=True)
    rows = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) >= 8
    for took, bound in rows:
        assert took <= bound + 4 * MIB  # code of the decoder
        assert bound < 90 * 800 * 1200


def test_the_command_tells_the_level_and_why(
    bundle_path: Path, limited: Callable[..., VLM], process: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    process.resident = 100 * MIB
    arguments = ["ask", str(bundle_path), "--threads", "1", "what is it"]
    assert command(main)([*arguments, "--memory-budget", "190MiB"]) == 0
    told = capsys.readouterr().err
    assert re.search(r"\n\[\w+ \(with loose, \d\d% of the memory budget would be in use \(more than 80%\)", told)
    assert command(main)([*arguments, "--memory-budget", "100MiB"]) == 2
    assert "is too small for" in capsys.readouterr().err
    assert command(main)([*arguments, "--memory-budget", "190MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reason"].startswith("with loose, ")


PROMISE = """
import json, resource, sys, threading
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
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, told]))
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
