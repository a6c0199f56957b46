"""The official client against a server: answers equal the runtime's own, whole, streamed and with images."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from runtime.model import VLM
from runtime.monitor import Watch
from runtime.sampling import Sampling
from runtime.server.levels import Levels
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, data_url, png, question, serving

QUESTION = "what is it"


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def shown(*images: np.ndarray) -> list[Any]:
    """Parts of a message."""
    return [{"type": "image_url", "image_url": {"url": data_url(png(each))}} for each in images]


def asked(*images: np.ndarray, text: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": [*shown(*images), {"type": "text", "text": text}]}]


def test_whole(served: Served, client: openai.OpenAI) -> None:
    for model, level in (("bundle", "tight"), ("bundle:loose", "loose")):
        answer = client.chat.completions.create(model=model, messages=asked(image(1)), max_tokens=9)
        own = served.levels.open(level).generate(QUESTION, [image(1)], max_new_tokens=9)
        assert answer.choices[0].message.content == own.text
        assert answer.choices[0].finish_reason == own.finish_reason
        assert answer.model == model
        usage: Any = answer.usage
        assert usage.prompt_tokens == own.stats.prompt_tokens
        assert usage.completion_tokens == len(own.tokens)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        extra: Any = answer.model_extra
        for name in ("kv_bytes", "kv_bytes_uncompressed", "visual_tokens", "level", "stop_reason", "backend"):
            assert extra["unicache"][name] == getattr(own.stats, name)
        assert extra["unicache"]["visual_tokens_uncompressed"] == 4
        assert extra["unicache"]["reason"] == ("the default level" if model == "bundle" else "named in the request")
        assert "kept_patches" not in extra["unicache"]


def test_streamed(served: Served, client: openai.OpenAI) -> None:
    own = served.levels.open("tight").generate(QUESTION, [image(2)], max_new_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model="bundle",
            messages=asked(image(2)),
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    *texts, last, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == own.text
    assert len(texts) > len(own.tokens) / 2
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * len(texts)
    assert last.choices[0].finish_reason == own.finish_reason
    assert (last.model_extra or {})["unicache"]["kv_bytes"] == own.stats.kv_bytes
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(own.tokens)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="bundle", messages=asked(), max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_sampling_is_the_runtimes(served: Served, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 4, "stop": ["red", "two"]}
    own = served.levels.open("tight").generate(
        QUESTION, [image(0)], 24, sampling=Sampling(1.5, 5, 0.9, 0.01, 1.2, ["red", "two"], 4, 2)
    )
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="bundle",
            messages=asked(image(0)),
            max_tokens=24,
            logprobs=True,
            top_logprobs=2,
            stream=stream,
            extra_body=extra,
            **options,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        told = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
        vlm = served.levels.open("tight")
        assert [each.token for each in told] == [vlm.tokenizer.id_to_token(token) for token in own.tokens]
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in own.logprobs])
        assert [len(each.top_logprobs) for each in told] == [2] * len(own.tokens)
        assert all(bytes(each.bytes).decode() == each.token for each in told)
        assert all(math.isfinite(each.logprob) for each in told)


def test_several_turns_with_images_in_any(served: Served, client: openai.OpenAI) -> None:
    """What the server answered goes back as it came, and the whole is one prompt of the chat template."""
    first: Any = asked(image(1))
    answer = client.chat.completions.create(model="bundle", messages=first, max_tokens=4).choices[0].message
    messages = [*first, answer, *asked(image(2), image(3), text="how many")]
    got = client.chat.completions.create(model="bundle", messages=messages, max_tokens=6).choices[0].message.content
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "how many"}]},
    ]
    own = served.levels.open("tight").generate(turns, [image(1), image(2), image(3)], 6)
    assert got == own.text


def test_a_question_that_comes_later(served: Served, client: openai.OpenAI) -> None:
    extra = {"unicache": {"question_later": True}}
    answer = client.chat.completions.create(model="bundle", messages=asked(image(1)), max_tokens=6, extra_body=extra)
    own = served.levels.open("tight").generate(QUESTION, [image(1)], 6, question_later=True)
    assert answer.choices[0].message.content == own.text


@pytest.mark.parametrize("ends", [False, True])
def test_tokens_per_second_are_those_that_the_model_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The last token of an answer is chosen and never read, unless it is the end token, which is not counted."""
    vlm, steps, advance = served.levels.open("loose"), [], VLM.advance

    def counted(*arguments: Any) -> Any:
        steps.append(1)
        return advance(*arguments)

    said = vlm.generate(QUESTION, [image(1)], 9, ignore_eos=True).tokens
    monkeypatch.setattr(vlm, "model", replace(vlm.model, eos_token_ids=[said[-1]] if ends else []))
    monkeypatch.setattr(VLM, "advance", counted)
    _, _, answer = served.chat(question(QUESTION, png(image(1)), model="bundle:loose", max_tokens=9))
    told = answer["unicache"]
    assert told["stop_reason"] == ("end" if ends else "max_new_tokens")
    decoding = told["seconds"]["decode"] + told["seconds"].get("compact", 0)
    assert told["tokens_per_second"] * decoding == pytest.approx(len(steps))


