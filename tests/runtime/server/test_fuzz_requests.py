"""Whatever is sent, the server answers 200 or 4xx in its own form, and answers the next: FUZZ=20 tries more of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.server.protocol import Limits, complete, parse
from tests.fuzz import ODD, damaged, examples, mutated
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, data_url, png, question
from tests.runtime.server.test_mistakes import refusal

VALID = question(
    "what is it",
    png(image(1)),
    max_tokens=4,
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    seed=1,
    stop=["red"],
    logprobs=True,
    top_logprobs=2,
    stream=False,
    stream_options={"include_usage": True},
    unicache={"kept_patches": True, "question_later": False},
)
VALID["messages"].insert(0, {"role": "system", "content": "left"})
FIELDS = [*sorted(VALID), "n", "max_completion_tokens", "user", "tools", "repetition_penalty", "response_format"]


def answered(served: Served, body: Any, kind: str = "application/json") -> None:
    status, headers, said = served.chat(body, **{"Content-Type": kind})
    if status != 200:
        assert 400 <= status < 500, (status, said)
        refusal((status, headers, said), status)
    elif "json" in headers["content-type"]:
        text = said["choices"][0]["message"]["content"]
        assert isinstance(text, str)
        if "json" in kind.lower():
            asked = complete(parse(body, Limits()), None, {}, Limits())
            if asked.sampling.temperature == 0 or asked.sampling.seed is not None:  # it is what the runtime says
                vlm, images = served.levels.open(served.levels.models[asked.request.model]), asked.images
                later, data = asked.request.unicache.question_later, [each.data for each in images]
                alone = vlm.generate(
                    asked.messages, data, asked.max_new_tokens, question_later=later, sampling=asked.sampling
                )
                assert text == alone.text
    else:
        *chunks, last = [line.removeprefix(b"data: ") for line in said.splitlines() if line]
        assert last == b"[DONE]" or b"error" in last
        assert all(json.loads(chunk)["object"] == "chat.completion.chunk" for chunk in chunks)


@pytest.fixture(autouse=True)
def still_there(served: Served) -> Any:
    """After all of it, the answer to a question is what it was, and nobody holds a place."""
    expected = served.chat(question("what is it", max_tokens=3))[2]["choices"]
    yield
    assert served.chat(question("what is it", max_tokens=3))[2]["choices"] == expected
    assert served.worker.here == 0


@examples(150)
@given(mutated(VALID))
def test_a_request_that_is_changed_anywhere(served: Served, body: Any) -> None:
    answered(served, json.dumps(body).encode())


@examples(100)
@given(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=4))
def test_a_request_of_any_values(served: Served, values: dict[str, Any]) -> None:
    answered(served, json.dumps(question("what is it", max_tokens=2) | values).encode())


@examples(100)
@given(damaged(json.dumps(VALID).encode()), st.sampled_from(["application/json", "APPLICATION/JSON; charset=x"]))
def test_a_body_of_any_bytes(served: Served, body: bytes, kind: str) -> None:
    answered(served, body, kind)


MULTIPART = b"""--edge\r
Content-Disposition: form-data; name="request"\r
\r
{"model": "bundle", "messages": [{"role": "user", "content": "what is it"}], "max_tokens": 2}\r
--edge\r
Content-Disposition: form-data; name="image"; filename="a.png"\r
Content-Type: image/png\r
\r
IMAGE\r
--edge--\r
""".replace(b"IMAGE", png(image(2)))


def test_what_is_damaged_was_good_before(served: Served) -> None:
    assert served.chat(VALID)[0] == 200
    assert served.chat(MULTIPART, **{"Content-Type": "multipart/form-data; boundary=edge"})[0] == 200


@examples(100)
@given(damaged(MULTIPART), st.sampled_from(["edge", "edg", "", "\x7f" * 80]))
def test_a_multipart_body_of_any_bytes(served: Served, body: bytes, boundary: str) -> None:
    answered(served, body, f"multipart/form-data; boundary={boundary}")


@examples(100)
@given(damaged(png(image(3))))
def test_an_image_of_any_bytes(served: Served, data: bytes) -> None:
    body = question("what is it", max_tokens=2, unicache={"kept_patches": True})
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": data_url(data)}})
    answered(served, json.dumps(body).encode())
