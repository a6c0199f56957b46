"""A video as Hugging Face takes it, for families whose encoder looks at pairs of frames; without its video processor.

That wants torchvision. What it makes of frames that need no resizing are its image processor's patches, which hold a
picture twice, once for each frame of a pair.
"""

from __future__ import annotations

import copy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from transformers.video_utils import VideoMetadata

PAIR = 2


def inputs(
    model: Any, processor: Any, chat: Any, frames: list[Image], taken: list[int], total: int, fps: float
) -> dict[str, Any]:
    """What the model takes of a chat with one video.

    Args:
        frames: that were taken, of the size of a layout.
        taken: their indices among the `total` of the source.
    """
    patches, grid = video(processor, frames)
    own = copy.copy(processor)
    own.video_processor = SimpleNamespace(merge_size=own.image_processor.merge_size, temporal_patch_size=PAIR)
    metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=[*taken])
    replaced = own.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    (whole,), _ = own.get_text_with_replacements([text], videos_replacements=[replaced])
    ids = own.tokenizer([whole], add_special_tokens=False)["input_ids"]
    seconds = PAIR / VideoMetadata(total_num_frames=total, fps=fps, frames_indices=[*taken]).sampled_fps
    made = {
        "input_ids": torch.tensor(ids),
        "mm_token_type_ids": torch.tensor(own.create_mm_token_type_ids(ids)),
        "pixel_values_videos": patches,
        "video_grid_thw": grid,
        "second_per_grid_ts": torch.tensor([seconds]),
    }
    taken_by = signature(model.forward).parameters
    return {name: value for name, value in made.items() if name in taken_by}


def video(processor: Any, frames: list[Image]) -> tuple[Tensor, Tensor]:
    """Patches of a video's pairs of frames, and its grid [1, 3]."""
    images = [processor.image_processor(images=[frame], return_tensors="pt") for frame in frames]
    side = processor.image_processor.patch_size
    twice = [np.asarray(image["pixel_values"]).reshape(-1, 3, PAIR, side, side) for image in images]
    twice += twice[-1:] * (len(twice) % PAIR)
    pairs = [np.stack([a[:, :, 0], b[:, :, 1]], axis=2) for a, b in zip(twice[::2], twice[1::2], strict=True)]
    _, height, width = images[0]["image_grid_thw"][0].tolist()
    return torch.tensor(np.concatenate(pairs)).flatten(1), torch.tensor([[len(pairs), height, width]])
