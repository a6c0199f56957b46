"""Which level a request gets under a memory budget, and that a refusal comes before any allocation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import runtime
from engines.bundle import Bundle
from engines.errors import UserError, command
from engines.gate import Fallback
from runtime import admit, memory
from runtime.__main__ import main
from runtime.admit import Admission
from runtime.generate import Request
from runtime.memory import MIB, Memory, Need, OverBudget
from runtime.model import VLM
from runtime.preprocess import preprocess
from runtime.sampling import GREEDY
from runtime.session import Session
from tests.runtime import toy
from tests.runtime.asking import Recorder, ask, image
from tests.runtime.budgeted import bare, reserved

if not Path("/proc/self/statm").exists():
    pytest.skip("a memory budget needs Linux", allow_module_level=True)


def chosen(needs: dict[str, int], drops: dict[str, float], in_use: int, budget: int, heavy: bool, rate: float) -> Any:
    """The level by the rule as docs/runtime.md states it, and whether memory is short from then on."""
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


@example(sizes=[78, 0], shares=[0.0, 0.75, 0.0, 0.0], in_use=3, heavy=False, images=3, text=34)
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
        ids = [toy.IMAGE] * images * toy.IMAGE_TOKENS + [5] * text
        request = Request(ids, [toy.SQUARE] * images, "l0", 1, False, False, GREEDY)
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

    monkeypatch.setattr("runtime.pictures.preprocess", noted)
    with pytest.raises(OverBudget) as refused:
        vlm.stream("what is it", [image(0)])
    assert recorder.loaded == decoded == []
    need = re.fullmatch(
        r"this takes ([\d.]+) MiB, and 350.0 MiB of the memory budget of 400.0 MiB are in use: give smaller or fewer "
        r"images, less text, or a budget of at least  (\d+)MiB",
        str(refused.value),
    )
    assert need
    assert 0 < int(need[2]) - 350 - float(need[1]) - admit.ANOTHER / MIB < 1.1  # rounded up
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
    with pytest.raises(UserError, match="no such file"):
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


@pytest.mark.parametrize("more", [0, admit.ANOTHER // MIB])
def test_the_least_budget_that_would_do_does(limited: Callable[..., VLM], process: SimpleNamespace, more: int) -> None:
    """Also in a process that has a few MiB more than the one that told it, or grows by them."""

    def told(run: Callable[[], object]) -> int:
        with pytest.raises(UserError) as refused:
            run()
        least = re.search(r"at least  (\d+)MiB$", str(refused.value))
        assert least
        return int(least[1])

    def another(mib: int) -> VLM:
        process.resident = (100 + more) * MIB
        return limited(mib)

    least = told(lambda: limited(101))
    assert ask(another(least), "red", [image(0)]).tokens
    with pytest.raises(UserError, match="too small"):
        another(least - admit.ANOTHER // MIB - 1)
    large = np.zeros((2000, 2000, 3), np.uint8)
    process.resident = 100 * MIB
    assert another(told(lambda: limited(least).stream("what is it", [large]))).stream("what is it", [large])
    process.resident = 100 * MIB
    assert Session(another(told(lambda: Session(limited(least)).ask("how many", [large])))).ask("how many", [large])


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
