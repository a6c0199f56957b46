"""The bundle's folder: written whole or not at all, and opened only when every byte is what was written."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import bundle
from engines.bundle import (
    CHECKSUM,
    MANIFEST,
    WEIGHTS,
    Bucket,
    Embedding,
    Graph,
    Level,
    Manifest,
    Model,
    Plan,
    TensorSpec,
    read,
    seal,
    writing,
)
from engines.errors import UserError

TABLE = np.arange(24, dtype=np.float32).reshape(6, 4)
MODEL = Model("toy", 2, 2, 2, 4, 4, 6, 100, 5, 9, None, [2, 3], Embedding(16, "float32", [6, 4]))


def manifest(**changes: Any) -> Manifest:
    graphs = {
        kind: Graph(kind, f"{kind}.onnx", [TensorSpec("x", "float32", [1, 2])], [TensorSpec("y", "int8", [3])])
        for kind in ("vision", "prefill", "decode", "compact")
    }
    buckets = [
        Bucket(8, [4, 5], 4, 2, "prefill", "decode", "compact"),
        Bucket(9, [4, 5], 4, 4, "prefill", "decode", ""),
    ]
    levels = {"light": Level({"window": {"size": 4}, "bits": [8, None]}, 3, "vision", buckets)}
    plans = [Plan("decode", "decode.plan", "trt-rtx", "1.7", ["sm_86"])]
    return dataclasses.replace(
        Manifest(MODEL, levels, "light", graphs, plans, {"ort": "built"}, {"onnx": "1"}), **changes
    )


def fill(folder: Path) -> None:
    for name in ("vision.onnx", "prefill.onnx", "decode.onnx", "compact.onnx", "decode.plan", "tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 3)
    (folder / WEIGHTS).write_bytes(bytes(16) + TABLE.tobytes() + b"more")


def write(out: Path, **changes: Any) -> Manifest:
    with writing(out) as folder:
        fill(folder)
        return seal(folder, manifest(**changes))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "bundle")
    return tmp_path / "bundle"


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
    assert isinstance(opened.embedding(), np.memmap)
    assert not opened.embedding().flags.writeable
    assert opened.file("decode.onnx").read_bytes() == b"decode.onnx" * 3


def test_sizes_that_the_manifest_states() -> None:
    assert TensorSpec("x", "float16", [2, 3, 5]).nbytes == 60
    assert TensorSpec("x", "int8", []).nbytes == 1
    assert MODEL.kv_bytes(10) == 10 * 2 * 2 * 2 * 4 * 2


@cache
def contents() -> tuple[tuple[str, int], ...]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "bundle"))
        return tuple(sorted((p.name, p.stat().st_size) for p in Path(folder, "bundle").iterdir()))


NAMES = [
    "compact.onnx", "decode.onnx", "decode.plan", MANIFEST, CHECKSUM, "prefill.onnx", "tokenizer.json", "vision.onnx",
    WEIGHTS,
]  # fmt: skip


def test_names_are_all_files() -> None:
    assert sorted(NAMES) == [name for name, _ in contents()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_flipped_bit_is_found(name: str, place: float, out: Path) -> None:
    content = bytearray((out / name).read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    (out / name).write_bytes(content)
    refused(out, "damaged|missing")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_found(data: st.DataObject, out: Path) -> None:
    name, size = data.draw(st.sampled_from(contents()))
    offset, difference = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))
    before = (out / name).read_bytes()
    changed = bytearray(before)
    changed[offset] ^= difference
    (out / name).write_bytes(changed)
    try:
        refused(out, name if name != CHECKSUM else MANIFEST)
    finally:
        (out / name).write_bytes(before)
    read(out)


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
    refused(tmp_path / "nowhere", "nowhere is not a folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "file is not a folder")
    refused(tmp_path, "not a bundle")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "not JSON"),
        (b'{"format": "unicache-edge", "version": 1', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no unicache-edge bundle"),
        (b"null", "no unicache-edge bundle"),
        (b'{"name": "a web app"}', "no unicache-edge bundle"),
        (b'{"format": "unicache-edge", "version": 2}', "no unicache-edge bundle of version 1"),
        (b'{"format": "unicache-edge", "version": 1}', "missing key"),
        (b'{"format": "unicache-edge", "version": true}', "version: expected int, got True"),
    ],
)
def test_foreign_manifest(text: bytes, match: str, out: Path) -> None:
    put(out, text)
    refused(out, match)


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
        ("model.num_layers", "6", "num_layers: expected int"),
        ("model.num_layers", True, "num_layers: expected int"),
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
        ("levels.light.vision", "decode", "no vision graph of the name 'decode'"),
        ("levels.light.buckets.0.prefill", "", "no prefill graph"),
        ("levels.light.buckets.0.compact", "none", "no compact graph of the name 'none'"),
        ("levels.light.buckets.0.capacities", [4], "1 layers of 2"),
        ("levels.light.buckets.0.recent", 5, "0 <= recent <= window"),
        ("levels.light.buckets.0.recent", -1, "0 <= recent <= window"),
        ("levels.light.buckets.0.recent", 4, "compacting must free slots"),
        ("model.embedding.dtype", "object", "dtype 'object'"),
        ("model.embedding.offset", -4, "embedding must have"),
        ("model.embedding.offset", 21, "behind the end of weights.bin"),
        ("model.embedding.shape", [6], "two dimensions"),
        ("model.embedding.shape", [10**9, 10**9], "behind the end of weights.bin"),
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


def test_link_that_leads_out_of_the_bundle(out: Path) -> None:
    content = (out / "decode.onnx").read_bytes()
    (out.parent / "elsewhere").write_bytes(content)
    (out / "decode.onnx").unlink()
    (out / "decode.onnx").symlink_to(out.parent / "elsewhere")
    refused(out, "decode.onnx is a link out of the bundle")


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


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FAILURES = [ValueError("bad"), KeyboardInterrupt(), SystemExit(1), UserError("bad"), OSError(errno.EIO, "bad disk")]


@pytest.mark.parametrize("error", FAILURES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("exists", [False, True])
def test_failing_build_leaves_what_was_there(error: BaseException, exists: bool, tmp_path: Path) -> None:
    if exists:
        write(tmp_path / "bundle")
    before = snapshot(tmp_path)

    def build() -> None:
        with writing(tmp_path / "bundle") as folder:
            fill(folder)
            raise error

    with pytest.raises(type(error)):
        build()
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"] * exists


def test_new_bundle_replaces_the_old_one_whole(out: Path) -> None:
    (out / "old notes").write_text("x")
    write(out, tools={"onnx": "2"})
    assert read(out).manifest.tools == {"onnx": "2"}
    assert not (out / "old notes").exists()
    assert [p.name for p in out.parent.iterdir()] == ["bundle"]


def test_damaged_bundle_can_be_built_again(out: Path) -> None:
    (out / WEIGHTS).unlink()
    (out / CHECKSUM).unlink()
    write(out)
    read(out)


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()], ids=["busy", "interrupt"])
@pytest.mark.parametrize("call", [1, 2])
def test_failing_rename_puts_the_old_bundle_back(
    error: BaseException, call: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename, calls = snapshot(out.parent), os.rename, 0

    def failing(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(type(error)):
        write(out, tools={"onnx": "2"})
    assert snapshot(out.parent) == before
    assert [p.name for p in out.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("what", ["folder with files", "file", "another program's manifest"])
def test_what_is_no_bundle_is_not_overwritten(what: str, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    if what == "file":
        out.write_text("thesis")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("thesis")
    if what == "another program's manifest":
        (out / MANIFEST).write_text('{"name": "a web app"}')
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="precious exists and is not a bundle"):
        write(out)
    assert snapshot(tmp_path) == before


def test_empty_folder_becomes_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    read(tmp_path / "empty")


def test_parents_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "bundle")
    read(tmp_path / "a" / "b" / "bundle")


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot be written.*choose another --out"):
        write(tmp_path / "file" / "bundle")


@pytest.mark.parametrize("where", ["build", "seal"])
def test_full_disk_is_told_and_leaves_nothing(where: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(out.parent)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "build":
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"no space left to write .*bundle: free some"):
        write(out)
    assert snapshot(out.parent) == before
    assert [p.name for p in out.parent.iterdir()] == ["bundle"]


def test_relative_path_and_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("bundle"))
    assert read(Path("bundle")).embedding().shape == (6, 4)


def test_inconsistent_manifest_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default level 'none'"):
        write(tmp_path / "bundle", default_level="none")
    assert list(tmp_path.iterdir()) == []


def test_bundle_can_be_moved(out: Path) -> None:
    shutil.move(out, out.parent / "moved")
    read(out.parent / "moved")
