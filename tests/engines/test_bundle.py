"""A bundle is opened only when every byte is what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import bundle
from engines.bundle import CHECKSUM, MANIFEST, VERSION, WEIGHTS, TensorSpec, read
from engines.errors import UserError
from engines.layout import VideoStyle
from engines.mrope import MRope
from tests.engines.small_bundle import MODEL, TABLE, graphs, manifest, write


def rewrite(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and make its checksum fit, as somebody who forges a bundle would."""
    data = json.loads((out / MANIFEST).read_text())
    put(out, json.dumps(change(data) or data).encode())


def put(out: Path, text: bytes) -> None:
    (out / MANIFEST).write_bytes(text)
    (out / CHECKSUM).write_text(hashlib.sha256(text).hexdigest())


def refused(out: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        read(out)
    assert "\n" not in str(error.value)


def test_round_trip(tmp_path: Path) -> None:
    written = write(tmp_path / "bundle")
    opened = read(tmp_path / "bundle")
    assert opened.manifest == written
    assert set(opened.manifest.files) == {p.name for p in (tmp_path / "bundle").iterdir()} - {MANIFEST, CHECKSUM}
    np.testing.assert_array_equal(opened.embedding(), TABLE)
    table = opened.embedding()
    assert isinstance(table, np.memmap)
    assert not table.flags.writeable
    assert opened.file("decode.onnx").read_bytes() == b"decode.onnx" * 3


def test_sizes_that_the_manifest_states() -> None:
    assert TensorSpec("x", "float16", [2, 3, 5]).nbytes == 60
    assert TensorSpec("x", "int8", []).nbytes == 1
    assert MODEL.kv_bytes(10) == 10 * 2 * (2 + 1) * 4 * 2


@cache
def contents() -> tuple[tuple[str, int], ...]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "bundle"))
        return tuple(sorted((p.name, p.stat().st_size) for p in Path(folder, "bundle").iterdir()))


NAMES = [
    "compact.onnx", "decode.onnx", "decode.plan", "decode_2.onnx", "extend.onnx", MANIFEST, CHECKSUM, "prefill.onnx",
    "tokenizer.json", "vision.onnx", WEIGHTS,
]  # fmt: skip


def test_names_are_all_files() -> None:
    assert sorted(NAMES) == [name for name, _ in contents()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_flipped_bit_is_found(name: str, place: float, out: Path) -> None:
    content = bytearray((out / name).read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    (out / name).write_bytes(content)
    again = f"build it again from its checkpoint:  python export/build.py CHECKPOINT --out {out}"
    refused(out, f" is damaged: copy the bundle again, or {re.escape(again)}$")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["missing", "truncated", "empty", "longer", "folder"])
def test_file_that_is_not_what_it_was(name: str, change: str, out: Path) -> None:
    content = (out / name).read_bytes()
    (out / name).unlink()
    if change == "folder":
        (out / name).mkdir()
    elif change != "missing":
        (out / name).write_bytes({"truncated": content[:-1], "empty": b"", "longer": content + b"\n"}[change])
    refused(out, "damaged|missing|not a bundle")


def test_not_a_folder(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 5000), "cannot be read")
    refused(tmp_path / "nowhere", "nowhere is not a folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "file is not a folder")
    refused(tmp_path, r"not a bundle .*: give a folder that export/build\.py wrote; it builds one with .*--out FOLDER$")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "not JSON"),
        (b'{"format": "unicache-edge", "version": 2', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no unicache-edge bundle"),
        (b"null", "no unicache-edge bundle"),
        (b'{"name": "a web app"}', "no unicache-edge bundle"),
        (
            b'{"format": "unicache-edge", "version": 4}',
            rf"version 4, and this .* \d to {VERSION}: build it again",
        ),
        (b'{"format": "unicache-edge", "version": 99}', rf"version 99, .* {VERSION}: update this program, or build it"),
        (b'{"format": "unicache-edge", "version": %d}' % VERSION, "missing key"),
        (b'{"format": "unicache-edge", "version": true}', "is a bundle of version True"),
    ],
)
def test_foreign_manifest(text: bytes, match: str, out: Path) -> None:
    put(out, text)
    refused(out, match)