def test_models(client: openai.OpenAI) -> None:
    models = {model.id: (model.model_extra or {})["unicache"] for model in client.models.list()}
    assert list(models)[:3] == ["bundle", "bundle:loose", "bundle:tight"]
    assert [name for name, told in models.items() if told["default"]] == ["bundle"]
    assert {name: told["level"] for name, told in models.items()} == {"bundle": "tight"} | {
        f"bundle:{level}": level for level in ("loose", "tight", "thrifty", "shared", "frugal", "gated", "fallen")
    }
    assert client.models.retrieve("bundle:loose").id == "bundle:loose"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_mistakes_are_the_clients_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="choose bundle, bundle:loose"):
        client.chat.completions.create(model="gpt-4o", messages=asked())
    with pytest.raises(openai.BadRequestError, match="'tools' is not supported") as refused:
        client.chat.completions.create(
            model="bundle", messages=asked(), tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="only 120 positions"):
        client.chat.completions.create(model="bundle", messages=asked(text="what " * 200), stream=True)


def test_multipart(served: Served) -> None:
    own = served.levels.open("tight").generate(QUESTION, [image(1), image(2)], 6)
    turn = {"type": "text", "text": QUESTION}
    placed = [{"type": "image"}, {"type": "image"}, turn]
    for content in (QUESTION, [turn], placed):
        body = {"model": "bundle", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
        status, _, answer = sent(served, body, png(image(1)), png(image(2)))
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == own.text
    for files, message in (([], "more parts"), ([png(image(1))] * 3, "1 files are in no message")):
        body = {"model": "bundle", "messages": [{"role": "user", "content": placed}]}
        status, _, answer = sent(served, body, *files)
        assert status == 400
        assert message in answer["error"]["message"]


def sent(served: Served, body: dict[str, Any], *files: bytes) -> tuple[int, dict[str, str], Any]:
    """A multipart request."""
    head = b'Content-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    parts = [b'Content-Disposition: form-data; name="request"\r\n\r\n' + json.dumps(body).encode()]
    text = b"".join(b"--edge\r\n%b\r\n" % part for part in [*parts, *(head + each for each in files)]) + b"--edge--\r\n"
    return served.ask("POST", "/v1/chat/completions", text, {"Content-Type": "multipart/form-data; boundary=edge"})


def test_kept_patches(served: Served) -> None:
    pictures = [np.zeros((30, 20, 3), np.uint8), image(3)]
    asks = question(QUESTION, *map(png, pictures), max_tokens=3, unicache={"kept_patches": True})
    for model in ("bundle", "bundle:thrifty", "bundle:loose"):
        status, _, answer = served.chat(asks | {"model": model})
        assert status == 200
        own = served.levels.open(answer["unicache"]["level"]).generate(QUESTION, pictures, 3)
        patches = answer["unicache"]["kept_patches"]
        assert [each["held"] for each in patches] == own.stats.patches
        assert [(each["rows"], each["columns"], each["region"]) for each in patches] == [(2, 2, [0, 0, 1, 1])] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_alarm_asks_a_lighter_level(bundle_path: Path, stream: bool) -> None:
    """A whole answer is given anew; of a stream nothing is taken back, so that the next request begins lighter."""
    watch = Watch("retry", recent=1, ratio=1, margin=0)  # any token that is less sure than the mean before
    with serving(Levels(VLM.open(bundle_path, level="tight", threads=1), watch=watch)) as served:
        asks = question(QUESTION, png(image(1)), max_tokens=12, stream=stream, temperature=1.5, seed=1)
        told = []
        for _ in range(2):
            status, _, answer = served.chat(asks)
            assert status == 200
            chunks = (
                [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
                if stream
                else [answer]
            )
            told.append(chunks[-1]["unicache"])
    first, second = ((each["level"], each["retries"]) for each in told)
    assert first == (("tight", 0) if stream else ("loose", 1))
    assert second[0] == "loose"
    assert told[0]["alarms"][0]["sign"] == "entropy"
    assert told[1]["reason"].startswith("lighter than tight after an alarm")


def test_health_tells_the_backend(served: Served) -> None:
    status, _, told = served.ask("GET", "/healthz")
    assert (status, told) == (200, {"status": "ok", "model": "bundle", "backend": "ort"})
