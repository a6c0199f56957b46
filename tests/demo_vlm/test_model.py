"""The packed pass is the Hugging Face model, the saved processor is the training's encoder, a few steps learn."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from PIL import Image  # noqa: E402

from demo_vlm.curriculum import BOTH, PLAN, SHAPES, Phase, Plan, Rate, Shape  # noqa: E402
from demo_vlm.data import Context, training_source  # noqa: E402
from demo_vlm.evaluate import generate_agrees  # noqa: E402
from demo_vlm.model import build_model, collate, forward, patches_asked  # noqa: E402
from demo_vlm.samples import write_samples  # noqa: E402
from demo_vlm.saving import build_processor, load_checkpoint  # noqa: E402
from demo_vlm.training import Watch, train  # noqa: E402
from demo_vlm.vocabulary import UNK, encode, prefix_ids, question_ids  # noqa: E402

MODEL = Path(__file__).parents[2] / "models" / "demo-vlm"
TINY = Plan(2, 4, Rate(fall=2), (Phase(3, {1: 1}), Phase(2, {2: 1})), Rate(fall=3, rise=1))

QUICK = Watch({})


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take a moment."""
    for images in (1, 2):
        monkeypatch.setitem(SHAPES, images, Shape(1, 4))


def quiet(line: str) -> None:
    """Report nothing."""


def context(images: int, questions: int) -> Context:
    """Some training-side prompt."""
    return training_source(11).context(images, BOTH, questions)


@pytest.mark.parametrize("images", [1, 2, 8])
def test_prompt_ids_equal_the_processors(images: int) -> None:
    drawn = context(images, 4)
    processor = build_processor()
    for question in drawn.questions:
        content: list[Any] = [{"type": "image"} for _ in drawn.images] + [{"type": "text", "text": question.text}]
        messages: Any = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(images=[Image.fromarray(x) for x in drawn.images], text=text, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == prefix_ids(images) + question_ids(question.text)


def test_pixels_equal_the_processors() -> None:
    drawn = context(2, 2)
    batch = collate([drawn])
    processor = build_processor()
    pixels = processor.image_processor([Image.fromarray(x) for x in drawn.images], return_tensors="pt")["pixel_values"]
    assert torch.allclose(batch.pixels, pixels, atol=1e-5)


def test_every_word_of_the_questions_is_known() -> None:
    source = training_source(12)
    words = [w for pairs in source.easy.questions for q, a in pairs for w in encode(f"{q} {a}")]
    assert UNK not in words


def test_packed_logits_equal_the_models_own() -> None:
    """Question by question, unpacked, through the model's forward: the same logits at the answer."""
    model = build_model(3).eval()
    drawn = context(2, 3)
    with torch.no_grad():
        packed = forward(model, collate([drawn])).logits
        at = 0
        for question in drawn.questions:
            one = collate([dataclasses.replace(drawn, questions=[question])])
            logits = model(input_ids=one.ids, pixel_values=one.pixels).logits[0]
            due = logits[one.labels[0] >= 0]
            assert torch.allclose(packed[at : at + len(due)], due, atol=1e-3)
            at += len(due)
    assert at == len(packed)


@pytest.mark.parametrize(
    ("question", "image", "patches"),
    [
        ("what color is the shape?", 0, list(range(64))),
        ("what is the number in row 1 column 1 ?", 0, [0, 1, 2, 3, 8, 9, 10, 11]),
        ("in image 3 , what is the number in row 4 column 2 ?", 2, [52, 53, 54, 55, 60, 61, 62, 63]),
    ],
)
def test_attention_is_guided_to_the_patches_asked(question: str, image: int, patches: list[int]) -> None:
    assert patches_asked(question) == (image, patches)


def test_checkpoint_answers_packed_as_generate_does() -> None:
    same, asked = generate_agrees(MODEL, ["page1", "easy4"], prompts=3)
    assert same == asked == 6


def test_checkpoint_has_the_form_the_project_builds_on() -> None:
    model = load_checkpoint(MODEL)
    assert sum(p.numel() for p in model.parameters()) == 5_945_984
    assert (len(model.model.language_model.layers), model.lm_head.out_features) == (6, 128)
    template = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    assert template == build_processor().chat_template


@pytest.mark.usefixtures("small_batches")
def test_loss_falls_in_a_few_steps() -> None:
    losses = train(build_model(0), 0, TINY, quiet, watch=QUICK)
    assert len(losses) == TINY.steps
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("small_batches")
def test_interrupted_run_ends_the_same(tmp_path: Path) -> None:
    """A run that finds the state of a finished first half goes on to the losses of the uninterrupted run."""
    plan = dataclasses.replace(TINY, phases=(Phase(2, {1: 1}), Phase(1, {2: 1})))
    whole = train(build_model(0), 0, plan, quiet, watch=QUICK)

    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        if line.startswith("step 2/"):
            raise Stop

    with pytest.raises(Stop):
        train(build_model(0), 0, plan, stop, tmp_path, QUICK, every=1)
    rest = train(build_model(0), 0, plan, quiet, tmp_path, QUICK)
    assert rest == whole[-len(rest) :]
    assert 0 < len(rest) < len(whole)


def test_schedule_counts_steps() -> None:
    """The plan alone says what a step does: no clock, so a seed repeats the run."""
    rates = [PLAN.rate.at(step, PLAN.steps) for step in range(PLAN.steps)]
    assert max(rates) == PLAN.rate.peak
    assert 0 < rates[-1] < 0.03 * PLAN.rate.peak
    assert PLAN.steps == sum(phase.steps for phase in PLAN.phases)
    scripts = Path(__file__).parents[2] / "scripts" / "demo_vlm"
    assert "time" not in (scripts / "curriculum.py").read_text(encoding="utf-8")


def test_samples_are_small_and_come_out_as_committed(tmp_path: Path) -> None:
    assert write_samples(tmp_path) == 64
    committed = MODEL / "samples"
    lines = (committed / "samples.jsonl").read_text(encoding="utf-8")
    assert lines == (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in committed.iterdir()) < 300_000
    for line in lines.splitlines():
        sample = json.loads(line)
        assert set(sample) == {"images", "prompt", "answer", "task"}
        assert all((committed / name).is_file() for name in sample["images"])
