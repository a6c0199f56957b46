"""Families with M-RoPE, from the checkpoint to the answer: pictures of two sizes in one prompt, and videos.

With all visual tokens, and with those that a level keeps: DeepStack's taps are pruned as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import runtime
from engines.errors import UserError
from export import build
from runtime.generate import Result
from runtime.model import VLM
from runtime.sampling import Sampling
from runtime.video import Clip, Video
from tests.export import processors, pruned, videos, zoo

STEPS = 24
SIZES = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v"), ((112, 84), (56, 140))) | {
    "qwen3_vl": ((128, 96), (64, 160))
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_pictures_and_videos_are_answered_as_hugging_face_answers(family: str, tmp_path: Path) -> None:
    model: Any = zoo.model(family)
    model.save_pretrained(tmp_path / "checkpoint")
    processors.save(family, tmp_path / "checkpoint")
    tall, wide = SIZES[family]
    levels = ["--recipe", "off", "--recipe", str(pruned.recipe(tmp_path))]
    made = ["--out", str(tmp_path / "bundle"), *levels, "--images", "1", "--buckets", "96"]
    sizes = ["--image-sizes", *(f"{height}x{width}" for height, width in SIZES[family])]
    once = ["--guard", "off", "--no-report", "--kernels", "never"]
    assert build.main([str(tmp_path / "checkpoint"), *made, *sizes, *once]) == 0
    vlm, half = (runtime.open(tmp_path / "bundle", level=level, threads=1) for level in ("off", pruned.LEVEL))
    processor = processors.make(family)
    random = np.random.default_rng(0)
    for shown in ([tall], [wide, tall]):
        pictures = [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in shown]
        content = [*[{"type": "image"}] * len(shown), {"type": "text", "text": "what is this ?"}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = processor(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
        result = check(model, inputs, vlm, half, chat, pictures)
        assert result.stats.layouts == [f"{height}x{width}" for height, width in shown]
    frames = [Image.fromarray(random.integers(0, 256, (*wide, 3), np.uint8)) for _ in range(7)]
    picture = Image.fromarray(random.integers(0, 256, (*tall, 3), np.uint8))
    for most in (None, 4):  # frames: seven make four pairs, the last one twice
        video = Video(frames, most, fps=3)
        (clip,) = vlm.pictures.shown([video])
        assert isinstance(clip, Clip)
        chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what is this ?"}]}]
        taken = [frames[i] for i in clip.taken]
        inputs = videos.inputs(model, processor, chat, taken, clip.taken, len(frames), fps=3)
        result = check(model, inputs, vlm, half, chat, [video])
        assert result.stats.layouts == [f"{wide[0]}x{wide[1]}"] * (2 if most else 4)
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "what is this ?"}]
    chat = [{"role": "user", "content": content}]
    assert vlm.generate(chat, [picture, video], 2).stats.images == 3
    with pytest.raises(UserError, match="the messages have image, video, and given were video, image"):
        vlm.generate(chat, [video, picture], 2)


def check(model: Any, inputs: Any, vlm: VLM, half: VLM, chat: Any, shown: Any) -> Result:
    """Both levels' answers; what the one of all tokens took."""
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)[0]
    whole = vlm.generate(chat, shown, STEPS, ignore_eos=True)
    assert whole.stats.prompt_tokens == inputs["input_ids"].shape[1]
    assert whole.tokens == ids[inputs["input_ids"].shape[1] :].tolist()
    result = half.generate(chat, shown, STEPS, ignore_eos=True, sampling=Sampling(logprobs=0))
    pruned.check(result.stats.patches)
    tokens, told = pruned.answered(model, inputs, result.stats.patches, STEPS)
    assert result.tokens == tokens
    np.testing.assert_allclose([each.logprob for each in result.logprobs], told, atol=1e-3)
    return whole
