"""Families with M-RoPE, from the checkpoint to the answer: pictures of two sizes in one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import runtime
from export import build
from tests.export import processors, zoo

STEPS = 24
SIZES = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v"), ((112, 84), (56, 140))) | {
    "qwen3_vl": ((128, 96), (64, 160))
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_pictures_are_answered_as_hugging_face_answers(family: str, tmp_path: Path) -> None:
    model: Any = zoo.model(family)
    model.save_pretrained(tmp_path / "checkpoint")
    processors.save(family, tmp_path / "checkpoint")
    tall, wide = SIZES[family]
    made = ["--out", str(tmp_path / "bundle"), "--recipe", "off", "--images", "1", "--buckets", "96"]
    sizes = ["--image-sizes", *(f"{height}x{width}" for height, width in SIZES[family])]
    once = ["--guard", "off", "--no-report", "--kernels", "never"]
    assert build.main([str(tmp_path / "checkpoint"), *made, *sizes, *once]) == 0
    vlm, processor = runtime.open(tmp_path / "bundle", threads=1), processors.make(family)
    random = np.random.default_rng(0)
    for shown in ([tall], [wide, tall]):
        pictures = [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in shown]
        content = [*[{"type": "image"}] * len(shown), {"type": "text", "text": "what is this ?"}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = processor(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)[0]
        result = vlm.generate(chat, pictures, STEPS, ignore_eos=True)
        assert result.stats.layouts == [f"{height}x{width}" for height, width in shown]
        assert result.stats.prompt_tokens == inputs["input_ids"].shape[1]
        assert result.tokens == ids[inputs["input_ids"].shape[1] :].tolist()
