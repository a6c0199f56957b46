"""A tokenizer in the place of a processor, for models that take no images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.errors import UserError
from export.layouts import adds_special_tokens


class TextProcessor:
    """What this project asks of a Hugging Face processor, by a tokenizer alone."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The rendered template; templates of such models take a message's content as one text."""
        plain = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
        return self.tokenizer.apply_chat_template(plain, tokenize=False, **options)

    def __call__(self, text: str, images: Any = None, **options: Any) -> Any:
        if images:
            raise UserError("this model takes no images")
        return self.tokenizer(text, add_special_tokens=adds_special_tokens(self, text), **options)
