"""Checkpoints' processors are loaded, without torchvision, and do what their families do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from export.preprocessors import load_processor
from tests.export import processors
from tests.export.processors import TINY
from tests.export.zoo import END, IMAGE, START, TEXT

# What a picture of 84 x 112 pixels becomes, from each family's description: a tiny encoder makes 16 tokens of 56 x 56
# pixels, 4 if it merges. I image token, F fake one, R row and column, G global, B and E break and end, S start, T tile.
TILE = "FR" + 4 * "I"
WRITTEN = {
    "llava": 16 * "I",
    "llava_pixtral": 5 * (8 * "I" + "B") + 8 * "I" + "E",  # patches of 14, a mark behind every row
    "mistral3": 2 * (4 * "I" + "B") + 4 * "I" + "E",
    "smolvlm": 2 * (2 * TILE + "\n") + "\nFG" + 4 * "I" + "F",  # 112 x 112 are 2 x 2 tiles, and the whole
    "qwen2_vl": "S" + 12 * "I" + "E",
    "qwen3_vl": "S" + 12 * "I" + "E",  # patches of 16: 96 x 128
    "glm4v": "S" + 12 * "I" + "E",
    "internvl": "S" + 28 * "I" + "E",  # 2 rows of 3 tiles fit 84 x 112 best, and the whole
    "aya_vision": "S" + 6 * ("T" + 4 * "I") + "T" + 4 * "I" + "E",
    "paligemma": 16 * "I",
    "gemma3": "\n\nS" + 4 * "I" + "E\n\n",
}
WRITTEN["idefics3"], WRITTEN["qwen2_5_vl"] = WRITTEN["smolvlm"], WRITTEN["qwen2_vl"]
SYMBOLS = {"fake": "F", "<row": "R", "global": "G", "BREAK": "B", "TILE": "T", "start": "S", "START": "S", "begin": "S"}


def prompt(processor: Any) -> str:
    content = [{"type": "image"}, {"type": "text", "text": "what is this ?"}]
    return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("name", TINY)
def test_saved_processor_is_loaded_and_writes_pictures_into_the_prompt(name: str, tmp_path: Path) -> None:
    processor = load_processor(processors.save(name, tmp_path))
    made = processors.make(name)
    assert type(processor).__name__ == type(made).__name__
    given: dict[str, Any] = {"images": [picture(84, 112)], "return_tensors": "np"}
    found, want = processor(text=prompt(processor), **given), made(text=prompt(made), **given)
    np.testing.assert_array_equal(found["input_ids"], want["input_ids"])
    ids = found["input_ids"][0].tolist()
    assert ids.count(IMAGE) > 0
    assert processor.tokenizer.unk_token_id not in ids
    assert max(ids) < TEXT["vocab_size"]
    np.testing.assert_array_equal(found["pixel_values"], want["pixel_values"])


def test_a_paligemma_without_a_template_gets_one(tmp_path: Path) -> None:
    made = processors.make("paligemma")
    made.chat_template = None
    made.save_pretrained(tmp_path)
    processor = load_processor(tmp_path)
    assert prompt(processor) == "<image><s>what is this ?\n"
    given: dict[str, Any] = {"images": [picture(84, 112)], "return_tensors": "np"}
    ids = processor(text=prompt(processor), **given)["input_ids"]
    np.testing.assert_array_equal(ids, made(text="<image>what is this ?", **given)["input_ids"])
    said = [{"role": "user", "content": "what"}]
    assert processor.apply_chat_template(said, add_generation_prompt=True) == "<s>what\n"


@pytest.mark.parametrize("name", WRITTEN)
def test_picture_is_written_as_the_family_does(name: str) -> None:
    processor = processors.make(name)
    ids = processor(images=[picture(84, 112)], text=prompt(processor), return_tensors="np")["input_ids"][0].tolist()

    def symbol(number: int, token: str) -> str:
        if number in (IMAGE, START, END):
            return {IMAGE: "I", START: "S", END: "E"}[number]
        if token in ("[IMG_END]", "<|END_OF_IMG|>"):
            return "E"
        marks = [symbol for part, symbol in SYMBOLS.items() if part in token and token != processors.TURN]
        return token if set(token) == {"\n"} else marks[0] if marks else " "

    tokens = processor.tokenizer.convert_ids_to_tokens(ids)
    found = re.fullmatch(r" +\n(.+?) {6,7}\n+", "".join(map(symbol, ids, tokens)), re.DOTALL)  # behind "user"
    assert found
    assert found[1] == WRITTEN[name]
