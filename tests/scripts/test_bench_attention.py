"""scripts/bench_attention.py: all that it compares computes attention, and what does not is not timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import attention_peers
import bench_attention
import figures
from attention_peers import Setting, Shape
from engines.errors import UserError
from engines.plugins import store

SHAPES = [(16, 4, 64), (4, 4, 32), (8, 1, 128)]
OURS = {"ours int8", "ours int4"}
THEIRS = {
    *("inlined body int8", "inlined body int4"),
    *("GroupQueryAttention int8", "GroupQueryAttention int4", "GroupQueryAttention fp32"),
    *("Attention-24 fp32", "torch SDPA fp32", "torch SDPA fp32, grouped", "torch SDPA bf16, grouped"),
}


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return store.cpu().path
    except UserError as error:
        pytest.skip(str(error))


def quick(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = bench_attention.main(["--quick", "--threads", "1", "--json", str(tmp_path / "bench.json"), *options])
    return code, figures.read(tmp_path / "bench.json").values


@pytest.mark.parametrize("shape", SHAPES)
def test_every_peer_computes_attention(library: Path, shape: tuple[int, int, int]) -> None:
    peers = attention_peers.peers(Setting(Shape(*shape, slots=77, window=5), 1, 1, library))
    assert {*peers} == OURS | THEIRS
    for name, prepare in peers.items():
        peer = prepare()
        assert [peer.error() <= peer.limit for _ in range(3)] == [True] * 3, name  # on every copy of its cache


def test_the_smoke_form_measures_all(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, values = quick(tmp_path, "--slots", "100,300")
    assert code == 0
    assert values["not_measured"] == {}
    rows = values["seconds"]
    assert {(row["peer"], row["threads"], row["slots"]) for row in rows} == {
        (name, 1, slots) for name in OURS | THEIRS for slots in (100, 300)
    }
    for row in rows:
        assert 0 < row["least"] <= row["median"]
        assert row["least_over_floor"] == pytest.approx(row["least"] / row["floor"])
        assert row["floor"] == pytest.approx(row["kv_bytes"] / values["read_bytes_per_second"]["1"])
        bits = 4 if row["bits"] == 4 else 8
        (ours,) = [r for r in rows if r["peer"] == f"ours int{bits}" and r["slots"] == row["slots"]]
        assert row["least_over_ours"] == pytest.approx(row["least"] / ours["least"])
        assert row["over_ours"] > 0
        assert 0 < row["error"] < 0.02
    sizes = {row["peer"]: row["kv_bytes"] for row in rows if row["slots"] == 300}
    assert sizes["torch SDPA fp32"] == 2 * 4 * 4 * 64 * (300 + 64)  # keys and values of store and window
    assert sizes["GroupQueryAttention int4"] < sizes["ours int4"] < sizes["ours int8"] < sizes["torch SDPA fp32"]
    kept = figures.read(tmp_path / "bench.json")
    assert {*kept.versions} == {"numpy", "onnxruntime", "torch"}
    assert kept.machine["processor"]
    assert kept.command == "python scripts/bench_attention.py --quick --threads 1 --slots 100,300"
    assert values["paths"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.svg"]
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    assert all(text in printed for text in (*OURS, *THEIRS, "threads: 1", "100 slots", "300 slots"))


def test_a_peer_that_computes_something_else_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = attention_peers.attention24

    def wrong(setting: Setting) -> attention_peers.Peer:
        peer = right(setting)
        return dataclasses.replace(peer, result=lambda: [1.001 * x for x in peer.result()])

    monkeypatch.setattr(attention_peers, "attention24", wrong)
    code, values = quick(tmp_path)
    assert code == 1
    assert "Attention-24 fp32" not in {row["peer"] for row in values["seconds"]}
    assert values["not_measured"]["Attention-24 fp32"].startswith("WRONG: 1.0e-03 from the exact result")
    assert "not measured: Attention-24 fp32: WRONG" in capsys.readouterr().out


def test_without_a_compiler_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> store.Stored:
        raise UserError("there is no C++ compiler")

    monkeypatch.setattr(store, "cpu", none)
    code, values = quick(tmp_path)
    assert code == 0
    assert values["not_measured"] == {"ours": "there is no C++ compiler"}
    assert {row["peer"] for row in values["seconds"]} == THEIRS
    assert {(row["over_ours"], row["least_over_ours"]) for row in values["seconds"]} == {(None, None)}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kv-heads", "3"], "--heads 16 is no multiple of --kv-heads 3"),
        (["--threads", "4096"], "this machine has"),
        (["--slots", "0"], "must be at least 1, got 0"),
        (["--json", "nowhere/x.json"], "nowhere is not a folder"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.main(options) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("\n") == 1
