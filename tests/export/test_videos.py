"""How families write videos: as their own processors do, or not at all."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf

from engines.layout import Layout, VideoStyle
from export.mrope import FAMILIES
from export.preprocessors import settings
from export.videos import video_style
from tests.export import processors, zoo

LAYOUT = Layout("64x64", 64, 64, [16, 8], "<image>", 4, [1, 4, 4])


@cache
def model(family: str) -> Any:
    own = zoo.ZOO[family]
    config = hf.AutoConfig.for_model(family, image_token_id=zoo.IMAGE, **own | {"text_config": zoo.TEXT})
    with torch.device("meta"):
        return hf.AutoModelForImageTextToText.from_config(config)


def style(family: str, processor: Any) -> VideoStyle | None:
    return video_style(processor, model(family), settings(processor), LAYOUT)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_pairs_of_frames_have_a_style(family: str) -> None:
    """Which the exporter has compared with what the family's own processor writes."""
    found = style(family, processor := processors.make(family))
    assert found
    assert found.frames == 2
    assert processor.tokenizer.convert_tokens_to_ids(found.token) == found.token_id
    assert (found.token_id == zoo.IMAGE) == (family == "glm4v")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_otherwise_is_no_style(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = processors.make(family)
    write = type(processor).replace_video_token
    monkeypatch.setattr(type(processor), "replace_video_token", lambda *known, **more: write(*known, **more) + " ")
    assert style(family, processor) is None
    monkeypatch.undo()
    processor.chat_template = processor.chat_template.replace("'video'", "'film'").replace("c['text']", "c.text")
    assert style(family, processor) is None


def test_others_have_none() -> None:
    assert style("llava", processors.make("llava")) is None
