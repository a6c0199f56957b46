"""Text while it comes: against the tokenizer's decoding of everything at once; stop strings against a plain search."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.text import HELD, Detokenizer, StopStrings

SAMPLE = "the red circle is left of the blue one. das größte Rechteck; 你好、世界 — привет 👩‍👩‍👧 naïve\n\n  x"


def byte_level() -> Tokenizer:
    """As of GPT-2, SmolLM2 or Qwen: every token is bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2 or Gemma: words of characters, and bytes for characters that are in no word."""
    words = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁red",
        "e",
        "d",
        "▁circle",
        "ï",
        "你",
        "x",
    ]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(words[:2])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    words = ["<s>", "</s>", "▁red", "▁circle", "s", "▁", "▁is", "."]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="."))
    tokenizer.add_special_tokens(words[:2])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder: the words of the vocabulary with spaces between."""
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(["a", "bc", ".", "�"])}, unk_token="a"))


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, words)}


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    text = Detokenizer(tokenizer)
    return [*(text.add(each) for each in tokens), text.end()]


def token(tokenizer: Tokenizer, word: str) -> int:
    found = tokenizer.token_to_id(word)
    assert found is not None
    return found


def fallback_ids(text: str) -> list[int]:
    """Every character by its bytes."""
    return [2 + byte for byte in text.encode()]


@given(st.text(max_size=60).filter(lambda text: "<s>" not in text and "</s>" not in text))  # those are left out
@example(SAMPLE)
def test_text_by_byte_level_tokens(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    got = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@given(st.text(max_size=40), st.lists(st.sampled_from(["▁red", "e", "ï", "你", "▁", "<s>"]), max_size=6))
@example("你好、世界", ["▁red"])
def test_text_by_byte_fallback_tokens(text: str, before: list[str]) -> None:
    """Characters of two to four byte tokens, after words and special tokens."""
    tokenizer = TOKENIZERS["byte_fallback"]
    tokens = [token(tokenizer, word) for word in before] + fallback_ids(text)
    got = pieces(tokenizer, tokens)
    assert "".join(got) == tokenizer.decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


def test_a_character_is_given_with_its_last_byte() -> None:
    for name, tokens in (
        ("byte_level", TOKENIZERS["byte_level"].encode("é👩", add_special_tokens=False).ids),
        ("byte_fallback", fallback_ids("é👩")),
    ):
        got = pieces(TOKENIZERS[name], tokens)
        assert [piece for piece in got if piece] == ["é", "👩"]
        assert len(got) > 4


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "words"])
@given(data=st.data())
def test_any_tokens_at_all(name: str, data: st.DataObject) -> None:
    """Bytes that are no UTF-8, special tokens, ids that the tokenizer does not have."""
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    got, whole = "".join(pieces(tokenizer, tokens)), tokenizer.decode(tokens)
    run = max(map(len, "".join("x" if piece else " " for piece in pieces(tokenizer, tokens)).split("x")))
    if run < HELD:
        assert got == whole
    else:  # longer garbage is given before it is whole
        assert got.replace("\ufffd", "") == whole.replace("\ufffd", "")


@given(st.lists(st.integers(0, 265), max_size=40))
def test_any_byte_fallback_tokens(tokens: list[int]) -> None:
    """One bad byte makes the tokenizer doubt the good ones before it: what was given stays, and no word is lost."""
    tokenizer = TOKENIZERS["byte_fallback"]
    circle = token(tokenizer, "▁circle")
    assert "".join(pieces(tokenizer, tokens)).count("circle") == tokens.count(circle)


def test_after_a_bad_byte_the_text_goes_on() -> None:
    """`DecodeStream` of tokenizers 0.23 raises from there on."""
    tokenizer = TOKENIZERS["byte_fallback"]
    red = token(tokenizer, "▁red")
    got = pieces(tokenizer, [red, *fallback_ids("你"), 2 + 0xFF, red, red])
    assert "".join(got).startswith("red你")
    assert "".join(got).endswith(" red red")


@pytest.mark.parametrize("tokens", [[2 + 0xE4, 2 + 0xBD], [2 + 0xFF] * 100])
def test_unfinished_characters_are_told_and_do_not_pile_up(tokens: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    text, shown = Detokenizer(tokenizer), ""
    for each in tokens:
        shown += text.add(each)
        assert len(text._tokens) <= 2 * HELD
    assert shown + text.end() == tokenizer.decode(tokens)


def test_endless_special_tokens_take_no_memory() -> None:
    text = Detokenizer(TOKENIZERS["byte_fallback"])
    assert {text.add(1) for _ in range(100)} == {""}
    assert text._tokens == []


def search(text: str, stops: list[str]) -> str:
    """Read letter by letter; the first moment at which a stop string is complete ends it, the longest one counts."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


LETTERS = st.text("ab", max_size=12)


@given(st.lists(LETTERS, max_size=10), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
@example(["ab", "ab", "c"], ["aba"])
@example(["abcd"], ["abcd", "bc"])
def test_stop_strings(parts: list[str], stops: list[str]) -> None:
    found, shown = StopStrings(stops), ""
    whole = search("".join(parts), stops)
    for part in parts:
        shown += found.add(part)
        assert whole.startswith(shown)  # nothing of a stop string was given, however it was split
        if found.found:
            break
    assert shown + found.end() == whole
    assert found.found == (whole != "".join(parts))


@given(st.lists(LETTERS, max_size=10), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_no_more_is_held_than_could_become_a_stop_string(parts: list[str], stops: list[str]) -> None:
    found, shown, read = StopStrings(stops), "", ""
    for part in parts:
        read += part
        shown += found.add(part)
        if found.found:
            return
        held = read[len(shown) :]
        assert read == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
