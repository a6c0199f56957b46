"""Pictures of two sizes in one prompt, from the checkpoint to the answer, against Hugging Face's own generation."""

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

FAMILY, STEPS = "smolvlm", 24  # tiles with marks of rows and columns among the image tokens


@pytest.mark.slow
def test_pictures_of_two_sizes_are_answered_as_hugging_face_answers(tmp_path: Path) -> None:
    model: Any = zoo.model(FAMILY).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    processors.save(FAMILY, tmp_path / "checkpoint")
    made = ["--out", str(tmp_path / "bundle"), "--recipe", "off", "--images", "1", "--image-sizes", "112x112", "56x112"]
    assert build.main([str(tmp_path / "checkpoint"), *made, "--guard", "off", "--no-report", "--kernels", "never"]) == 0
    vlm, processor, random = (
        runtime.open(tmp_path / "bundle", threads=1),
        processors.make(FAMILY),
        np.random.default_rng(0),
    )
    for sizes in ([(112, 112)], [(56, 112), (112, 112), (56, 112)]):
        pictures = [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]
        chat = [
            {"role": "user", "content": [*[{"type": "image"}] * len(sizes), {"type": "text", "text": "what is this ?"}]}
        ]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = processor(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
        inputs.pop("mm_token_type_ids", None)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)[0]
        result = vlm.generate(chat, pictures, STEPS, ignore_eos=True)
        assert result.stats.layouts == [f"{height}x{width}" for height, width in sizes]
        assert result.stats.prompt_tokens == inputs["input_ids"].shape[1]
        assert result.tokens == ids[inputs["input_ids"].shape[1] :].tolist()
