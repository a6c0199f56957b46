"""scripts/smollm2.py and scripts/english.py: a real model as a checkpoint, and real English to read."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

import english
import smollm2
from engines.bundle import FORMAT, MANIFEST
from engines.errors import UserError


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


@pytest.mark.slow
@pytest.mark.skipif(bool(smollm2.missing()), reason=smollm2.missing())
def test_the_checkpoint_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert smollm2.main([str(tmp_path / "out")]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