def test_what_shows_no_videos_is_read_by_programs_that_know_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = graphs()
    for name, tokens in (("prefill", 8), ("extend", 2)):
        ids = TensorSpec("position_ids", "int32", [3, 1, tokens])
        turned[name] = replace(turned[name], inputs=[*turned[name].inputs, ids])
    layouts = [replace(layout, grid=[1, 6, 6]) for layout in MODEL.layouts]
    model = replace(MODEL, layouts=layouts, mrope=MRope(), video=VideoStyle("<video>", "<v>", 4, 2))
    level = manifest().levels["light"]
    parts = {"graphs": turned, "levels": {"light": replace(level, buckets=level.buckets[:1])}}
    written = {
        "videos": write(tmp_path / "videos", model=model, **parts),
        "none": write(tmp_path / "none", model=replace(model, video=None), **parts),
    }
    assert {name: (each.version, read(tmp_path / name).manifest == each) for name, each in written.items()} == {
        "videos": (VERSION, True),
        "none": (VERSION - 1, True),
    }
    assert "video" not in json.loads((tmp_path / "none" / MANIFEST).read_text())["model"]  # an unknown key, to them
    rewrite(tmp_path / "none", change("model.video", None))  # as it was written for a time
    assert read(tmp_path / "none").manifest == written["none"]
    monkeypatch.setattr(bundle, "VERSION", VERSION - 1)
    read(tmp_path / "none")
    refused(tmp_path / "videos", f"version {VERSION}, .*: update this program, or build it again from its checkpoint")


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set what lies at `a.b.0.c`."""

    def apply(data: Any) -> None:
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in parents:
            data = data[key]
        data[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("surprise", 1, "unknown key 'surprise'"),
        ("model.surprise", 1, "manifest.json.model: unknown key 'surprise'"),
        ("model.head_dim", "6", "head_dim: expected int"),
        ("model.head_dim", True, "head_dim: expected int"),
        ("model.eos_token_ids", 2, "eos_token_ids: expected a list"),
        ("graphs", [], "graphs: expected a table"),
        ("graphs.decode.kind", "encode", "'encode' is none of"),
        ("graphs.decode.kind", "compact", "no decode graph of the name 'decode'"),
        ("graphs.decode.file", "other.onnx", "'other.onnx' has no hash"),
        ("graphs.decode.file", "../other.onnx", r"'\.\./other\.onnx' has no hash"),
        ("graphs.decode.inputs.0.dtype", "object", "dtype 'object'"),
        ("graphs.decode.inputs.0.shape", [1, -1], "negative dimension"),
        ("graphs.decode.inputs.0.shape", [1, "S"], "expected int"),
        ("plans.0.file", "/etc/passwd", "'/etc/passwd' has no hash"),
        ("plans.0.graph", "none", "unknown graph 'none'"),
        ("default_level", "heavy", "default level 'heavy'"),
        ("levels", {}, "default level 'light'"),
        ("levels.light.buckets", [], "no buckets"),
        ("levels.light.views.2x2.vision", "decode", "no vision graph of the name 'decode'"),
        ("levels.light.buckets.0.prefill", "", "no prefill graph"),
        ("levels.light.unknown", "chat", "level 'light' names 'chat' for unknown questions, which is no level"),
        ("levels.light.buckets.0.compact", "none", "no compact graph of the name 'none'"),
        ("levels.light.buckets.0.shortened", {"tokens": 9, "text": 3}, "0 <= text <= tokens <= 8"),
        ("levels.light.buckets.0.shortened", {"tokens": 0, "text": 0}, "and a token"),
        ("levels.light.buckets.0.shortened", {"tokens": 4, "text": 5}, "0 <= text <= tokens"),
        ("levels.light.buckets.0.chunk", 3, "a chunk of 3 does not fit a window of 4, 2 recent"),
        ("levels.light.buckets.0.chunk", 0, "a chunk of 0 does not fit"),
        ("levels.light.buckets.0.chunk", 1, r"extend.onnx: embeddings should be \[1, 1, 4\], and is \[1, 2, 4\]"),
        ("levels.light.buckets.0.extend", "decode", "no extend graph of the name 'decode'"),
        ("graphs.extend.inputs.1.shape", [1, 3], r"extend.onnx: positions should be \[1, 2\]"),
        ("graphs.extend.inputs.3.dtype", "float16", "extend.onnx takes key_window, which prefill.onnx does not return"),
        ("graphs.extend.outputs.2.shape", [1, 3, 1, 4], r"extend.onnx: new_value should be \[1, 3, 2, 4\]"),
        ("levels.light.buckets.0.batch", 3, "decode_2.onnx is not decode.onnx for 3 rows"),
        ("levels.light.buckets.0.batch", 1, "a batched graph and a batch of 2 rows or more belong together"),
        ("levels.light.buckets.0.batch", -2, "a batched graph and a batch of 2 rows or more belong together"),
        ("levels.light.buckets.1.batch", 2, "a batched graph and a batch of 2 rows or more belong together"),
        ("levels.light.buckets.0.batched", "extend", "no decode graph of the name 'extend'"),
        ("levels.light.buckets.0.batched", "decode", "decode.onnx is not decode.onnx for 2 rows"),
        ("graphs.decode_2.inputs.3.shape", [1, 3, 4, 4], "decode_2.onnx is not decode.onnx for 2 rows"),
        ("graphs.decode_2.outputs.0.dtype", "float16", "decode_2.onnx is not decode.onnx for 2 rows"),
        ("levels.light.buckets.0.capacities", [4], "not those of 2 layers"),
        ("levels.light.buckets.0.capacities", [4, -1], "not those of 2 layers"),
        ("levels.light.buckets.0.length", 9, r"prefill.onnx: embeddings should be \[1, 9, 4\]"),
        ("graphs.prefill.inputs.3.shape", [1, 7], r"prefill.onnx: segments should be \[1, 8\]"),
        ("levels.light.buckets.0.window", 5, "key_window should be"),
        ("levels.light.views", {}, "level 'light' sees nothing, not 2x2"),
        ("levels.light.views.2x2.tokens", 0, "level 'light' keeps 0 of the 9 tokens of 2x2"),
        ("levels.light.views.2x2.tokens", 10, "level 'light' keeps 10 of the 9 tokens of 2x2"),
        ("levels.light.views.2x2.tokens", 4, r"vision.onnx: visual_tokens should be \[1, 4, 4\]"),
        ("levels.light.views.2x2.adaptive", {"counts": []}, "adaptive: counts must be ascending"),
        ("levels.light.views.2x2.adaptive", {"counts": [3, 2]}, "counts must be ascending"),
        ("levels.light.views.2x2.adaptive", {"counts": [2, 3], "floor": 3}, "1 <= floor <= counts"),
        ("levels.light.views.2x2.adaptive", {"counts": [0, 3]}, "1 <= floor <= counts"),
        ("levels.light.views.2x2.adaptive", {"counts": [3], "coverage": 1.5}, "coverage must be in"),
        ("levels.light.views.2x2.adaptive", {"counts": [3], "quota": 0.0}, "quota must be in"),
        ("levels.light.views.2x2.adaptive", {"counts": [3], "gate": {"base": 2.0}}, "adaptive.gate: base must be in"),
        ("levels.light.views.2x2.adaptive", {"counts": [3]}, r"vision.onnx: order should be \[1, 3\], and is missing"),
        ("graphs.decode.inputs.2.dtype", "float16", "decode.onnx takes key_window, which prefill.onnx does not"),
        ("graphs.compact.inputs.0.name", "key_store.0", "compact.onnx takes key_store.0, which prefill.onnx does not"),
        ("graphs.prefill.outputs.0.name", "scores", "logits should be .*, and is missing"),
        ("model.hidden_size", 8, "embedding .* is not"),
        ("model.hidden_size", 10**15, "embedding .* is not"),
        ("model.head_dim", 0, "head_dim must be at least 1, got 0"),
        ("model.kv_heads", [2, -2], "at least one KV head"),
        ("levels.light.kv_heads", [2, 0], "at least one KV head"),
        ("levels.light.kv_heads", [3], "KV heads of 1 layers, not of 2"),
        ("levels.light.kv_heads", [2, 2], r"key_window should be \[1, 4, 4, 4\]"),
        ("model.placeholder", "", "placeholder is empty"),
        ("model.layouts", [], "level 'light' sees 2x2, not "),
        ("model.layouts.0.tokens", 0, "layout 2x2 needs a size, a text and at least one token"),
        ("model.layouts.0.pixel_values", [1, 3, 2, 4], r"pixel_values should be \[1, 3, 2, 4\]"),
        ("model.layouts.0.name", "2x3", "a layout of 2 x 2 must bear that name, got '2x3'"),
        ("model.image_token_id", 6, "image token 6 is outside the vocabulary of 6"),
        ("levels.light.buckets.0.recent", 5, "0 <= recent <= window"),
        ("levels.light.buckets.0.recent", -1, "0 <= recent <= window"),
        ("levels.light.buckets.0.recent", 4, "compacting must free slots"),
        ("model.embedding.dtype", "object", "dtype 'object'"),
        ("model.embedding.offset", -4, "embedding must have"),
        ("model.embedding.offset", 21, "behind the end of weights.bin"),
        ("model.embedding.shape", [6], "two dimensions"),
        ("model.embedding.shape", [10**9, 10**9], "is not"),
        ("model.embedding.shape", [2**32, 2**32], "is not"),
        ("files.weights.bin", None, "expected a table"),
    ],
)
def test_forged_manifest(path: str, value: Any, match: str, out: Path) -> None:
    if path == "files.weights.bin":
        rewrite(out, lambda data: data["files"].update({WEIGHTS: value}))
    else:
        rewrite(out, change(path, value))
    refused(out, match)


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../secret", "a/../../secret", "..", "", ".", "C:secret", "..\\secret", "a\0b"]
)
def test_file_name_that_leads_out_of_the_bundle(name: str, out: Path) -> None:
    (out.parent / "secret").write_text("x")
    entry = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
    rewrite(out, lambda data: data["files"].update({name: entry}))
    refused(out, "leads out of the bundle")


@pytest.mark.parametrize("name", ["decode.onnx", MANIFEST, CHECKSUM])
def test_link_that_leads_out_of_the_bundle(name: str, out: Path) -> None:
    content = (out / name).read_bytes()
    (out.parent / "elsewhere").write_bytes(content)
    (out / name).unlink()
    (out / name).symlink_to(out.parent / "elsewhere")
    refused(out, f"{name} is a link out of the bundle")


def test_linked_folder_that_leads_out_of_the_bundle(out: Path) -> None:
    (out.parent / "elsewhere").mkdir()
    (out.parent / "elsewhere" / "file").write_bytes(b"x")
    (out / "inner").symlink_to(out.parent / "elsewhere")
    entry = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
    rewrite(out, lambda data: data["files"].update({"inner/file": entry}))
    refused(out, "inner/file is a link out of the bundle")


def test_the_bundle_itself_may_be_a_link(out: Path) -> None:
    (out.parent / "link").symlink_to(out)
    assert read(out.parent / "link").manifest == read(out).manifest


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file(out: Path) -> None:
    (out / WEIGHTS).chmod(0)
    refused(out, "cannot be read")


def test_failing_read_is_told(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(bundle, "sha256", fail)
    refused(out, "cannot be read.*Input/output error")
