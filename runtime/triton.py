"""The model that Triton's Python backend runs: `engines.triton` writes the repository it lies in.

`triton_python_backend_utils` is a module of Triton's own, and only there while it runs this.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]

import runtime
from engines.config import parse_json
from engines.errors import UserError, one_line
from engines.triton import ANSWER, IMAGES, SAMPLING, STATS, STREAM, TEXT
from runtime.model import MAX_NEW_TOKENS
from runtime.sampling import Sampling

DATA_URL = b"data:"


class Model:
    """What Triton calls: once `initialize`, then `execute` with the requests that are there."""

    bundle: Path

    def initialize(self, args: dict[str, str]) -> None:
        given = json.loads(args["model_config"]).get("parameters", {})
        options: dict[str, Any] = {name: value["string_value"] for name, value in given.items()}
        try:
            if "threads" in options:
                options["threads"] = int(options["threads"])
            self._vlm = runtime.open(self.bundle, **options)
        except (UserError, ValueError) as error:
            raise triton.TritonModelException(one_line(error)) from error

    def execute(self, requests: list[Any]) -> None:
        """Answer one after another; a decoupled model returns nothing, and sends."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._answer(request, sender)
            except UserError as error:
                told = triton.TritonError(one_line(error), triton.TritonError.INVALID_ARG)
                sender.send(triton.InferenceResponse(error=told), flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:  # else Triton would wait for an answer that never comes
                told = triton.TritonError(f"internal error: {one_line(error)}", triton.TritonError.INTERNAL)
                sender.send(triton.InferenceResponse(error=told), flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any, sender: Any) -> None:
        """Pieces as they come if they were asked for; the last response has the rest of the text, and what it took."""
        (text,) = _texts(request, TEXT, 1)
        streams = triton.get_input_tensor_by_name(request, STREAM)
        pieces = streams is not None and bool(streams.as_numpy().reshape(-1)[0])
        max_new_tokens, later, sampling = _options(_texts(request, SAMPLING, 0))
        images = [_image(data, number) for number, data in enumerate(_bytes(request, IMAGES), 1)]
        stream = self._vlm.stream(
            text,
            images,
            max_new_tokens,
            question_later=later,
            sampling=sampling,
            on_restart=None if pieces else lambda: None,
        )
        for piece in stream:
            if sender.is_cancelled():
                stream.close()
                break
            if pieces:
                sender.send(_response(piece, ""))
        result = stream.result
        told = dataclasses.asdict(result.stats) | {"finish_reason": result.finish_reason, "tokens": result.tokens}
        told["logprobs"] = [dataclasses.asdict(each) for each in result.logprobs]
        last = _response("" if pieces else result.text, json.dumps(told))
        sender.send(last, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _response(text: str, stats: str) -> Any:
    values = ((ANSWER, text), (STATS, stats))
    return triton.InferenceResponse([triton.Tensor(name, np.array([value.encode()], object)) for name, value in values])


def _bytes(request: Any, name: str) -> list[bytes]:
    tensor = triton.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [*tensor.as_numpy().reshape(-1)]


def _texts(request: Any, name: str, least: int) -> list[str]:
    try:
        texts = [each.decode() for each in _bytes(request, name)]
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8: {one_line(error)}") from error
    if not least <= len(texts) <= 1:
        raise UserError(f"{name} must be one text, got {len(texts)}")
    return texts


def _image(data: bytes, number: int) -> bytes:
    """The bytes of an image's file, which JSON can only take as a data URL."""
    if not data.startswith(DATA_URL):
        return data
    try:
        return base64.b64decode(data.partition(b";base64,")[2], validate=True)
    except ValueError as error:
        raise UserError(f"image {number}: not base64: {one_line(error)}") from error


def _options(texts: list[str]) -> tuple[int, bool, Sampling]:
    """Of `sampling_parameters`: tokens at most, whether the question comes later, and the rest."""
    data = parse_json(texts[0].encode(), SAMPLING) if texts and texts[0] else {}
    if not isinstance(data, dict):
        raise UserError(f"{SAMPLING} must be a JSON object, got {data!r}")
    max_new_tokens, later = data.pop("max_tokens", MAX_NEW_TOKENS), data.pop("question_later", False)
    known = [field.name for field in dataclasses.fields(Sampling)]
    if unknown := sorted(data.keys() - set(known)):
        raise UserError(f"{SAMPLING} has no {unknown[0]!r}: choose max_tokens, question_later, {', '.join(known)}")
    if not isinstance(later, bool):
        raise UserError(f"question_later must be true or false, got {later!r}")
    return max_new_tokens, later, Sampling(**data)
