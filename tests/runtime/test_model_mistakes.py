"""What a caller of the runtime can get wrong, and what it is told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from engines import bundle as bundles
from engines.errors import UserError
from engines.preprocessor import AnyRes, Kind, Patches
from tests.runtime import toy
from tests.runtime.asking import Recorder, ask, image

USER = {"role": "user"}
TEXT = {"type": "text", "text": "what is it"}
MISTAKES: list[tuple[str, Any, Any, dict[str, Any], str]] = [
    ("empty question", "", [image(0)], {}, "question is empty"),
    ("blank question", " \n", [image(0)], {}, "question is empty"),
    ("more images", [USER | {"content": [TEXT]}], [image(0)], {}, "0 image placeholders, but 1 image was given"),
    ("fewer images", [USER | {"content": [{"type": "image"}, TEXT]}], [], {}, "1 image placeholder, but 0 images were"),
    ("placeholder in the text", "what is <image>", [image(0)], {}, "2 image placeholders, but 1 image was given"),
    ("too long", "red " * 56, [], {}, "longest bucket's 40 and the 20 .*--buckets 61"),
    ("too many positions", "red " * 130, [], {}, "only 120 positions"),
    ("no messages", [], [], {}, "text or a list of messages"),
    ("no role", [{"content": "hi"}], [], {}, "role and a content"),
    ("odd content", [USER | {"content": [{"type": "audio"}]}], [], {}, "a message's content"),
    ("no text in text", [USER | {"content": [{"type": "text"}]}], [], {}, "a message's content"),
    ("no prompt", None, [], {}, "text or a list of messages"),
    ("images no list", "what", "image.png", {}, "images must be a list"),
    ("array as images", "what", image(0), {}, "images must be a list"),
    ("no tokens wanted", "what", [image(0)], {"max_new_tokens": 0}, "at least 1"),
    ("nothing to compress", "what", [], {"question_later": True}, "needs an image"),
    ("float array", "what", [image(0) / 255], {}, "must be uint8"),
    ("channels first", "what", [image(0).transpose(2, 0, 1)], {}, r"must be \[H, W\]"),
    ("five channels", "what", [np.zeros((4, 4, 5), np.uint8)], {}, r"must be \[H, W\]"),
    ("no pixels", "what", [np.zeros((0, 4, 3), np.uint8)], {}, "empty"),
    ("no image at all", "what", [3], {}, "path, bytes, a PIL image or an array"),
    ("missing file", "what", ["nowhere.png"], {}, "nowhere.png: no such file"),
    ("a folder", "what", ["/"], {}, "not a file"),
    ("a name too long", "what", ["x" * 300 + ".png"], {}, "cannot be read"),
    ("no name for a file", "what", ["a\0b"], {}, "cannot be read"),
    ("bytes as images", "what", b"\x89PNG", {}, "images must be a list"),
    ("no Unicode", "what \udcff", [image(0)], {}, "not valid Unicode"),
    ("half a token wanted", "what", [image(0)], {"max_new_tokens": 2.5}, "must be a whole number, got 2.5"),
    ("tokens in words", "what", [image(0)], {"max_new_tokens": "5"}, "must be a whole number, got '5'"),
]


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize(
    ("prompt", "images", "options", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistake_is_told_before_anything_runs(
    prompt: Any, images: Any, options: dict[str, Any], message: str, way: str, bundle_path: Path, recorder: Recorder
) -> None:
    vlm: Any = runtime.open(bundle_path, threads=1)
    with pytest.raises(UserError, match=message) as error:
        getattr(vlm, way)(prompt, images=images, **options)
    assert recorder.calls == []
    assert "\n" not in str(error.value)


def test_question_that_no_window_holds(bundle_path: Path) -> None:
    vlm = runtime.open(bundle_path, level="loose", threads=1)
    with pytest.raises(UserError, match="do not fit into the window of 24 tokens, 20 of them free"):
        ask(vlm, "red " * 25, [image(0)], question_later=True)


@pytest.mark.parametrize("threads", [0, -1, 257, 10**6, 2.5, "2", True])
def test_wrong_threads(threads: Any, bundle_path: Path) -> None:
    with pytest.raises(UserError, match="threads must be"):
        runtime.open(bundle_path, threads=threads)


@pytest.mark.parametrize("path", [None, 3, b"bundle", ["bundle"]])
def test_wrong_path(path: Any) -> None:
    with pytest.raises(UserError, match="a bundle's folder must be a path, got"):
        runtime.open(path)


@pytest.mark.parametrize("budget", [2.5, True, b"2GiB", ["2GiB"], 0])
def test_wrong_budget(budget: Any, bundle_path: Path) -> None:
    with pytest.raises(UserError, match="memory_budget must be"):
        runtime.open(bundle_path, memory_budget=budget)


@pytest.mark.parametrize("level", ["odd", "", 3, ["loose"], {}])
def test_wrong_level(level: Any, bundle_path: Path) -> None:
    with pytest.raises(UserError, match=rf"no level {re.escape(repr(level))}.*choose loose, tight"):
        runtime.open(bundle_path, level=level)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "choose auto, ort, trt-rtx, trt"),
        (None, "unknown backend None"),
        (["ort"], "unknown backend"),
        ("trt", "backend trt cannot"),
        ("trt-rtx", "backend trt-rtx cannot"),
    ],
)
def test_wrong_backend(backend: Any, message: str, bundle_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        runtime.open(bundle_path, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "ort"])
def test_backend_is_told(backend: str, bundle_path: Path) -> None:
    stats = ask(runtime.open(bundle_path, backend, threads=1), "what", [], max_new_tokens=1).stats
    assert stats.backend == "ort"
    assert stats.provider.endswith("ExecutionProvider")


def test_default_level_is_the_bundles(bundle_path: Path) -> None:
    assert runtime.open(bundle_path).level == "loose"


def test_overflown_logits_are_told(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = runtime.open(bundle_path, threads=1)
    ask(vlm, "what", [], max_new_tokens=1)
    session = vlm._sessions["prefill_loose_16"]
    run = session.run
    monkeypatch.setattr(session, "run", lambda feeds: run(feeds) | {"logits": np.full((1, 32), np.nan, np.float32)})
    with pytest.raises(UserError, match="not numbers"):
        ask(vlm, "what", [], max_new_tokens=1)


@pytest.mark.parametrize("kind", [AnyRes(8, [[8, 8]]), Patches(2, 2, 2, 16, 64)])
def test_a_preprocessor_that_is_not_the_graphs_is_told(kind: Kind, tmp_path: Path) -> None:
    path = toy.build(tmp_path / "bundle")
    bundle = bundles.read(path)
    replace(toy.PREPROCESSOR, kind=kind).write(path)
    bundles.seal(path, bundle.manifest)
    vlm = runtime.open(path, threads=1)
    assert ask(vlm, "what", [], max_new_tokens=1).tokens
    with pytest.raises(
        UserError, match=r"preprocessor\.json makes images of \[(2, 3|16, 24).*the graph takes \[1, 3, 8, 8\]"
    ):
        ask(vlm, "what", [np.zeros((16, 20, 3), np.uint8)], max_new_tokens=1)
