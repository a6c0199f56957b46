"""Models of text alone: from checkpoint to answers without a vision graph, equal to Hugging Face's own generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import runtime
from calibration import samples
from calibration.prepare import prepare
from demo_vlm.saving import build_processor
from engines import bundle as bundles
from engines.errors import UserError
from export import build
from export import checkpoint as checkpoints
from export import recipe as recipes
from runtime.session import Session

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + ' : ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'answer :' }}{% endif %}"
)
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
QUESTION = "what color is the circle beside the large triangle ?"
STEPS = 64


def save(folder: Path, kind: str, **more: Any) -> Path:
    """A tiny model with random weights."""
    tokenizer = build_processor().tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    rest = {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256, "head_dim": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
    AutoModelForCausalLM.from_config(CONFIGS[kind](**(sizes | rest | ends | more))).save_pretrained(folder)
    return folder


def texts(folder: Path) -> Path:
    """Samples without images."""
    folder.mkdir()
    (folder / samples.FILE).write_text(json.dumps({"images": [], "prompt": QUESTION}) + "\n")
    return folder


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in CONFIGS if kind != "llama"]


@pytest.fixture(scope="module", params=["llama", *OTHERS])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its bundle."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = save(folder / "checkpoint", request.param)
    options = ["--recipe", "off", "--buckets", "48", "--kernels", "never", "--no-report"]
    assert build.main([str(checkpoint), "--out", str(folder / "bundle"), *options]) == 0
    return checkpoint, folder / "bundle"


def test_uncompressed_answers_are_hugging_faces(built: tuple[Path, Path]) -> None:
    checkpoint, bundle = built
    kinds = {graph.kind for graph in bundles.read(bundle).manifest.graphs.values()}
    assert kinds - {"compact"} == {"prefill", "decode", "extend"}
    vlm = runtime.open(bundle, level="off", threads=1)
    result = vlm.generate(QUESTION, max_new_tokens=STEPS, ignore_eos=True)
    processor = checkpoints.load(checkpoint).processor
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    model.generation_config.eos_token_id = None
    inputs = samples.processed(processor, QUESTION, [])
    theirs = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert result.tokens == theirs.tolist()
    assert len(set(result.tokens)) > 4
    assert result.stats.visual_tokens == 0


def test_an_image_is_refused_and_a_chat_goes_on(built: tuple[Path, Path]) -> None:
    vlm = runtime.open(built[1], level="off", threads=1)
    picture = np.zeros((8, 8, 3), np.uint8)
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what ?"}]}]
    session = Session(vlm)
    for ask in (lambda: vlm.generate("what ?", [picture]), lambda: vlm.generate(shown, [picture])):
        with pytest.raises(UserError, match="takes no images: ask it without"):
            ask()
    with pytest.raises(UserError, match="takes no images"):
        session.ask("what ?", [picture], max_new_tokens=2)
    first = session.ask(QUESTION, max_new_tokens=4, ignore_eos=True)
    assert len(first.tokens) == 4
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.text}]
    again = [*messages, {"role": "user", "content": "what ?"}]
    assert session.ask("what ?", max_new_tokens=6).tokens
    assert vlm.generate(again, max_new_tokens=6).stats.prompt_tokens > first.stats.prompt_tokens


def test_it_is_calibrated_on_texts_that_every_python_has(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint", "llama")
    known = samples.of(checkpoint)
    assert len({sample.prompt for sample in known}) == len(known) == samples.PYDOC_SAMPLES
    assert all(sample.images == [] and len(sample.prompt.split()) > 100 for sample in known)
    own = texts(tmp_path / "own")
    assert [sample.prompt for sample in samples.of(checkpoint, own)] == [QUESTION]
    with pytest.raises(UserError, match="no sample has an image"):
        samples.read(own)
    loaded = checkpoints.load(checkpoint)
    found = prepare(loaded, {"light": recipes.load("light")}, samples.of(checkpoint, own))["light"].statistics
    assert found is not None
    assert [layer.center.shape for layer in found] == [(2, 16)] * 3


def test_what_is_about_images_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(tmp_path / "checkpoint", "qwen2")
    assert build.main([str(checkpoint), "--images", "2", "--out", str(tmp_path / "out")]) == 2
    assert "--images 2: qwen2 models take no images" in capsys.readouterr().err
    (checkpoint / "chat_template.jinja").unlink()
    assert build.main([str(checkpoint), "--out", str(tmp_path / "out")]) == 2
    assert "makes no prompt of a chat" in capsys.readouterr().err
