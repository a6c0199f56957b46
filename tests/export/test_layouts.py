"""What the families' own processors say of a picture: its text, its tokens, and what the vision encoder takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engines.errors import UserError
from export.layouts import adds_special_tokens, layout
from tests.export import processors
from tests.export.test_processors import WRITTEN, prompt
from tests.export.zoo import IMAGE

HERE = Path("checkpoint")
SIZES = {"qwen3_vl": (96, 128)}  # whose patches are of 16 pixels
SHAPES = {  # of 84 x 112 pixels
    "llava": [1, 3, 56, 56],
    "llava_pixtral": [1, 3, 84, 112],
    "mistral3": [1, 3, 84, 112],
    "idefics3": [5, 3, 56, 56],
    "qwen2_vl": [6 * 8, 3 * 2 * 14 * 14],
    "internvl": [7, 3, 56, 56],
    "gemma3": [1, 3, 56, 56],
}


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"paligemma"}))
def test_a_pictures_text_is_the_processors(name: str) -> None:
    """Put in the place of every placeholder of another prompt it gives the processor's ids, whatever the picture."""
    processor, size = processors.make(name), SIZES.get(name, (84, 112))
    made = layout(HERE, processor, IMAGE, *size)
    assert made.tokens == WRITTEN[name].count("I")
    assert made.pixel_values == SHAPES.get(name, made.pixel_values)
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    text = prompt(processor)
    theirs = processor(images=[Image.fromarray(pixels)], text=text, add_special_tokens=False, return_tensors="np")
    whole = text.replace(processor.image_token, made.text)
    ours = processor.tokenizer.backend_tokenizer.encode(whole, add_special_tokens=False).ids
    assert ours == theirs["input_ids"][0].tolist()
    assert theirs["pixel_values"].size == np.prod(made.pixel_values)
    assert made.grid == theirs.get("image_grid_thw", np.empty((1, 0))).tolist()[0]


def test_a_size_that_is_no_multiple_of_the_patches_is_told() -> None:
    with pytest.raises(UserError, match="its processor makes 96x128 of 84x112: ask for that size"):
        layout(HERE, processors.make("qwen3_vl"), IMAGE, 84, 112)


def test_a_processor_that_does_more_than_put_a_text_in_place_is_told() -> None:
    with pytest.raises(UserError, match="does more to a prompt than to put a text in the place of an image"):
        layout(HERE, processors.make("paligemma"), IMAGE, 84, 112)


def test_a_template_that_begins_itself_gets_no_second_beginning() -> None:
    processor = processors.make("llava")
    tokenizer = processor.tokenizer
    tokenizer.add_bos_token = True
    assert not adds_special_tokens(processor, "<s>what")
    assert adds_special_tokens(processor, "what") == bool(tokenizer("").input_ids)
