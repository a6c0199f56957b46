"""Answers as OpenAI's chat completions tell them, whole or in chunks; and what is ours, under `unicache`."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict
from typing import Any

from runtime.generate import Result
from runtime.model import VLM
from runtime.sampling import Logprob
from runtime.server.images import region
from runtime.server.levels import Levels, grid
from runtime.server.protocol import Asked
from runtime.server.worker import Job, Piece

FINISHED = {"cancelled": "length"}  # cut off: OpenAI has no word of its own; `unicache.stop_reason` tells it


class Answer:
    """One answer's JSON."""

    def __init__(self, asked: Asked, levels: Levels, vlm: VLM, reason: str, job: Job) -> None:
        """
        Args:
            reason: why it is this model's level.
        """
        self._asked, self._levels, self._vlm, self._reason, self._job = asked, levels, vlm, reason, job
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.request.model,
        }

    def whole(self, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        choice = self._choice("message", message, result.logprobs, _finished(result))
        rest = {"choices": [choice], "usage": usage(result), "unicache": self.extra(result)}
        return self._head | {"object": "chat.completion"} | rest

    def begin(self) -> bytes:
        return self._chunk([self._choice("delta", {"role": "assistant", "content": ""}, [], None)])

    def piece(self, piece: Piece) -> bytes:
        return self._chunk([self._choice("delta", {"content": piece.text}, piece.logprobs, None)])

    def end(self, result: Result) -> bytes:
        """The last chunks, and the mark behind them."""
        chunk = self._chunk([self._choice("delta", {}, [], _finished(result))], unicache=self.extra(result))
        if self._asked.request.stream_options.include_usage:
            chunk += self._chunk([], usage=usage(result))
        return chunk + b"data: [DONE]\n\n"

    def extra(self, result: Result) -> dict[str, Any]:
        """What the compression did, and what the answer took."""
        stats, layouts = result.stats, self._levels.layouts
        decoding = stats.seconds.get("decode", 0.0) + stats.seconds.get("compact", 0.0)
        read = stats.generated_tokens - (stats.stop_reason != "end")  # tokens that the model read of its answer
        extra = {
            "level": stats.level,
            "reason": self._why(result),
            "backend": stats.backend,
            "provider": stats.provider,
            "kernels": stats.kernels,
            "kv_bytes": stats.kv_bytes,
            "kv_bytes_uncompressed": stats.kv_bytes_uncompressed,
            "visual_tokens": stats.visual_tokens,
            "visual_tokens_uncompressed": sum(layouts[name].tokens for name in stats.layouts),
            "layouts": stats.layouts,
            "compactions": stats.compactions,
            "tokens_per_second": read / decoding if read > 0 and decoding else None,
            "alarms": [asdict(alarm) for alarm in stats.alarms],
            "retries": stats.retries,
            "seconds": stats.seconds,
            "seconds_waited": self._job.waited,
            "stop_reason": stats.stop_reason,
        }
        return extra | ({"kept_patches": self._patches(result)} if self._asked.request.unicache.kept_patches else {})

    def _why(self, result: Result) -> str:
        """Why it is this level."""
        own = self._vlm.level
        if self._asked.request.unicache.question_later:
            own = self._levels.bundle.manifest.levels[own].unknown or own
        if result.stats.reason:  # the memory budget has decided
            return result.stats.reason
        if result.stats.level != own:
            return f"lighter than {own} after an alarm" + ", answered anew" * result.stats.retries
        return self._reason + f"; {self._vlm.level} names it for questions that come later" * (own != self._vlm.level)

    def _patches(self, result: Result) -> list[dict[str, Any]]:
        """Of each image its grid, where that lies on it, and the share of KV heads that hold each patch."""
        told = []
        for image, name, held in zip(self._asked.images, result.stats.layouts, result.stats.patches, strict=False):
            if (lies := grid(self._levels.layouts[name])) is None:
                return []
            seen = region(image.width, image.height, self._levels.preprocessor)
            told.append({"rows": lies[0], "columns": lies[1], "region": seen, "held": held})
        return told

    def _choice(self, name: str, message: dict[str, Any], logprobs: list[Logprob], end: str | None) -> dict[str, Any]:
        told = {"content": [self._logprob(each) for each in logprobs], "refusal": None}
        asked = self._asked.request.logprobs and (logprobs or name == "message")
        return {"index": 0, name: message, "logprobs": told if asked else None, "finish_reason": end}

    def _logprob(self, each: Logprob) -> dict[str, Any]:
        own = self._token(each.token) | {"logprob": each.logprob}
        return own | {"top_logprobs": [self._token(token) | {"logprob": value} for token, value in each.top]}

    def _token(self, token: int) -> dict[str, Any]:
        text = self._vlm.tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _chunk(self, choices: list[dict[str, Any]], **rest: Any) -> bytes:
        return event(self._head | {"object": "chat.completion.chunk", "choices": choices} | rest)


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(result: Result) -> dict[str, Any]:
    """Tokens as OpenAI counts them; an image's are those before any was pruned."""
    prompt, generated = result.stats.prompt_tokens, result.stats.generated_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _finished(result: Result) -> str:
    return FINISHED.get(result.finish_reason, result.finish_reason)
