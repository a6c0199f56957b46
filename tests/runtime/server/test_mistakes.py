"""Whatever a client sends wrong is told in OpenAI's form, and nothing of the server's inside."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, data_url, png, question

Serve = Callable[..., Served]


def refusal(answer: tuple[int, dict[str, str], Any], status: int) -> dict[str, Any]:
    assert answer[0] == status, answer
    (error,) = answer[2].values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    return error


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares so many pixels."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def with_url(url: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"model": "bundle", "messages": [{"role": "user", "content": [part, {"type": "text", "text": "what"}]}]}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"[" * 10_000, "Invalid JSON"),
        ([], "Input should be an object"),
        ({}, "model: Field required"),
        ({"model": "bundle", "messages": []}, "messages: List should have at least 1"),
        ({"model": "bundle", "messages": [{"role": "robot", "content": "what"}]}, "messages.0.role: Input should be"),
        ({"model": "bundle", "messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (
            {"model": "bundle", "messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages.0.content.0: Input tag 'audio'",
        ),
        (
            {"model": "bundle", "messages": [{"role": "user", "content": [{"type": "a\nb"}]}]},
            "messages.0.content.0: Input tag 'a b'",
        ),
        (with_url(3), "messages.0.content.0.image_url.url: Input should be a valid string"),
        ({"model": "bundle", "messages": [{"role": "user", "content": 3}]}, "messages.0.content: Input should be"),
        ({"model": "bundle", "messages": [{"role": "user", "content": " "}]} | {"max_tokens": 0}, "max_tokens"),
        (question("what", top_p="high"), "top_p: Input should be a valid number"),
        (question("what", top_p=2), "top_p must be from 0 to 1"),
        (question("what", temperature=1e-9), "temperature"),
        (question("what", max_tokens=5000), "max_tokens must be at most 1024"),
        (question("what", top_logprobs=3), "top_logprobs needs logprobs"),
        (question("what", top_logprobs=30, logprobs=True), "less than or equal to 20"),
        (question("what", stop=["a"] * 17), "at most 16"),
        (question("what", stop=[""]), "none of them empty"),
        (question("what", stop=["a" * 257]), "stop.0: String should have at most 256 characters"),
        (
            {"model": "bundle", "messages": [{"role": "user", "content": "what"}] * 121},
            "121 messages are more than the 120",
        ),
        *((question(text), "the question is empty") for text in ("", " \n")),
        (question(" ", png(image(1))), "the question is empty"),
        (question("what", messages=[{"role": "user", "content": []}]), "the question is empty"),
        (question("what", messages=[{"role": "system", "content": "be brief"}]), "the question is empty"),
        (
            question("", messages=[{"role": "user", "content": text} for text in ("what", "")]),
            "the question is empty",
        ),
        (question("what", unicache={"question_later": True}), "needs an image"),
        (question("what", unicache={"kept": True}), "parameter 'unicache.kept' is not supported"),
        (question("what", messages=[{"role": "user", "content": [{"type": "image"}]}]), "than files"),
        (with_url("https://example.com/a.png"), "images are not fetched from this host"),
        (with_url("HTTP://example.com/a.png"), "images are not fetched from this host"),
        (with_url("/etc/passwd"), "no data URL"),
        (with_url("file:///etc/passwd"), "no data URL"),
        (with_url("data:image/png,abc"), "no data URL"),
        (with_url("data:image/png;base64,@@@@"), "not base64"),
        (with_url(data_url(b"GIF89a")), "image 1: not a readable image"),
        (with_url(data_url(b"%!PS-Adobe-3.0 EPSF-3.0")), "image 1: not a readable image"),
        (with_url(data_url(png(image(1))[:-30])), "image 1: not a readable image"),
        (with_url(data_url(bomb(20000, 20000))), "image 1 has more than 32 million pixels"),
        (with_url(data_url(bomb(12000, 12000))), "image 1 has more than 32 million pixels"),
        (with_url(data_url(bomb(8000, 8000))), "8000 x 8000 pixels, more than 32 million"),
    ],
)
def test_wrong_requests(served: Served, body: Any, message: str) -> None:
    error = refusal(served.chat(body), 400)
    assert message in (told := error["message"])
    assert " at 0x" not in told
    kinds = {"not a readable image": "invalid_image", "million pixels": "image_too_large"}
    assert error["code"] == next((code for words, code in kinds.items() if words in told), error["code"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("tools", [{}]),
        ("tool_choice", "auto"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "low"),
        ("best_of", 2),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served: Served, name: str, value: Any) -> None:
    error = refusal(served.chat(question("what", **{name: value})), 400)
    assert (error["message"], error["param"]) == (f"parameter {name!r} is not supported", name)
    assert error["code"] == "unsupported_parameter"


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    nothing: dict[str, Any] = {
        "n": 1,
        "tools": None,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "metadata": {"a": "b"},
    }
    nothing |= {"parallel_tool_calls": False, "functions": [], "tool_choice": "none", "store": False}
    nothing |= {"response_format": {"type": "text"}, "stop": None, "seed": None, "service_tier": None}
    plain = served.chat(question("what", max_tokens=3))[2]
    empty: list[Any] = []
    for tools in (None, empty):
        asked = question("what", max_tokens=3, **nothing | {"tools": tools})
        asked["messages"][0]["name"] = "ann"
        status, _, answer = served.chat(asked)
        assert status == 200
        assert answer["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_p", 2),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("stop", [""]),
    ],
)
def test_what_is_out_of_its_range_is_named(served: Served, name: str, value: Any) -> None:
    assert refusal(served.chat(question("what", **{name: value})), 400)["param"] == name


def test_a_text_that_is_far_too_long_is_not_tokenized(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.model.VLM.stream", lambda *_, **__: pytest.fail("it was read"))
    asked = question("what ", messages=[{"role": role, "content": "what " * 410} for role in ("system", "user")])
    error = refusal(served.chat(asked), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert (
        error["message"]
        == "the messages have 4100 characters, more than the 4096 that this level reads: send less text"
    )


def test_a_body_over_the_limit_is_refused_however_it_is_sent(serve: Serve) -> None:
    small = serve(body_bytes=1000)
    body = json.dumps(question("what " * 500)).encode()
    assert "larger than" in refusal(small.chat(body), 413)["message"]
    file = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + body
    for kind, sent in (("application/json", body), ("multipart/form-data; boundary=edge", file)):
        pieces = (sent[i : i + 100] for i in range(0, len(sent), 100))  # without a length: chunked
        assert (
            "larger than"
            in refusal(small.ask("POST", "/v1/chat/completions", pieces, {"Content-Type": kind}), 413)["message"]
        )
    assert small.chat(question("what", max_tokens=1))[0] == 200


def test_pixels_are_counted_before_they_are_decoded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    small = serve(pixels=100)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    asked = question("what", png(np.zeros((8, 13, 3), np.uint8)), unicache={"kept_patches": True})
    error = refusal(small.chat(asked), 400)
    assert error["message"] == "image 1 has 13 x 8 pixels, more than 0.0001 million: shrink it"


def test_other_paths_and_methods(served: Served) -> None:
    refusal(served.ask("GET", "/v1/completions"), 404)
    for method in ("POST", "DELETE"):
        refusal(served.ask(method, "/v1/embeddings", "{}", {"Content-Type": "application/json"}), 404)
    refusal(served.ask("GET", "/../pyproject.toml"), 404)
    refusal(served.ask("DELETE", "/v1/chat/completions"), 405)
    refusal(answer := served.ask("GET", "/v1/chat/completions"), 405)
    assert answer[1]["allow"] == "POST"
    refusal(served.ask("POST", "/v1/chat/completions", b"x", {"Content-Type": "text/plain"}), 415)
    refusal(served.ask("GET", "/v1/models/none"), 404)
    refusal(served.ask("GET", "/docs"), 404)


@pytest.mark.parametrize("body", ["", "--edge", "--other\r\n", "--edge\r\n\r\n\r\n--edge--\r\n", "--edge--\r\n"])
def test_broken_multipart(served: Served, body: str, caplog: pytest.LogCaptureFixture) -> None:
    refusal(
        served.ask("POST", "/v1/chat/completions", body, {"Content-Type": "multipart/form-data; boundary=edge"}), 400
    )
    refusal(served.ask("POST", "/v1/chat/completions", body, {"Content-Type": "multipart/form-data"}), 400)
    assert not caplog.records  # who sent it was told; the server's log is not the client's to fill


def test_an_error_inside_is_not_told(served: Served, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr("runtime.model.VLM.read", broken)
    for stream in (False, True):
        error = refusal(served.chat(question("what", stream=stream)), 500)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in error["message"]
    assert "secret path" in caplog.text


def test_an_error_in_the_middle_of_a_stream_ends_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    advance, steps = served.levels.open("loose").advance, []

    def breaking(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise RuntimeError("secret path")
        return advance(*arguments)

    monkeypatch.setattr(served.levels.open("loose"), "advance", breaking)
    status, _, text = served.chat(question("what is it", png(image(1)), model="bundle:loose", stream=True))
    assert status == 200
    *chunks, last = [json.loads(line[6:]) for line in text.decode().splitlines() if line]
    assert len(chunks) > 2
    assert last["error"]["code"] == "internal_error"
    assert b"secret" not in text
    assert served.worker.here == 0
