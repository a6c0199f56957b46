"""The promise of recipe `off`: the built bundle says, token for token, what Hugging Face's `generate` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, GenerationConfig

import runtime
from demo_vlm.suites import NAMES, Item, suites
from engines.bundle import Bundle
from export.checkpoint import Checkpoint
from runtime.sampling import Sampling
from tests import fuzz
from tests.export.conftest import DEMO

pytestmark = pytest.mark.slow

STEPS, BATCH = 64, 20
SAMPLES = BATCH * fuzz.TIMES  # of every suite
TIE = 1e-4  # two logits this close are decided by the order of a float32 sum
EXCUSED = 0.02


@pytest.fixture(scope="module")
def model() -> Any:
    model = AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    return model


def hugging_face(
    model: Any, processor: Any, items: list[Item], penalty: float = 1.0
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Greedy tokens of every item, end token ignored, and the gap between the two best scores at every step."""
    processor.tokenizer.padding_side = "left"
    config = GenerationConfig(
        max_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",  # with PyTorch's attention twice as fast as the default, and the same tokens
        repetition_penalty=penalty,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        texts = []
        for item in batch:
            content = [{"type": "image"} for _ in item.images] + [{"type": "text", "text": item.question}]
            texts.append(
                processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            )
        images = [[Image.fromarray(pixels) for pixels in item.images] for item in batch]
        inputs = processor(images=images, text=texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            out = model.generate(**inputs, generation_config=config)
        tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
        best = torch.stack(out.scores, dim=1).topk(2).values
        assert tokens.shape[1] == STEPS
        yield from zip(tokens.tolist(), (best[..., 0] - best[..., 1]).numpy(), strict=True)


@pytest.mark.parametrize("suite", NAMES)
def test_tokens_are_hugging_faces(
    demo_bundle: Bundle, demo: Checkpoint, model: Any, suite: str, record_property: Any
) -> None:
    items = suites([suite], limit=SAMPLES)[suite]
    assert len(items) == SAMPLES
    vlm = runtime.open(demo_bundle.path, level="off", threads=1)
    equal, ties, answers = 0, 0, set()
    for item, (want, gaps) in zip(items, hugging_face(model, demo.processor, items), strict=True):
        got = vlm.generate(item.question, images=item.images, max_new_tokens=STEPS, ignore_eos=True).tokens
        assert len(got) == STEPS
        answers.add(tuple(got))
        if got == want:
            equal += 1
            continue
        step = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        assert gaps[step] < TIE, f"{item.question!r}: token {step} is {got[step]}, Hugging Face says {want[step]}"
        ties += 1
    print(f"{suite}: {equal} of {len(items)} equal, {ties} excused by a tie")
    record_property("equal", equal)
    record_property("ties", ties)
    assert equal + ties == len(items)
    assert ties <= max(EXCUSED * len(items), 1)
    assert len(answers) > len(items) / 50  # different images and questions got different answers


def test_penalized_tokens_are_hugging_faces(demo_bundle: Bundle, demo: Checkpoint, model: Any) -> None:
    """Prompt and answer count. The penalty is far beyond what anyone would take: the end token is that sure."""
    items = suites(["easy4"], limit=BATCH)["easy4"]
    vlm = runtime.open(demo_bundle.path, level="off", threads=1)
    for item, (want, gaps) in zip(items, hugging_face(model, demo.processor, items, penalty=20.0), strict=True):
        sampling = Sampling(repetition_penalty=20.0)
        got = vlm.generate(item.question, item.images, STEPS, ignore_eos=True, sampling=sampling).tokens
        step = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
        assert step is None or gaps[step] < TIE
        assert len(set(got)) > 5
