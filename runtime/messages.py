"""A prompt as messages: a plain text is one of them, and a video may be as many images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from engines.errors import UserError
from runtime.video import Clip, Shown, flat

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]


def messages_of(prompt: Prompt, shown: Sequence[Shown]) -> list[dict[str, Any]]:
    """A prompt as messages; a plain string is one of the user's, what it shows first."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("the question is empty")
        before = [{"type": "video" if isinstance(each, Clip) else "image"} for each in flat(shown)]
        content = [*before, {"type": "text", "text": prompt}]
        return [{"role": "user", "content": content}]
    if not isinstance(prompt, list | tuple) or not prompt:
        raise UserError("the prompt must be a text or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(f"a message must have a role and a content, got {message!r}")
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list | tuple) or not all(_is_part(part) for part in parts):
            raise UserError(
                'a message\'s content must be a text or a list of {"type": "image"}, {"type": "video"} and '
                f'{{"type": "text", "text": "..."}}, got {content!r}'
            )
    clips = [each for each in shown if isinstance(each, Clip)]
    return [_spread(message, clips) for message in prompt] if clips else [dict(message) for message in prompt]


def _spread(message: Mapping[str, Any], clips: list[Clip]) -> dict[str, Any]:
    """The message with images in the place of a video whose frames are images; takes its videos from the list."""
    parts: list[Any] = []
    for part in message["content"] if "video" in kinds_of(message) else ():
        clip = clips.pop(0) if part["type"] == "video" and clips else None
        parts += [part] if clip is None or clip.style else [{"type": "image"}] * len(clip.parts)
    return {**message, "content": parts or message["content"]}


def kinds_of(message: Mapping[str, Any]) -> set[str]:
    return {"text"} if isinstance(message["content"], str) else {part["type"] for part in message["content"]}


def plain(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A message's content as templates of models without images take it: one text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in ("image", "video") or (part.get("type") == "text" and isinstance(part.get("text"), str))
