"""A damaged or forged bundle is a UserError, or one that the manifest describes: FUZZ=20 tries so many times more."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import CHECKSUM, MANIFEST, Bundle, read
from engines.errors import UserError
from tests.engines.small_bundle import write
from tests.engines.test_bundle import contents, put, refused
from tests.fuzz import damaged, examples, mutated


@examples(150)
@given(data=st.data())
def test_any_changed_file_is_found(data: st.DataObject, out: Path) -> None:
    name, _ = data.draw(st.sampled_from(contents()))
    before = (out / name).read_bytes()
    (out / name).write_bytes(data.draw(damaged(before)))
    try:
        refused(out, name if name != CHECKSUM else MANIFEST)
    finally:
        (out / name).write_bytes(before)
    read(out)


def harmless(out: Path) -> None:
    """It is refused in one line, or a bundle like any other."""
    try:
        opened = read(out)
    except UserError as error:
        told = str(error)
    else:
        return described(opened)
    assert "\n" not in told


def described(opened: Bundle) -> None:
    """What is asked of a manifest can be asked of this one."""
    manifest = opened.manifest
    manifest.check()
    for level in manifest.levels.values():
        assert all(manifest.batch_bytes(bucket) >= 0 for bucket in level.buckets)
    assert opened.embedding().shape == (manifest.model.vocab_size, manifest.model.hidden_size)
    assert all(opened.file(name).resolve().is_relative_to(opened.path.resolve()) for name in manifest.files)


@examples(150)
@given(data=st.data())
def test_a_manifest_that_somebody_changed_is_told_or_harmless(data: st.DataObject, out: Path) -> None:
    """With a checksum that fits."""
    text = (out / MANIFEST).read_bytes()
    put(out, json.dumps(data.draw(mutated(json.loads(text)))).encode())
    try:
        harmless(out)
    finally:
        put(out, text)


@examples(50)
@given(data=st.data())
def test_a_manifest_of_any_bytes_is_told_or_harmless(data: st.DataObject, out: Path) -> None:
    text = (out / MANIFEST).read_bytes()
    put(out, data.draw(damaged(text)))
    try:
        harmless(out)
    finally:
        put(out, text)


LINKS = [".", "..", "/", "/dev/zero", "/etc/passwd", "itself", "nowhere", MANIFEST, "weights.bin", "../elsewhere"]


@examples(50)
@given(name=st.sampled_from(contents()), to=st.sampled_from(LINKS), folder=st.booleans())
def test_links_and_folders_in_place_of_files_are_told(name: Any, to: str, folder: bool, tmp_path_factory: Any) -> None:
    out = tmp_path_factory.mktemp("linked") / "bundle"
    write(out)
    (out.parent / "elsewhere").write_bytes((out / name[0]).read_bytes())  # what it should be, but not there
    (out / name[0]).unlink()
    if folder:
        (out / name[0]).mkdir()
    else:
        (out / name[0]).symlink_to(name[0] if to == "itself" else to)
    with contextlib.suppress(UserError):
        read(out)
        raise AssertionError(f"{name} -> {to} was opened")
