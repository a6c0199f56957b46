"""Template, tokens and rows: against Hugging Face's processor on the demo checkpoint, and by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer

from engines.bundle import Bucket, Embedding, Level, Model, Shortened
from engines.errors import UserError
from runtime.prompt import PromptReader, Rows, choose_bucket, first_part, lay_out, left_pad, question_inputs
from tests.layouts import plain
from tests.runtime import toy

ENDS = [5, 6, 7]
SQUARE = plain(64, 64, 64)
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"


def model(**changes: Any) -> Model:
    values: dict[str, Any] = {
        "model_type": "llava", "num_heads": 1, "kv_heads": [1], "head_dim": 1, "hidden_size": 1,
        "vocab_size": 128, "image_token_id": 4, "placeholder": "<image>", "layouts": [SQUARE], "bos_token_id": 1,
        "eos_token_ids": [2],
    }  # fmt: skip
    values |= changes
    return Model(**values, embedding=Embedding(0, "float32", [values["vocab_size"], 1]))


def reader(folder: Path, source: Path = DEMO, template: str | None = None, **settings: Any) -> PromptReader:
    """A reader of the demo's tokenizer and template, as export lays them into a bundle."""
    shutil.copy(source / "tokenizer.json", folder)
    shutil.copy(source / "chat_template.jinja", folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    (folder / "prompt.json").write_text(json.dumps(tokens | {"add_special_tokens": False} | settings))
    return PromptReader(folder, model())


@cache
def processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(DEMO)


def conversation(images: int, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}]


CHATS = {
    "one": conversation(1, "what color is the shape?"),
    "two": conversation(2, "Is there a RED circle in image 2 ?"),
    "four": conversation(4, "what is in row 3 of image 4"),
    "eight": conversation(8, "how many images contain a triangle, 10 or 25?"),
    "unknown words": conversation(1, "Grüße, what about zebras  and\n\nnewlines\t?!"),
    "several turns": [
        *conversation(1, "what is it?"),
        {"role": "assistant", "content": "a circle"},
        {"role": "user", "content": [{"type": "text", "text": "and this"}, {"type": "image"}]},
    ],
    "text only": [{"role": "user", "content": "what is it?"}],
}


def images_in(chat: list[dict[str, Any]]) -> int:
    return sum(part["type"] == "image" for m in chat if not isinstance(m["content"], str) for part in m["content"])


@pytest.mark.parametrize("name", CHATS)
def test_ids_equal_hugging_faces(name: str, tmp_path: Path) -> None:
    chat, images = CHATS[name], images_in(CHATS[name])
    ours = reader(tmp_path)
    text = processor().apply_chat_template(chat, add_generation_prompt=True)
    pictures = [Image.new("RGB", (64, 64))] * images or None
    expected = processor()(text=text, images=pictures, add_special_tokens=False)["input_ids"][0]

    assert ours.text(chat, [SQUARE] * images) == text
    rows = lay_out(ours.ids(chat, [SQUARE] * images), [np.arange(64)] * images, [64] * images, 4)
    assert rows.ids.tolist() == list(expected)
    assert rows.positions.tolist() == list(range(len(expected)))
    assert rows.total == len(expected)


