"""Every preset answers about real images: the demo checkpoint, in PyTorch and as a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import runtime
from calibration import samples
from calibration.evaluate import Eager, prompt_of
from calibration.prepare import prepare
from calibration.samples import processed
from demo_vlm.suites import Item, suites
from engines.bundle import Bundle
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.pipeline import Prepared
from tests.export import conftest

PRESETS = recipes.presets()
QUESTIONS = 6


@pytest.fixture(scope="module")
def prepared(demo: Checkpoint) -> dict[str, Prepared]:
    return prepare(demo, {name: recipes.load(name) for name in PRESETS}, samples.read(demo.path / "samples")[:16])


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return suites(["easy1"], QUESTIONS)["easy1"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_answers(name: str, demo: Checkpoint, prepared: dict[str, Prepared], items: list[Item]) -> None:
    """All layers' visual tokens are there: perception is the vision graph's."""
    found = prepared[name]
    pictures = [[Image.fromarray(image) for image in item.images] for item in items]
    prompts = [
        prompt_of(demo, processed(demo.processor, item.question, images))
        for item, images in zip(items, pictures, strict=True)
    ]
    model = Eager(found.decoder, recipes.load(name), 96, len(items), found.statistics)
    ends = demo.model.generation_config.eos_token_id
    answers = model.generate(prompts, demo.embedding, 8, [ends], demo.sentence_ends)
    texts = [demo.processor.tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]
    assert sum(text == item.answer for text, item in zip(texts, items, strict=True)) >= QUESTIONS - 1


@pytest.mark.slow
@pytest.mark.long
def test_presets_build_and_answer(demo: Checkpoint, demo_bundle: Bundle, tmp_path: Path, items: list[Item]) -> None:
    there = demo_bundle.manifest.levels
    wanted = [argument for name in PRESETS if name not in there for argument in ("--recipe", name)]
    conftest.build(demo.path, "--out", tmp_path / "bundle", "--images", 1, *wanted)
    for name in PRESETS:
        vlm = runtime.open(demo_bundle.path if name in there else tmp_path / "bundle", level=name, threads=1)
        for later in (False, True):
            answers = [vlm.generate(item.question, item.images, 8, question_later=later) for item in items]
            assert {answer.stats.level for answer in answers} == {(later and recipes.load(name).unknown) or name}
            right = sum(answer.text.strip() == item.answer for answer, item in zip(answers, items, strict=True))
            assert right >= QUESTIONS - 1, (name, later)
