"""From a checkpoint to answers: a family that cuts pictures into tiles, two sizes in one bundle, as in Hugging Face.

With all visual tokens, and with those that a level keeps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

import runtime
from export import build
from export.preprocessors import load_processor
from runtime.sampling import Sampling
from tests.export import processors, pruned, zoo

NAME, STEPS = "smolvlm", 16
SIZES = {"112x112": (90, 120), "56x112": (30, 100)}  # layouts, and a picture for each of them


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    zoo.model(NAME).save_pretrained(folder)
    return processors.save(NAME, folder)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "bundle"
    levels = ["--recipe", "off", "--recipe", str(pruned.recipe(out.parent))]
    options = [*levels, "--buckets", "128", "--guard", "off", "--no-report", "--image-sizes", *SIZES]
    assert build.main([str(checkpoint), "--out", str(out), *options]) == 0
    return out


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [["112x112"], ["56x112"], ["56x112", "112x112"]])
def test_pictures_of_several_sizes_are_answered_as_there(bundle: Path, checkpoint: Path, asked: list[str]) -> None:
    pictures = [picture(*SIZES[name]) for name in asked]
    processor, model = load_processor(checkpoint), zoo.model(NAME)
    content = [*({"type": "image"} for _ in asked), {"type": "text", "text": "what is this ?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [[Image.fromarray(each) for each in pictures]]
    inputs = processor(images=images, text=[text], add_special_tokens=False, return_tensors="pt")
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        expected = model.generate(**inputs, generation_config=config)[0, inputs["input_ids"].shape[1] :]
    vlm, half = (runtime.open(bundle, level=level, threads=1) for level in ("off", pruned.LEVEL))
    found = vlm.generate("what is this ?", pictures, max_new_tokens=STEPS, ignore_eos=True)
    assert found.tokens == expected.tolist()
    found = half.generate("what is this ?", pictures, STEPS, ignore_eos=True, sampling=Sampling(logprobs=0))
    pruned.check(found.stats.patches)
    tokens, told = pruned.answered(model, inputs, found.stats.patches, STEPS)
    assert found.tokens == tokens
    np.testing.assert_allclose([each.logprob for each in found.logprobs], told, atol=1e-3)
