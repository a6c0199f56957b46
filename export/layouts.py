"""What a picture of one size is in a prompt and to a vision encoder: the checkpoint's own processor tells it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import UserError, one_line
from engines.layout import Layout
from engines.preprocessor import ImagePreprocessor

SIDE = 448  # of pictures where the processor takes any size and none is asked for
DO_NOT_FIT = "image token, chat template or patch size of the processor do not fit the model"


def sizes_of(path: Path, preprocessor: ImagePreprocessor, asked: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Heights and widths of the layouts to make: what the processor's own rule brings pictures of those sizes to.

    Raises:
        UserError: the checkpoint's processor makes one size of every picture, and another one is asked for.
    """
    if (fixed := preprocessor.fixed_size) is None:
        return list(dict.fromkeys(preprocessor.kind.target(*size) for size in asked or [(SIDE, SIDE)]))
    if other := [size for size in asked if size != fixed]:
        (height, width), (own_height, own_width) = other[0], fixed
        raise UserError(
            f"--image-sizes {height}x{width}: {path} makes {own_height}x{own_width} of every picture, and its vision "
            "encoder takes no other: leave --image-sizes out"
        )
    return [fixed]


def adds_special_tokens(processor: Any, rendered: str) -> bool:
    """Whether the tokenizer adds tokens of its own to a rendered chat: not where the template has begun with `<s>`."""
    tokenizer = processor.tokenizer
    begun = tokenizer.bos_token is not None and rendered.startswith(tokenizer.bos_token)
    return bool(tokenizer("").input_ids) and not begun


def layout(path: Path, processor: Any, image_token_id: int, height: int, width: int) -> Layout:
    """What the processor makes of a prompt with a blank picture of this size.

    Raises:
        UserError: it makes none, or none that can be put together from a text that stands for the placeholder.
    """
    from PIL import Image

    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    blank = Image.new("RGB", (width, height))
    try:
        rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        special = adds_special_tokens(processor, rendered)
        options = {"add_special_tokens": special, "return_text_replacement_offsets": True}
        made = processor(images=[blank], text=[rendered], **options)
        ids = [int(i) for i in made["input_ids"][0]]
        (replaced,) = made["text_replacement_offsets"][0]
        pixels = np.asarray(made["pixel_values"])
        grid = np.asarray(made.get("image_grid_thw", [[]]))[0]
        expanded = rendered.replace(processor.image_token, replaced["replacement"])
        own = processor.tokenizer.backend_tokenizer.encode(expanded, add_special_tokens=special).ids
    except Exception as error:  # templates and processors are the checkpoint's: they can fail in any way
        raise UserError(f"{path}: its processor makes no prompt with an image: {one_line(error)}") from error
    if not (tokens := ids.count(image_token_id)):
        raise UserError(f"{path}: its prompts have 0 image tokens (id {image_token_id}) an image: {DO_NOT_FIT}")
    if own != ids:
        raise UserError(f"{path}: its processor does more to a prompt than to put a text in the place of an image")
    patch = getattr(processor.image_processor, "patch_size", 0)
    if len(grid) and (taken := (int(grid[1]) * patch, int(grid[2]) * patch)) != (height, width):
        raise UserError(f"{path}: its processor makes {taken[0]}x{taken[1]} of {height}x{width}: ask for that size")
    shape = list(pixels.shape)[-4:] if pixels.ndim > 4 else list(pixels.shape)  # of one prompt with one picture
    text = replaced["replacement"]
    return Layout(f"{height}x{width}", height, width, shape, text, tokens, [int(n) for n in grid])
