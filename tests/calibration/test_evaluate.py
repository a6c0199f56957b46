"""The eager evaluator: against Hugging Face's generate, and a batch against single prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from calibration.evaluate import Eager
from demo_vlm.suites import suites
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.tokens import FIRST, TEXT
from runtime.prompt import lay_out
from tests.export import tiny
from tests.export.tiny import Prompt

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
LENGTH, STEPS = 96, 24
EVICTING = {"budget": {"keep": 0.3}, "protect": {"sinks": 2, "recent": 2}}


@pytest.fixture(scope="module", params=["tiny", "demo"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DEMO if request.param == "demo" else tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    torch.set_num_threads(1)
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[Prompt]:
    """Of different lengths, one of them text alone."""
    items = suites(["page1"], limit=2)["page1"]
    return [
        Prompt(checkpoint, items[0].question, items[0].images),
        Prompt(checkpoint, "how many digits ?"),
        Prompt(checkpoint, "what color is the shape ?", items[1].images),
    ]


@pytest.fixture(scope="module")
def generated(folder: Path, prompts: list[Prompt]) -> list[list[int]]:
    """Hugging Face's greedy answers, the end token ignored."""
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        out = [model.generate(**prompt.inputs, generation_config=config)[0] for prompt in prompts]
    return [row[len(prompt) :].tolist() for row, prompt in zip(out, prompts, strict=True)]


def test_segments_are_those_of_the_runtime(checkpoint: Checkpoint) -> None:
    decode = checkpoint.processor.tokenizer.convert_ids_to_tokens
    assert set(decode(checkpoint.sentence_ends)) == {".", "?"}
    pictures = [tiny.picture(1), tiny.picture(2)]
    prompt = Prompt(checkpoint, "what color is the shape ? how many digits ? red", pictures)
    ids, image, size = prompt.ids.tolist(), checkpoint.image_token_id, checkpoint.image_tokens
    rows = lay_out(ids, [np.arange(size)] * 2, [size] * 2, image, checkpoint.sentence_ends)
    assert rows.ids.tolist() == ids
    assert prompt.segments.tolist() == rows.segments.tolist()
    text = prompt.segments[prompt.kinds == TEXT]
    assert text.unique().tolist() == [1, 2, 3, 4, 5]  # before and between the images, and three after them


def test_the_window_marks_where_sentences_begin(
    checkpoint: Checkpoint, prompts: list[Prompt], generated: list[list[int]]
) -> None:
    recipe = tiny.recipe(budget={"keep": 2.5}, protect={"sentence_first": True}, window={"recent": 0.0})
    model, ends = eager(checkpoint, recipe, len(prompts)), {row[2] for row in generated}
    model.generate(prompts, checkpoint.embedding, 6, (), ends)
    for row, kinds in zip(generated, model.tensors["window_kinds"].tolist(), strict=True):
        after = [True, *(token in ends for token in row)]
        assert kinds[:5] == [TEXT + FIRST * (after[i] and row[i] not in ends) for i in range(5)]


def eager(checkpoint: Checkpoint, recipe: Recipe, batch: int) -> Eager:
    return Eager(checkpoint.decoder, recipe, LENGTH, batch)


def test_recipe_off_says_what_hugging_face_says(
    checkpoint: Checkpoint, prompts: list[Prompt], generated: list[list[int]]
) -> None:
    model = eager(checkpoint, recipes.load("off"), len(prompts))
    assert model.generate(prompts, checkpoint.embedding, STEPS) == generated


@pytest.mark.parametrize("tables", [{"budget": {"keep": 2.5}}, EVICTING], ids=["keeping", "evicting"])
def test_a_batch_says_what_single_prompts_say(checkpoint: Checkpoint, prompts: list[Prompt], tables: dict) -> None:
    recipe = tiny.recipe(**tables)
    model, alone = eager(checkpoint, recipe, len(prompts)), eager(checkpoint, recipe, 1)
    together = model.generate(prompts, checkpoint.embedding, STEPS)
    assert model.compactions >= 2
    assert together == [alone.generate([prompt], checkpoint.embedding, STEPS)[0] for prompt in prompts]
    assert model.generate(prompts[:1], checkpoint.embedding, STEPS) == together[:1]  # the rest is filled up


def test_answers_end_with_the_end_token(
    checkpoint: Checkpoint, prompts: list[Prompt], generated: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {generated[0][2], generated[1][0]}
    want = [next((row[: i + 1] for i, token in enumerate(row) if token in ends), row) for row in generated]
    model = eager(checkpoint, recipes.load("off"), len(prompts))
    decode = Mock(wraps=model.decode)
    monkeypatch.setattr(model, "decode", decode)
    assert model.generate(prompts, checkpoint.embedding, STEPS, ends) == want
    assert len(want[0]) <= 3
    assert decode.call_count == max(map(len, want)) - 1  # and nothing is computed after the last one's end


def test_a_window_that_is_never_compacted_ends_every_answer(
    checkpoint: Checkpoint, prompts: list[Prompt], generated: list[list[int]]
) -> None:
    window = {"least": 5, "most": 5, "recent": 0.0, "compact": False}
    model = eager(checkpoint, tiny.recipe(window=window), len(prompts))
    assert model.generate(prompts, checkpoint.embedding, STEPS) == [row[:6] for row in generated]
    assert model.generate(prompts, checkpoint.embedding, 2) == [row[:2] for row in generated]


def test_what_does_not_fit_is_refused(checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    recipe = tiny.recipe()
    with pytest.raises(ValueError, match="3 prompts do not fit a batch of 2"):
        eager(checkpoint, recipe, 2).generate(prompts, checkpoint.embedding, 1)
    short = Eager(checkpoint.decoder, recipe, len(prompts[0]) - 1)
    with pytest.raises(ValueError, match=f"a prompt of {len(prompts[0])} tokens does not fit"):
        short.generate(prompts[:1], checkpoint.embedding, 1)