def test_their_own_tokenizing_of_a_chat_adds_nothing(tmp_path: Path) -> None:
    """The demo's template writes `<s>` itself, so `add_special_tokens` is false."""
    chat = CHATS["one"]
    image = {"type": "image", "image": Image.new("RGB", (64, 64))}
    chat_with_image = [{"role": "user", "content": [image, *chat[0]["content"][1:]]}]
    expected = processor().apply_chat_template(
        chat_with_image, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"][0]
    assert reader(tmp_path).ids(chat, [SQUARE]) == list(expected)


def test_plain_question_is_one_message_with_its_images_first(tmp_path: Path) -> None:
    ours = reader(tmp_path)
    assert ours.ids("is it red", [SQUARE] * 2) == ours.ids(conversation(2, "is it red"), [SQUARE] * 2)


TEMPLATES = {
    "trimmed": "{% for m in messages %}\n    {% if true %}\n  {{ m['role'] }}\n    {% endif %}\n{% endfor %}\nend",
    "tojson": "{{ {'a': '<é & \\'>', 'b': [1, 2]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ add_generation_prompt }}",
    "undefined": "{{ tools }}{% if tools is defined and tools %}x{% endif %}{% if documents %}y{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }} {% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y %B') }}",
    "dict": "{{ dict(a=1) | tojson }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_hugging_face_renders_it(name: str, tmp_path: Path) -> None:
    ours = reader(tmp_path, template=TEMPLATES[name])
    chat = CHATS["several turns"]
    expected = processor().apply_chat_template(chat, chat_template=TEMPLATES[name], add_generation_prompt=True)
    assert ours.text(chat, [SQUARE] * 2) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "chat template refuses"),
        ("{{ ''.__class__.__mro__ }}", "chat template refuses"),
        ("{{ messages.append(1) }}", "chat template refuses"),
        ("{{ 'x' * 10 ** 9 }}", "chat template refuses.* larger than 10,000,000"),
    ],
)
def test_template_that_refuses_or_escapes(template: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        reader(tmp_path, template=template).text("hello", ())


def test_no_template_is_too_deep_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat_template\.jinja: not a chat template: "):
        reader(tmp_path, template="{{ " + 9999 * "(" + "1" + 9999 * ")" + " }}")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "prompt.json"])
