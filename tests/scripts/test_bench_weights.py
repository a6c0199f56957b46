"""scripts/bench_weights.py, scripts/weights_perplexity.py: what is slower is told so; sizes and perplexity by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bench_weights
import weights_perplexity
from engines.ort import OrtSession
from export.weights import Grid
from tests.runtime import toy


def test_a_bundle_that_is_slower_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [toy.build(tmp_path / name) for name in ("quick", "slow")]
    run = OrtSession.run

    def slowed(session: OrtSession, feeds: Any) -> Any:
        time.sleep(0.1 if session.path.parent == folders[1] else 0)
        return run(session, feeds)

    monkeypatch.setattr(OrtSession, "run", slowed)
    assert bench_weights.main([*map(str, folders), "--level", "loose", "--times", "3"]) in (None, 0)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    quick, slow = ([float(cell) for cell in row[-2:]] for row in rows[1:])
    assert quick == [1.0, 1.0]
    assert all(ratio < 0.8 for ratio in slow)


def test_a_level_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_weights.main([str(toy.build(tmp_path / "toy")), "--level", "none"]) == 2
    assert "has no level 'none'" in capsys.readouterr().err


def model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval()


def test_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary() -> None:
    blank = model()
    with torch.no_grad():
        blank.lm_head.weight.zero_()
    pieces = torch.randint(0, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    assert weights_perplexity.perplexity(blank, pieces) == pytest.approx(96)
    assert weights_perplexity.perplexity(model(), pieces) != pytest.approx(96)


def test_the_size_of_weights() -> None:
    layers = 4 * 64 * 64 + 3 * 64 * 128
    norms, table = 3 * 64, 96 * 64
    assert weights_perplexity.quantize(model(), None, None) == pytest.approx(4 * (layers + norms + table) / 2**20)
    stored = layers * (0.5 + 4 / 32) + norms * 4 + table * (1 + 4 / 64)
    changed = model()
    assert weights_perplexity.quantize(changed, Grid(4, 32), Grid(8, 128)) == pytest.approx(stored / 2**20)
    assert Grid(4, 32).find(changed.model.layers[0].mlp.down_proj.weight) is not None
    assert Grid(8, 128).find(changed.lm_head.weight) is not None
