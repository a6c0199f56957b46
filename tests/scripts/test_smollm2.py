"""scripts/smollm2.py and scripts/english.py: a real model as a checkpoint, and real English to read."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import english
import smollm2
from calibration.replay import Replay, observers, read
from engines.bundle import FORMAT, MANIFEST
from engines.errors import UserError
from export import checkpoint as checkpoints
from export import recipe as recipes


def test_what_is_missing_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "NEEDED", ("llm_smollm3", "json"))
    assert smollm2.main([str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: llm_smollm3 is not installed: pip install")
    assert smollm2.main([str(tmp_path)]) == 2
    assert "exists: remove it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": {}}))
    assert smollm2.main([str(tmp_path / "out")]) == 2
    assert f"lies in the bundle {tmp_path}" in capsys.readouterr().err


def vector(lines: list[str]) -> bytes:
    """A character vector as R serializes it (R Internals, 1.8): header, type, length, and a typed text for each."""
    texts = b"".join(struct.pack(">ii", 0x40009, len(line.encode())) + line.encode() for line in lines)
    return b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines)) + texts


def test_books_are_read_from_an_r_database() -> None:
    books = [["EMMA", "", "By Jane", "Austen", "", "Élan"], ["", "x"]]
    packed = [(len(data := vector(lines)), zlib.compress(data)) for lines in books]
    data = b"".join(struct.pack(">I", length) + stream for length, stream in packed)
    assert english._texts(data) == ["EMMA\nBy Jane Austen\nÉlan", "x"]


def test_without_debian_a_text_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(english, "DATA", "nowhere")
    monkeypatch.setattr(english.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="give a file of your own by --text"):
        english.novels()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := smollm2.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    assert smollm2.main([str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_the_checkpoint_answers(checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


@pytest.mark.slow
def test_uncompressed_2000_tokens_are_hugging_faces(checkpoint: Path) -> None:
    """Python's own documentation: 1536 tokens are prefilled, the others read behind them from the cache."""
    from pydoc_data.topics import topics

    prompt, tokens = 1536, 2000
    loaded, off = checkpoints.load(checkpoint), recipes.load("off")
    ids = loaded.processor.tokenizer("\n".join(sorted(topics.values(), key=len)[-2:]))["input_ids"][:tokens]
    room = dataclasses.replace(off.window, least=tokens - prompt, most=tokens - prompt)
    replay = Replay(loaded.decoder, dataclasses.replace(off, window=room), prompt)
    with torch.no_grad():
        own = replay.score(loaded, read(loaded, ids[:prompt], observers(off, prompt)), ids[prompt:])
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
        theirs = model(torch.tensor([ids[:-1]])).logits[0, prompt - 1 :].log_softmax(dim=-1)
    assert own.shape == theirs.shape == (tokens - prompt, 49_152)
    apart = (own - theirs).abs().max().item()
    print(f"log probabilities differ by {apart:.1e} nats at most")
    assert apart < 1e-3
