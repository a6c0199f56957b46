"""A bundle's folder is written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import CHECKSUM, MANIFEST, WEIGHTS, check_outside, read, seal, writing
from engines.errors import UserError
from tests.engines.small_bundle import fill, manifest, write


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
    with writing(out) as folder:
        fill(folder)
        (folder / "old").write_text("of this build only")
        seal(folder, manifest())
    write(out, tools={"onnx": "2"})
    assert read(out).manifest.tools == {"onnx": "2"}
    assert not (out / "old").exists()
    assert [p.name for p in out.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("place", ["new", "more/new", "link"])
def test_a_bundle_is_not_written_into(out: Path, place: str) -> None:
    (out.parent / "aside").symlink_to(out)
    target = out.parent / "aside" / "new" if place == "link" else out / place
    before = snapshot(out)
    with pytest.raises(UserError, match=r"lies in the bundle .*: choose a place outside of it"), writing(target):
        pytest.fail("it is written")
    assert snapshot(out) == before
    read(out)


def test_what_is_read_is_not_written_into_but_beside(tmp_path: Path) -> None:
    (tmp_path / "read").mkdir()
    for place in ("read/x", "read/new/x", "read/../read/x"):
        with pytest.raises(UserError, match="which is read: choose a place outside of it"):
            check_outside(tmp_path / place, tmp_path / "read")
    for place in ("x", "reader/x", "read/../x", "read"):
        check_outside(tmp_path / place, tmp_path / "read")


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


@pytest.mark.parametrize("name", ["notes.txt", "photos/me.png", MANIFEST + ".bak"])
def test_what_somebody_put_into_a_bundle_is_not_removed(name: str, out: Path) -> None:
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds {name.split('/')[0]}, which no build has put there"):
        write(out)
    assert (out / name).read_text() == "mine"
    read(out)


def test_an_empty_folder_that_somebody_made_in_a_bundle_stays(out: Path) -> None:
    (out / "soon").mkdir()
    with pytest.raises(UserError, match="holds soon, which no build has put there"):
        write(out)
    assert (out / "soon").is_dir()


@pytest.mark.parametrize(
    "what", ["folder with files", "file", "another program's manifest", "a checksum", "a manifest that names us"]
)
def test_what_is_no_bundle_is_not_overwritten(what: str, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    if what == "file":
        out.write_text("thesis")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("thesis")
    if what == "another program's manifest":
        (out / MANIFEST).write_text('{"name": "a web app"}')
    if what == "a checksum":
        (out / CHECKSUM).write_text("0")
    if what == "a manifest that names us":
        (out / MANIFEST).write_text('{"name": "unicache-edge"}')
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
    with pytest.raises(UserError, match=r"^/proc/bundle cannot be written \(No such file or directory\): choose"):
        write(Path("/proc/bundle"))


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
