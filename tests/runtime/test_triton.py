"""A repository that `python -m engines triton` wrote, run as Triton's Python backend runs it, by a stand-in."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from google.protobuf.json_format import MessageToJson
from PIL import Image
from tritonclient.grpc import model_config_pb2

import runtime
from engines import triton
from engines.__main__ import main
from runtime.sampling import Sampling
from tests.runtime import triton_stand_in
from tests.runtime.asking import image
from tests.runtime.triton_stand_in import Request

Load = Callable[..., Any]


@pytest.fixture
def load(bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes a repository and loads its model: with the config that Triton would have parsed from config.pbtxt."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_stand_in.module())

    def made(*options: str, break_it: Callable[[Path], None] = lambda folder: None) -> Any:
        assert main(["triton", str(bundle_path), "--out", str(tmp_path / "out"), *options]) == 0
        folder = tmp_path / "out" / "bundle"
        break_it(folder)
        config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        model.initialize({"model_config": MessageToJson(config, preserving_proto_field_name=True)})
        return model

    yield made
    sys.modules.pop("runtime.triton", None)  # it has imported the stand-in


def request(
    text: str, *images: bytes, stream: bool | None = None, cancelled_after: int = 10**9, **options: Any
) -> Request:
    inputs = {triton.TEXT: np.array([text.encode()], object)}
    if images:
        inputs[triton.IMAGES] = np.array(images, object)
    if stream is not None:
        inputs[triton.STREAM] = np.array([stream])
    if options:
        inputs[triton.SAMPLING] = np.array([json.dumps(options).encode()], object)
    return Request(inputs, cancelled_after)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def texts(request: Request) -> list[str]:
    assert request.sender.ended
    return [sent.outputs[triton.ANSWER].item().decode() for sent in request.sender.sent]


def stats(request: Request) -> Any:
    *before, last = [sent.outputs[triton.STATS].item() for sent in request.sender.sent]
    assert set(before) <= {b""}
    return json.loads(last)


def test_it_answers_as_the_runtime_does_whole_and_in_pieces(load: Load, bundle_path: Path) -> None:
    vlm, model = runtime.open(bundle_path, level="tight", threads=1), load("--level", "tight", "--threads", "1")
    file = png(image(0))
    url = b"data:image/png;base64," + base64.b64encode(file)
    sampling = Sampling(temperature=0.9, seed=5, top_k=9, logprobs=2)
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5, "top_k": 9, "logprobs": 2, "max_tokens": 7}
    expected = vlm.generate("what is it", [image(0)], 7, sampling=sampling)
    requests = [request("what is it", file, stream=stream, **options) for stream in (None, False, True)]
    requests.append(request("what is it", url, stream=True, **options))
    model.execute(requests)
    for each in requests:
        assert "".join(texts(each)) == expected.text
        told = stats(each)
        assert told["tokens"] == expected.tokens
        assert told["level"] == "tight"
        assert told["kv_bytes"] == expected.stats.kv_bytes
        assert len(told["logprobs"]) == len(expected.tokens)
    assert [len(each.sender.sent) for each in requests[:2]] == [1, 1]
    assert len(requests[2].sender.sent) > 3
    model.execute([plain := request("how many red")])
    assert texts(plain) == [vlm.generate("how many red").text]
    model.execute([later := request("what is it", file, file, question_later=True, max_tokens=3)])
    assert texts(later) == [vlm.generate("what is it", [image(0)] * 2, 3, question_later=True).text]


def test_a_request_that_is_cancelled_ends(load: Load) -> None:
    model, asked = load("--level", "tight"), request("what is it", stream=True, cancelled_after=2, max_tokens=50)
    model.execute([asked])
    assert stats(asked)["stop_reason"] == "cancelled"
    assert len(texts(asked)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"surprise": 1}, "sampling_parameters has no 'surprise': choose max_tokens, question_later, temperature"),
        ({"temperature": "hot"}, "temperature, where it is not 0, must be a number, got 'hot'"),
        ({"max_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"question_later": 1}, "question_later must be true or false"),
        ({"question_later": True}, "question_later needs an image"),
    ],
)
def test_mistakes_are_told_and_the_next_request_is_answered(options: Any, message: str, load: Load) -> None:
    model = load()
    wrong, right = request("what is it", **options), request("what is it", max_tokens=2)
    model.execute([wrong, right])
    (sent,) = wrong.sender.sent
    assert message in sent.error.message  # type: ignore[union-attr]
    assert sent.error.code == 3  # type: ignore[union-attr]
    assert texts(right)[0]


def test_inputs_that_are_none(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    wrong = {
        "text_input must be one text, got 0": Request({}),
        "text_input must be one text, got 2": Request({triton.TEXT: np.array([b"a", b"b"], object)}),
        "text_input: not UTF-8": Request({triton.TEXT: np.array([b"\xff"], object)}),
        "sampling_parameters: not JSON": Request(
            {triton.TEXT: np.array([b"a"], object), triton.SAMPLING: np.array([b"{"], object)}
        ),
        "sampling_parameters must be a JSON object": Request(
            {triton.TEXT: np.array([b"a"], object), triton.SAMPLING: np.array([b"[]"], object)}
        ),
        "image 1: not a readable image": request("what", b"abc"),
        "image 2: not base64": request("what", png(image(0)), b"data:image/png;base64,@@"),
    }
    model.execute([*wrong.values()])
    for message, each in wrong.items():
        (sent,) = each.sender.sent
        assert each.sender.ended
        assert sent.error
        assert message in sent.error.message
    monkeypatch.setattr(model._vlm, "stream", lambda *_, **__: 1 / 0)
    model.execute([broken := request("what")])
    assert broken.sender.sent[0].error
    assert broken.sender.sent[0].error.code == 1
    assert broken.sender.ended


def test_a_bundle_that_was_damaged_since_is_told_when_the_model_is_loaded(load: Load) -> None:
    def damage(folder: Path) -> None:
        file = folder / "1" / "bundle" / "tokenizer.json"
        file.write_bytes(file.read_bytes()[1:])

    with pytest.raises(triton_stand_in.TritonModelException, match=r"tokenizer\.json is damaged"):
        load(break_it=damage)
