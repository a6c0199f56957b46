"""What is drawn of an image's tokens, against Hugging Face's attention and against recipes whose choice is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from calibration import samples as sampling
from calibration.prepare import prepare
from calibration.report import looks
from calibration.samples import Sample, model_inputs
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.pipeline import Prepared
from export.recipe import Recipe
from export.stages.budget import Measured, Uniform
from tests.export import tiny

N = tiny.IMAGE_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")
    lines = [
        {"images": ["0.png", "1.png"], "prompt": "in image 1 , what shape is in the image ?", "answer": "red circle"},
        {"images": ["1.png"], "prompt": "what color is the shape ?", "answer": "blue", "task": "color"},
        {"images": [], "prompt": "how many digits ?", "answer": "3"},
    ]
    (folder / "samples" / sampling.FILE).write_text("\n".join(json.dumps(line) for line in lines))
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def known(folder: Path) -> list[Sample]:
    return sampling.read(folder / "samples")


@pytest.mark.parametrize("number", [0, 1])
def test_attention_on_patches_is_hugging_faces(
    folder: Path, checkpoint: Checkpoint, known: list[Sample], number: int
) -> None:
    sample = known[number]
    seen = looks.look(checkpoint, sample)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    inputs = model_inputs(checkpoint, sample)
    answer = checkpoint.processor.tokenizer.convert_tokens_to_ids(sample.answer.split())
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
    with torch.no_grad():
        layers = model(input_ids=ids, pixel_values=inputs["pixel_values"], output_attentions=True).attentions
    weights = torch.cat(layers).double().numpy()  # [layers, heads, tokens, tokens]

    tokens = ids[0].tolist()
    visual = [place for place, token in enumerate(tokens) if token == checkpoint.image_token_id]
    first_step = len(tokens) - len(answer) - 1
    steps = range(first_step, len(tokens))
    asking = range(visual[-1] + 1, first_step)
    images = [visual[i * N : (i + 1) * N] for i in range(len(sample.images))]
    on_image = [sum(weights[:, :, step, place].sum() for step in steps for place in image) for image in images]
    assert seen.number == int(np.argmax(on_image))
    for got, rows in ((seen.answering, steps), (seen.asking, asking)):
        wanted = np.array([weights[:, :, list(rows), place].mean(axis=2) for place in images[seen.number]])
        np.testing.assert_allclose(got, np.moveaxis(wanted, 0, -1), rtol=1e-3, atol=1e-6)
    assert seen.places.tolist() == images[seen.number]
    assert len(seen.prompt) == first_step + 1
    np.testing.assert_array_equal(seen.picture, tiny.picture(seen.number if number == 0 else 1))


@pytest.mark.parametrize("name", looks.selectors())
def test_a_selector_keeps_the_patches_that_its_stage_chooses(
    checkpoint: Checkpoint, known: list[Sample], name: str
) -> None:
    seen, method = looks.look(checkpoint, known[1]), looks.selectors()[name]
    kept = looks.selected(checkpoint, seen, method, 0.25)
    assert kept.sum() == N / 4
    features = checkpoint.encoder(model_inputs(checkpoint, known[1])["pixel_values"])
    stage, asked = method(keep=0.25), seen.prompt.embeddings[int(seen.places[-1]) + 1 :][None]
    chosen = stage(features, asked, torch.ones(asked.shape[:2])) if stage.needs_question else stage(features)
    assert np.flatnonzero(kept).tolist() == chosen[0].tolist()


def test_all_selectors_are_drawn() -> None:
    assert set(looks.selectors()) == {"diversity", "coverage", "attention", "dart", "random", "uniform"}


def drawn(checkpoint: Checkpoint, sample: Sample, recipe: Recipe) -> np.ndarray | None:
    prepared = prepare(checkpoint, {recipe.name: recipe}, [sample])[recipe.name]
    return looks.cached(checkpoint, looks.look(checkpoint, sample), recipe, prepared)


def test_where_all_is_kept_every_head_holds_every_patch(checkpoint: Checkpoint, known: list[Sample]) -> None:
    share = drawn(checkpoint, known[0], tiny.recipe())
    assert share is not None
    np.testing.assert_array_equal(share, np.ones(N))


def test_sinks_and_last_tokens_are_all_that_streaming_keeps(checkpoint: Checkpoint, known: list[Sample]) -> None:
    sample = known[1]
    recipe = tiny.recipe(
        importance={"method": "streaming-llm"},
        protect={"sinks": 4, "recent": 0},
        window={"least": 8, "most": 8, "recent": 0.5},
    )
    recipe = dataclasses.replace(recipe, budget=Uniform(keep=0.4))
    share = drawn(checkpoint, sample, recipe)
    assert share is not None
    seen = looks.look(checkpoint, sample)
    bucket = -(-len(seen.prompt) // 16) * 16
    slots, window = round(0.4 * bucket), 4
    last = range(len(seen.prompt) - window - (slots - 4), len(seen.prompt))
    wanted = [float(place < 4 or place in last) for place in seen.places.tolist()]
    assert 0 < sum(wanted) < N
    np.testing.assert_array_equal(share, wanted)


def test_layers_and_heads_that_differ_are_averaged(checkpoint: Checkpoint, known: list[Sample]) -> None:
    """One layer of three holds all, the others the least that may be: a head's only token."""
    recipe = tiny.recipe(
        importance={"method": "knorm"},
        protect={"sinks": 0, "recent": 0},
        window={"least": 8, "most": 8, "recent": 0.0},
    )
    recipe = dataclasses.replace(recipe, budget=Measured(keep=1 / 3, shares=[1e-6, 1.0, 1e-6]))
    share = drawn(checkpoint, known[1], recipe)
    assert share is not None
    assert share.min() >= 1 / 3 - 1e-9  # the whole layer
    extra = (share - 1 / 3) * 3 * 2  # in heads of 2, of both other layers
    np.testing.assert_allclose(extra, np.round(extra), atol=1e-9)
    assert extra.sum() <= 4 + 1e-9


def test_pruned_patches_are_in_no_cache(checkpoint: Checkpoint, known: list[Sample]) -> None:
    share = drawn(checkpoint, known[1], tiny.recipe(perception={"method": "uniform", "keep": 0.25}))
    assert share is not None
    assert sorted(share.tolist()) == [0.0] * 12 + [1.0] * 4


def test_a_level_that_is_never_compacted_has_no_positions_to_draw(checkpoint: Checkpoint, known: list[Sample]) -> None:
    recipe = tiny.recipe(window={"compact": False})
    seen = looks.look(checkpoint, known[1])
    assert looks.cached(checkpoint, seen, recipe, Prepared(checkpoint.decoder)) is None


def test_every_task_is_drawn_and_no_image_twice() -> None:
    def sample(task: str, *images: str) -> Sample:
        return Sample([Path(image) for image in images], "?", "", task)

    several, again = sample("a", "1", "2"), sample("a", "3")
    known = [several, again, sample("b", "3", "4"), sample("b", "5"), sample("c"), sample("b", "6")]
    assert looks.choose(known, 3) == [again, known[3], known[5]]
    assert looks.choose(known, 9) == [again, known[3], known[5], several]
    assert looks.choose([sample("c")], 3) == []
