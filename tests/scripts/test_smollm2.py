"""scripts/smollm2.py and scripts/english.py: a real model as a checkpoint, and real English to read."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import english
import runtime
import smollm2
from engines.bundle import FORMAT, MANIFEST
from engines.errors import UserError
from export import build
from runtime.generate import Request, whole
from runtime.sampling import GREEDY


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
@pytest.mark.long
def test_2000_tokens_through_a_bundle_are_hugging_faces(checkpoint: Path, tmp_path: Path) -> None:
    """Python's own documentation: prefill reads most of it and a shorter text, extend a chunk, decode the rest."""
    prompt, tokens, shorter = 1872, 2000, 700
    options = ["--recipe", "off", "--buckets", str(prompt), "--no-report", "--jobs", "1"]
    assert build.main([str(checkpoint), *options, "--out", str(tmp_path / "bundle")]) == 0
    vlm = runtime.open(tmp_path / "bundle", threads=1)
    text = "\n".join(sorted(topics.values(), key=len)[-2:])
    ids = vlm.tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    begun = prompt + vlm.bundle.manifest.levels["off"].buckets[0].chunk
    own, stats = dict[int, np.ndarray](), vlm.stats("off")  # number of tokens read -> logits of the next
    for count in (shorter, prompt, begun):
        request = Request(ids[:count], [], "off", 1, False, False, GREEDY)
        context = whole(vlm.read(request, stats))
        own[count] = context.logits[0]
    assert "extend" in stats.seconds
    for count in range(begun, tokens):
        assert whole(vlm.advance(context, ids[count], request, stats)) == ""
        own[count + 1] = context.logits[0]
    del vlm
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, [count - 1 for count in own]].log_softmax(dim=-1)
    logits = torch.from_numpy(np.stack([*own.values()]))
    assert logits.shape == theirs.shape == (3 + tokens - begun, 49_152)
    apart = (logits.log_softmax(dim=-1) - theirs).abs().max().item()
    print(f"log probabilities of {len(own)} tokens differ by {apart:.1e} nats at most")
    assert apart < 1e-3