@pytest.mark.parametrize("content", [None, b"", b"{% if %}", b"\xff\xfe{{", b"[1]"])
def test_broken_file_is_told(name: str, content: bytes | None, tmp_path: Path) -> None:
    if name == "chat_template.jinja" and content in (b"", b"[1]"):
        pytest.skip("a valid, if useless, template")
    reader(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        PromptReader(tmp_path, model())


def test_special_tokens_are_added_when_told(tmp_path: Path) -> None:
    """A tokenizer whose post-processor writes `<s>`, with a template that does not."""
    ours = reader(tmp_path, template="{{ messages[0].content[0].text }}")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    tokenizer["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    without = ours.ids("is it red", [])
    assert PromptReader(tmp_path, model()).ids("is it red", []) == without
    (tmp_path / "prompt.json").write_text('{"add_special_tokens": true}')
    assert PromptReader(tmp_path, model()).ids("is it red", []) == [1, *without]


def test_tokenizers_own_padding_and_truncation_are_off(tmp_path: Path) -> None:
    ours = reader(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert PromptReader(tmp_path, model()).ids("is it red", []) == ours.ids("is it red", [])


def test_token_outside_the_vocabulary_is_told(tmp_path: Path) -> None:
    reader(tmp_path)
    with pytest.raises(UserError, match="outside the model's vocabulary of 10"):
        PromptReader(tmp_path, model(vocab_size=10)).ids("is it red", [])


TEXT_IDS = st.integers(5, 12)
PICTURES = st.lists(st.one_of(TEXT_IDS, st.sampled_from(["dropped", "kept"])), min_size=1, max_size=9).filter(
    lambda parts: "kept" in parts or "dropped" in parts
)


@given(st.lists(st.one_of(TEXT_IDS, PICTURES), max_size=9), st.integers(0, 50))
def test_rows_by_definition(items: list[Any], start: int) -> None:
    """Text ids, and images: lists of their tokens, which were kept or dropped, with text of the layout between them."""
    ids, kept, tokens, expected = list[int](), list[np.ndarray](), list[int](), list[tuple[int, ...]]()
    sentences, before = 0, None
    for item in items:
        parts, which, count = item if isinstance(item, list) else [item], [], 0
        for part in parts:
            position = start + len(ids)
            if isinstance(part, str):
                if part == "kept":
                    expected.append((4, position, 2, len(kept) + 1))
                    which.append(count)
                    before = None
                ids.append(4)
                count += 1
            else:
                if before is None or (before in ENDS and part not in ENDS):  # a dropped token parts no sentence
                    sentences += 1
                expected.append((part, position, 1, sentences))
                ids.append(part)
                before = part
        if isinstance(item, list):
            kept.append(np.array(which, np.int32))
            tokens.append(count)
    rows = lay_out(ids, kept, tokens, 4, ENDS, start)
    arrays = (rows.ids, rows.positions, rows.kinds, rows.segments)
    assert list(zip(*(array.tolist() for array in arrays), strict=True)) == expected
    assert rows.visual[rows.kinds == 2].tolist() == list(range(sum(map(len, kept))))
    assert rows.total == start + len(ids)
    assert [array.dtype for array in arrays[1:]] == [np.int32] * 3


WIDE = plain(64, 128, 4, text="page <image><image> row <image><image> text")


def test_a_layouts_text_stands_for_its_image(tmp_path: Path) -> None:
    """Each image has the text of its own layout, whatever stands between its tokens."""
    ours = reader(tmp_path)
    chat, small = conversation(3, "is it red"), plain(32, 32, 3)
    encode = ours.tokenizer.encode
    parts = ours.text(chat, [SQUARE] * 3).split("<image>")
    texts = [WIDE.text, small.text, WIDE.text]
    whole = parts[0] + "".join(text + part for text, part in zip(texts, parts[1:], strict=True))
    ids = ours.ids(chat, [WIDE, small, WIDE])
    assert ids == encode(whole, add_special_tokens=False).ids
    assert ids.count(4) == 4 + 3 + 4
    page, row, text = (encode(word, add_special_tokens=False).ids for word in ("page", "row", "text"))
    begin = ids.index(4) - len(page)
    assert ids[begin : begin + 4 + len(page + row + text)] == [*page, 4, 4, *row, 4, 4, *text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what is <image>", "but 1 image was given: '<image>', the model's own, counts in a text, too"),
        ("what is <soft>", "the messages have '<soft>' in a text, which stands for a part of an image only"),
    ],
)
def test_a_text_that_holds_a_placeholder_or_an_image_token_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The two differ in some models: `<image>` is written by the template, `<soft>` stands for each visual token."""
    reader(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<soft>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (soft,) = tokenizer.encode("<soft>", add_special_tokens=False).ids
    layout = plain(64, 64, 2, text="<image><soft><soft>")
    ours = PromptReader(tmp_path, model(vocab_size=1000, image_token_id=soft, layouts=[layout]))
    assert ours.ids("what is it", [layout]).count(soft) == 2
    with pytest.raises(UserError, match=message):
        ours.ids(text, [layout])


def test_a_layout_whose_text_is_not_the_tokenizers_is_told(tmp_path: Path) -> None:
    reader(tmp_path)
    wrong = plain(64, 64, 3, text="<image><image>")
    with pytest.raises(UserError, match="the text of layout 64x64 has 2 image tokens, not 3: its tokenizer and"):
        PromptReader(tmp_path, model(layouts=[wrong]))


def test_first_row_after_the_images() -> None:
    rows = lay_out([1, 4, 4, 4, 7, 4, 4, 4, 8, 9], [np.array([0, 2]), np.array([1])], [3, 3], 4)
    assert rows.after_images == 5  # 1 I I 7 I | 8 9
    assert rows[5:].positions.tolist() == [8, 9]


def test_left_pad() -> None:
    positions, kinds, segments = (np.array(values, np.int32) for values in ([0, 3, 9], [1, 2, 1], [1, 1, 2]))
    ids = np.array([[0, 1, 6], [0, 1, 6], [0, 2, 6]], np.int32)
    rows = Rows(np.array([5, 4, 6]), positions, kinds, segments, np.zeros(3, np.int64), ids, 10)
    inputs = left_pad(np.array([[[1, 1]] * 3, [[0, 0], [7, 8], [0, 0]]], np.float32), rows, 5)
    assert inputs["embeddings"].tolist() == [[[0, 0], [0, 0], [1, 1], [1, 1], [1, 1]]]
    assert inputs["positions"].tolist() == [[0, 0, 0, 3, 9]]
    assert inputs["kinds"].tolist() == [[0, 0, 1, 2, 1]]
    assert inputs["segments"].tolist() == [[0, 0, 1, 1, 2]]
    assert inputs["position_ids"].tolist() == [[[0, 0, 0, 1, 6]], [[0, 0, 0, 1, 6]], [[0, 0, 0, 2, 6]]]
    assert inputs["deepstack"].tolist() == [[[[0, 0], [0, 0], [0, 0], [7, 8], [0, 0]]]]
    floats = ["embeddings", "deepstack"]
    assert {name: array.dtype for name, array in inputs.items()} == {
        name: np.float32 if name in floats else np.int32 for name in inputs
    }


@pytest.mark.parametrize(
    ("ids", "rows", "asked"),
    [([], [0, 0, 0], [0, 0, 0]), ([2], [0, 0, 2], [0, 0, 1]), ([1, 2, 3, 1], [2, 3, 1], [1, 1, 1])],
)
def test_question_is_the_last_tokens_padded_on_the_left(ids: list[int], rows: list[int], asked: list[int]) -> None:
    table = np.arange(4, dtype=np.float16)[:, None] * np.ones(2, np.float16)
    inputs = question_inputs(ids, table, 3)
    assert inputs["question"].tolist() == [[[row, row] for row in rows]]
    assert inputs["asked"].tolist() == [asked]
    assert [array.dtype for array in inputs.values()] == [np.float32, np.float32]


def test_bucket_choice_does_not_trust_the_order() -> None:
    buckets = [Bucket(length, [1], 2, 1, "p", "d", "") for length in (64, 16, 32)]
    level = Level({}, [1], 99, {}, buckets)
    assert [choose_bucket(n, n, level).length for n in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]
    assert choose_bucket(65, 65, level).length == 64  # the window takes one token more
    with pytest.raises(
        UserError, match=r"66 tokens.*longest bucket's 64 and the 1 .*level that compacts.*--buckets 66"
    ):
        choose_bucket(66, 66, level)
    compacts = [Bucket(length, [1], 2, 1, "p", "d", "c") for length in (64, 16, 32)]
    assert choose_bucket(10**6, 10**6, dataclasses.replace(level, buckets=compacts)).length == 64


def test_a_prompt_with_more_text_than_can_be_kept_moves_on_or_is_refused() -> None:
    short = {32: Shortened(16, 12), 64: Shortened(40, 30)}
    buckets = [Bucket(length, [1], 2, 1, "p", "d", "", short[length]) for length in short]
    level = Level({}, [1], 99, {}, buckets)
    # (tokens, text) -> length: no more tokens than S' always fit, and of longer prompts those with little text
    cases = {(16, 16): 32, (17, 12): 32, (17, 13): 64, (32, 12): 32, (40, 40): 64, (64, 30): 64}
    assert {case: choose_bucket(*case, level).length for case in cases} == cases
    assert choose_bucket(41, 31, level).length == 64  # 40 of them, and one by the window
    for case in ((42, 31), (64, 31)):
        with pytest.raises(UserError, match=r"31 text tokens.*room for 30: give fewer words"):
            choose_bucket(*case, level)
    whole = dataclasses.replace(level, buckets=[*buckets, Bucket(128, [1], 2, 1, "p", "d", "")])
    assert choose_bucket(64, 31, whole).length == 128
    compacts = [dataclasses.replace(bucket, compact="c") for bucket in buckets]
    assert choose_bucket(1000, 900, dataclasses.replace(level, buckets=compacts)).length == 64


@given(st.data(), st.integers(1, 60), st.integers(1, 40))
def test_the_first_part_is_the_longest_that_the_bucket_can_keep(data: st.DataObject, tokens: int, length: int) -> None:
    kinds = np.array(data.draw(st.lists(st.sampled_from([1, 2]), min_size=tokens, max_size=tokens)), np.int32)
    zeros, ids = np.zeros(tokens, np.int64), np.zeros((3, tokens), np.int32)
    rows = Rows(zeros, zeros, kinds, zeros, zeros, ids, tokens)
    whole = Bucket(length, [1], 2, 1, "p", "d", "c")
    assert first_part(rows, whole) == min(tokens, length)
    kept = data.draw(st.integers(1, length))
    short = Shortened(kept, data.draw(st.integers(0, kept)))
    want = [n for n in range(1, min(tokens, length) + 1) if n <= short.tokens or sum(kinds[:n] == 1) <= short.text]
    assert first_part(rows, dataclasses.replace(whole, shortened=short)) == want[-1]


def test_toy_template_is_the_demos() -> None:
    assert (DEMO / "chat_template.jinja").read_text() == toy.TEMPLATE
