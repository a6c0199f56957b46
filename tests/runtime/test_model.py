"""The runtime against the judge in `reference.py`, on the toy bundle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from engines.errors import UserError
from runtime import gate
from tests.runtime import reference, toy
from tests.runtime.asking import Recorder, ask, ids_of, image, patchy, places

QUESTIONS = ["what is it", "how many red", "is it blue", "one two", "left right what", "big"]


@pytest.mark.parametrize("question_later", [False, True])
@pytest.mark.parametrize("images", [1, 2, 4])
@pytest.mark.parametrize("level", ["loose", "tight", *toy.ADAPTIVE])
def test_equals_the_judge(
    level: str,
    images: int,
    question_later: bool,
    bundle_path: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "memory_pressure", lambda budget: 0.3)
    vlm = runtime.open(bundle_path, level=level, threads=1)
    pictures = [patchy(3 - k) for k in range(images)]
    for question in QUESTIONS[:3]:
        recorder.calls.clear()
        options: dict[str, Any] = {"ignore_eos": True, "question_later": question_later}
        result = ask(vlm, question, pictures, max_new_tokens=30, **options)
        judge = reference.answer(ids_of(question, images), pictures, level, 30, **options, pressure=0.3)

        assert result.tokens == judge.tokens
        assert result.stats.stop_reason == judge.stop
        assert result.stats.compactions == len(judge.compacted_at)
        ((_, feeds, outputs),) = recorder.of("prefill")
        np.testing.assert_allclose(outputs["logits"][0], judge.logits[0], atol=1e-3)
        assert [position for positions, _ in recorder.steps() for position in positions] == judge.decoded
        for positions, logits in recorder.steps():
            np.testing.assert_allclose(logits, judge.logits[1 + judge.decoded.index(positions[-1])], atol=1e-3)
        starts = [i + k * (toy.IMAGE_TOKENS - 1) for k, i in enumerate(places(ids_of(question, images)))]
        want = [start + place for start, kept in zip(starts, judge.kept, strict=True) for place in kept]
        assert feeds["positions"][feeds["kinds"] == 2].tolist() == want
        assert result.stats.visual_tokens_by_image == [len(kept) for kept in judge.kept]
        assert [feeds["window_kinds"][0].tolist() for _, feeds, _ in recorder.of("compact")] == judge.full


def test_a_question_that_comes_later_is_asked_at_the_level_for_it(tmp_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(toy.build(tmp_path / "bundle", unknown="loose"), level="tight", threads=1)
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    later = ask(vlm, "what is it", [image(0)], question_later=True, **options)
    judge = reference.answer(ids_of("what is it", 1), [image(0)], "loose", 9, ignore_eos=True, question_later=True)
    assert later.tokens == judge.tokens
    assert (later.stats.level, later.stats.visual_tokens, later.stats.bucket) == ("loose", 4, 16)
    assert not any("tight" in graph for graph in recorder.loaded)

    known = ask(vlm, "what is it", [image(0)], **options)
    judge = reference.answer(ids_of("what is it", 1), [image(0)], "tight", 9, ignore_eos=True)
    assert known.tokens == judge.tokens
    assert (vlm.level, known.stats.level) == ("tight", "tight")


def test_compact_is_called_exactly_when_the_window_is_full(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    ask(vlm, "what is it", [image(0)], max_new_tokens=20, ignore_eos=True)
    judge = reference.answer(ids_of("what is it", 1), [image(0)], "tight", 20, ignore_eos=True)

    kinds = [name.split("_")[0] for name, _, _ in recorder.calls]
    decodes_before = [kinds[:i].count("decode") for i, kind in enumerate(kinds) if kind == "compact"]
    assert decodes_before == judge.compacted_at
    assert len(decodes_before) > 2
    for _, feeds, _ in recorder.of("compact"):
        assert np.isfinite(feeds["window_bias"]).all()  # no slot was free
        assert (feeds["window_positions"] >= 0).all()
    last = recorder.calls[-1]
    assert last[0].startswith("decode")  # nothing is compacted for a token that nobody decodes


def test_state_holds_the_judges_tokens(bundle_path: Path, recorder: Recorder) -> None:
    """Positions and masses of every slot, in the state that the last compaction took and the last decode gave."""
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    # 18 tokens are 17 decodes: the last of them starts with a window that was just compacted
    ask(vlm, "how many red", [image(1)], max_new_tokens=18, ignore_eos=True)
    judge = reference.answer(ids_of("how many red", 1), [image(1)], "tight", 18, ignore_eos=True)
    _, compacted, _ = recorder.of("compact")[-1]
    _, feeds, outputs = recorder.of("decode")[-1]

    assert judge.compacted_at[-1] == 16  # the last decode
    np.testing.assert_array_equal(compacted["window_positions"][0, -4:], [s.position for s in judge.window[:4] if s])
    for layer, heads in enumerate(toy.KV_HEADS):
        store = judge.stores[layer]
        empty = [slot is None for slot in store]
        np.testing.assert_array_equal(np.isinf(feeds[f"store_bias.{layer}"][0, 0]), empty)
        masses = [np.zeros(heads) if slot is None else slot.mass[layer] for slot in store]
        np.testing.assert_allclose(outputs[f"new_store_mass.{layer}"][0].T, masses, atol=1e-4)
    window = np.stack([np.concatenate(slot.mass) for slot in judge.window if slot])  # [5, heads of all layers]
    np.testing.assert_allclose(outputs["new_window_mass"][0, :, :4].T, window[:4], atol=1e-4)
    np.testing.assert_allclose(outputs["new_mass"][0, :, 0], window[4], atol=1e-4)


def test_prompt_is_left_padded_with_original_positions(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    ask(vlm, "big", [image(2)], max_new_tokens=1)
    _, feeds, _ = recorder.of("prefill")[0]
    kept = recorder.of("vision")[0][2]["kept"][0]

    ids = ids_of("big", 1)  # <s> user : image 1 : <image> big assistant :
    start = ids.index(toy.IMAGE)
    positions = [*range(start), *(start + kept), *range(start + toy.IMAGE_TOKENS, len(ids) + toy.IMAGE_TOKENS - 1)]
    padding = 16 - len(positions)
    assert feeds["positions"][0].tolist() == [0] * padding + positions
    assert feeds["kinds"][0].tolist() == [0] * padding + [1] * start + [2, 2] + [1] * (len(ids) - start - 1)
    assert feeds["segments"][0].tolist() == [0] * padding + [1] * start + [1, 1] + [2] * (len(ids) - start - 1)
    assert not feeds["embeddings"][0, :padding].any()
    np.testing.assert_array_equal(feeds["embeddings"][0, padding], toy.WEIGHTS["embedding"][1])


@pytest.mark.parametrize(
    ("images", "level", "bucket"), [(0, "loose", 16), (1, "loose", 16), (2, "loose", 40), (1, "tight", 16)]
)
def test_shortest_bucket_that_fits(images: int, level: str, bucket: int, bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level=level, threads=1)
    assert ask(vlm, "is it red", [image(0)] * images, max_new_tokens=1).stats.bucket == bucket


def test_bucket_boundary(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="loose", threads=1)
    fits = 16 - len(ids_of("", 0))
    assert ask(vlm, "red " * fits, [], max_new_tokens=1).stats.bucket == 16
    assert ask(vlm, "red " * (fits + 1), [], max_new_tokens=1).stats.bucket == 40


def test_question_later_takes_the_bucket_of_the_whole_prompt(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    result = ask(vlm, "red " * 20, [image(0)], max_new_tokens=1, question_later=True)
    _, feeds, _ = recorder.of("prefill")[0]
    assert result.stats.bucket == 40
    assert np.count_nonzero(feeds["kinds"]) == 6 + 2  # up to the image: <s> user : image 1 :
    assert [len(positions) for positions, _ in recorder.steps()] == [3, 1] * 5 + [2]  # of 4 free slots; 3 a chunk
    assert recorder.steps()[0][0] == [*range(6 + toy.IMAGE_TOKENS, 9 + toy.IMAGE_TOKENS)]


@pytest.mark.parametrize(
    ("level", "words", "images", "question_later"),
    [
        ("tight", 70, 0, False),
        ("tight", 60, 1, False),
        ("tight", 60, 1, True),
        ("tight", 40, 8, False),
        ("tight", 40, 8, True),
        ("thrifty", 20, 6, True),
        ("shared", 40, 3, False),
        ("loose", 12, 4, False),
        ("loose", 2, 6, True),
    ],
)
def test_a_prompt_longer_than_the_longest_bucket_goes_on_behind_it(
    level: str, words: int, images: int, question_later: bool, bundle_path: Path, recorder: Recorder
) -> None:
    """Also where an image stands on both sides of the bucket's end. `loose` never compacts: its window takes it."""
    pictures, question = [patchy(k) for k in range(images)], "red two " * (words // 2)
    options: dict[str, Any] = {"ignore_eos": True, "question_later": question_later}
    vlm = runtime.open(bundle_path, level=level, threads=1)
    result = ask(vlm, question, pictures, max_new_tokens=8, **options)
    judge = reference.answer(ids_of(question, images), pictures, level, 8, **options)
    assert result.stats.bucket == 40
    assert result.tokens == judge.tokens
    assert result.stats.compactions == len(judge.compacted_at)
    read = [position for positions, _ in recorder.steps() for position in positions]
    assert read == judge.decoded
    assert len(read) > 7
    for positions, logits in recorder.steps():
        np.testing.assert_allclose(logits, judge.logits[1 + judge.decoded.index(positions[-1])], atol=1e-3)
    assert [feeds["window_kinds"][0].tolist() for _, feeds, _ in recorder.of("compact")] == judge.full


def test_memory_is_the_same_however_long_the_prompt(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    sizes, most = [], []
    for words in (40, 100):
        recorder.calls.clear()
        sizes.append(ask(vlm, "red " * words, [], max_new_tokens=2).stats.kv_bytes)
        most.append(max(sum(a.nbytes for a in (*feeds.values(), *out.values())) for _, feeds, out in recorder.calls))
    assert sizes[0] == sizes[1]
    assert most[0] == most[1]


def test_sessions_are_loaded_when_needed_and_kept(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    assert recorder.loaded == []
    ask(vlm, "is it", [], max_new_tokens=2, ignore_eos=True)
    assert recorder.loaded == ["prefill_tight_16", "decode_tight_16"]
    ask(vlm, "is it", [image(0), image(1), image(2)], max_new_tokens=2, ignore_eos=True)
    ask(vlm, "is it", [image(0)], max_new_tokens=12, ignore_eos=True)
    assert max(Counter(recorder.loaded).values()) == 1
    unused = {"compact_tight_40", "extend_tight_16", "extend_tight_40"}
    assert set(recorder.loaded) == {n for n in vlm.bundle.manifest.graphs if "tight" in n} - unused


def test_bytes_are_those_of_every_state_tensor(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    stats = ask(vlm, "what is it", [image(0)], max_new_tokens=5, ignore_eos=True).stats
    heads, dim, window = toy.KV_HEADS, toy.HEAD_DIM, 8
    slot = 2 * 4 * dim + 2 + 4 + 4  # K, V float32; bias float16; position int32; mass float32
    window_bytes = sum(heads) * window * (2 * 4 * dim + 4) + window * (4 + 4 + 1)
    assert stats.kv_bytes == (8 * heads[0] + 6 * heads[1]) * slot + window_bytes
    tokens = len(ids_of("what is it", 1)) - 1 + toy.IMAGE_TOKENS + 5
    assert stats.kv_bytes_uncompressed == tokens * 2 * sum(heads) * dim * 2
    assert (stats.prompt_tokens, stats.visual_tokens, stats.images) == (tokens - 5, 2, 1)


def find(level: str, wanted: str, steps: int) -> tuple[str, list[np.ndarray], reference.Answer]:
    """A question that the judge sees stop for the wanted reason."""
    for seed in range(40):
        for question in QUESTIONS:
            judge = reference.answer(ids_of(question, 1), [image(seed)], level, steps)
            if judge.stop == wanted and judge.tokens:
                return question, [image(seed)], judge
    raise AssertionError(f"no question stops by {wanted}")


def test_stops_at_the_end_token_unless_ignored(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    question, images, judge = find("tight", "end", 40)
    result = ask(vlm, question, images, max_new_tokens=40)
    assert result.tokens == judge.tokens
    assert toy.END not in result.tokens
    assert result.stats.stop_reason == "end"
    assert result.stats.generated_tokens == len(result.tokens)

    more = ask(vlm, question, images, max_new_tokens=40, ignore_eos=True)
    assert len(more.tokens) == 40
    assert more.tokens[: len(result.tokens) + 1] == [*result.tokens, toy.END]
    assert "</s>" not in more.text


def test_window_that_never_compacts_stops_generation(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="loose", threads=1)
    result = ask(vlm, "what is it", [image(0)], max_new_tokens=100, ignore_eos=True)
    assert result.stats.stop_reason == "window_full"
    assert len(result.tokens) == 1 + 24 - 4
    assert result.stats.compactions == 0


def test_stops_at_the_models_last_position(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    result = ask(vlm, "what is it", [image(0)], max_new_tokens=1000, ignore_eos=True)
    judge = reference.answer(ids_of("what is it", 1), [image(0)], "tight", 1000, ignore_eos=True)
    assert result.stats.stop_reason == judge.stop == "max_positions"
    assert len(result.tokens) == len(judge.tokens) == 1 + toy.POSITIONS - result.stats.prompt_tokens


@pytest.mark.parametrize("level", ["loose", "tight"])
def test_stream_equals_the_whole(level: str, bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level=level, threads=1)
    whole = ask(vlm, "how many red", [image(0)], max_new_tokens=20)
    stream = vlm.stream("how many red", images=[image(0)], max_new_tokens=20)
    with pytest.raises(UserError, match="read it to its end"):
        _ = stream.result
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == whole.text == stream.result.text
    assert stream.result.tokens == whole.tokens
    assert stream.result.stats.stop_reason == whole.stats.stop_reason


def test_requests_do_not_touch_each_other(bundle_path: Path) -> None:
    """Two streams of one model, read in turns, answer as they do alone."""
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    alone = [ask(vlm, q, [image(i)], max_new_tokens=20, ignore_eos=True).tokens for i, q in enumerate(QUESTIONS[:2])]
    streams = [
        vlm.stream(q, images=[image(i)], max_new_tokens=20, ignore_eos=True) for i, q in enumerate(QUESTIONS[:2])
    ]
    for _ in range(20):
        for stream in streams:
            next(stream, None)
    for stream in streams:
        list(stream)
    assert [stream.result.tokens for stream in streams] == alone


def test_messages_equal_the_plain_question(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, threads=1)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what is it"}]
    images = [image(0), image(1)]
    result = vlm.generate([{"role": "user", "content": content}], images=images, max_new_tokens=4)
    assert result.tokens == ask(vlm, "what is it", images, max_new_tokens=4).tokens


def test_order_of_images_matters(bundle_path: Path, recorder: Recorder) -> None:
    vlm = runtime.open(bundle_path, threads=1)
    ask(vlm, "what is it", [image(0), image(1)], max_new_tokens=1)
    ask(vlm, "what is it", [image(1), image(0)], max_new_tokens=1)
    first, second = (outputs["logits"] for _, _, outputs in recorder.of("prefill"))
    assert np.abs(first - second).max() > 0.1
