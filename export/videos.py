"""How a family writes a video into a prompt: said here, and checked against the checkpoint's own processor."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np

from engines.layout import Layout, VideoStyle
from engines.preprocessor import ImagePreprocessor, Patches

FRAMES, FPS = 3, 2.0  # of the video that is written in order to check


def video_style(processor: Any, model: Any, preprocessor: ImagePreprocessor, layout: Layout) -> VideoStyle | None:
    """The style of a family whose encoder takes a video as pictures one after another; None: it has none.

    Also where its processor or chat template writes something else, or nothing: there pictures can be shown only.
    """
    kind, family = preprocessor.kind, model.config.model_type
    if not isinstance(kind, Patches) or family not in STYLES:
        return None
    start, end = "", ""
    token, token_id = processor.video_token, model.config.video_token_id
    if family == "qwen3_vl":
        start, end = processor.vision_start_token, processor.vision_end_token
    if family == "glm4v":  # a picture of a video is written as any other
        start, end = "<|begin_of_image|>", "<|end_of_image|>"
        token, token_id = processor.image_token, model.config.image_token_id
    known = STYLES[family]
    style = VideoStyle(processor.video_token, token, int(token_id), kind.temporal, start, end, **known)
    return style if _rendered(processor, style) and _written(processor, style, kind, layout) else None


STYLES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {"time": "before", "ends": True},
    "glm4v": {"time": "behind"},
}


def _rendered(processor: Any, style: VideoStyle) -> bool:
    """Whether the chat template writes a video, once."""
    content = [{"type": "video"}, {"type": "text", "text": "?"}]
    try:
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    except Exception:  # a template is a program of the checkpoint's: it can fail in any way
        return False
    return bool(text.count(style.placeholder) == 1)


def _written(processor: Any, style: VideoStyle, kind: Patches, layout: Layout) -> bool:
    """Whether the processor writes a video as the style does. It is asked without its video processor."""
    from transformers.video_utils import VideoMetadata

    own = copy.copy(processor)
    own.video_processor = SimpleNamespace(merge_size=kind.merge, temporal_patch_size=kind.temporal)
    indices = list(range(1, 1 + 2 * FRAMES, 2))
    grid = np.array([[-(-FRAMES // kind.temporal), *layout.grid[1:]]])
    known = VideoMetadata(total_num_frames=2 * FRAMES + 1, fps=FPS, frames_indices=[*indices])
    try:
        text = own.replace_video_token({"video_grid_thw": grid, "video_metadata": [known]}, 0)
    except Exception:  # of another version, it may want to be asked otherwise
        return False
    return bool(text == style.text(layout.tokens, [index / FPS for index in indices]))
