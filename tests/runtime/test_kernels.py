"""Compiled kernels beside the graphs: the same answers, from this machine's store only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import runtime
from engines.bundle import Bundle
from engines.plugins import store
from runtime.__main__ import main


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["balanced", "extreme"])
def test_answers_are_those_of_the_function_bodies(demo_bundle: Bundle, image: np.ndarray, level: str) -> None:
    answers = []
    for kernels in (True, False):
        vlm = runtime.open(demo_bundle.path, level=level, kernels=kernels)
        result = vlm.generate("what is it?", images=[image], max_new_tokens=24, ignore_eos=True)
        assert result.stats.kernels is kernels
        answers.append(result.tokens)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_without_trust_function_bodies_run(
    demo_bundle: Bundle, image: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    assert demo_bundle.manifest.libraries
    assert runtime.open(demo_bundle.path).generate("what is it?", images=[image]).stats.kernels is False
    store.trust(demo_bundle)
    assert runtime.open(demo_bundle.path).generate("what is it?", images=[image]).stats.kernels is True


@pytest.mark.slow
def test_info_tells_what_each_operator_runs_as(demo_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", str(demo_bundle.path), "--json"])
    info = json.loads(capsys.readouterr().out)
    assert info["operators"] == {name: {"ort": "kernel"} for name in ("QuantKVAttention", "TopKGather")}
    assert [library["platform"] for library in info["libraries"]] == [store.platform()]
    assert "kernels compiled here" in info["backends"]["ort"]["reason"]
