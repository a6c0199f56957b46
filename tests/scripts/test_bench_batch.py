"""scripts/bench_batch.py: both ways answer alike, and time is told apart from time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench_batch
from runtime.batch import Batch
from runtime.model import VLM
from tests.runtime import toy


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("batch") / "bundle", batch=3)


def ratios(out: str) -> dict[str, tuple[float, float]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    assert rows[0][4::3] == ["decoding: ratio", "whole: ratio"]
    return {row[0]: (float(row[4]), float(row[7])) for row in rows[1:]}


def slower(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    quick: Callable[..., Any] = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return quick(*arguments)

    monkeypatch.setattr(owner, name, slow)


def test_a_step_for_all_is_told_from_a_step_for_each(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine tokens, the first of them from the prompt: 24 reads alone, about as many steps as one answer together."""
    slower(monkeypatch, Batch, "read", 0.02)
    assert bench_batch.main([str(bundle), "--levels", "tight,loose", "--tokens", "9", "--times", "2"]) == 0
    for decoding, whole in ratios(capsys.readouterr().out).values():
        assert 24 / 12 < decoding < 24 / 8
        assert 24 / 12 < whole < 24 / 8


def test_reading_prompts_is_the_same_both_ways(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower(monkeypatch, VLM, "_prefill", 0.1)
    assert bench_batch.main([str(bundle), "--levels", "tight", "--tokens", "3", "--times", "1"]) == 0
    (_, whole), *_ = ratios(capsys.readouterr().out).values()
    assert 0.7 < whole < 1.4


def test_answers_that_differ_are_told(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Batch.read

    def wrong(batch: Batch, reads: Any) -> None:
        read(batch, reads)
        for each in reads:
            each.context.logits = each.context.logits[:, ::-1]

    monkeypatch.setattr(Batch, "read", wrong)
    monkeypatch.setattr(bench_batch, "QUESTION", "what is it")
    assert bench_batch.main([str(bundle), "--levels", "tight", "--tokens", "9", "--times", "1"]) == 2
    assert "answers differ" in capsys.readouterr().err


def test_a_bundle_without_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_batch.main([str(toy.build(tmp_path / "bundle"))]) == 2
    assert "build it with --batch 4" in capsys.readouterr().err
