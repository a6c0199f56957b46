"""The bundle: a folder with all that a device needs, written atomically, opened with every hash checked.

    manifest.json      what is in it (the dataclasses of engines/manifest.py) and the sha256 of every other file
    manifest.sha256    sha256 of manifest.json
    *.onnx             static-shape graphs, their weights in one shared file
    weights.bin        external data of all graphs and the token embedding table
    *.plan             TensorRT plans, if built
    libunicache_*.so   kernels of the operators, for ONNX Runtime on a CPU and for TensorRT, if built
    tokenizer.json, preprocessor.json, chat_template.jinja
    report.html        what it is made of and what that costs, for a person; nothing reads it

Nothing in a bundle is ever executed. numpy and the standard library only: export writes it, the runtime reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from engines.artifacts import Graph, Library, Plan, TensorSpec
from engines.config import parse, parse_json
from engines.errors import UserError, one_line, without_names
from engines.gate import Adaptive
from engines.layout import Layout
from engines.manifest import (
    FORMAT,
    VERSION,
    WEIGHTS,
    WITHOUT_VIDEOS,
    Bucket,
    Embedding,
    File,
    Level,
    Manifest,
    Model,
    Shortened,
    View,
)
from engines.weights import StoredWeights, Table

__all__ = [
    "Adaptive", "Bucket", "Bundle", "Embedding", "Graph", "Layout", "Level", "Library", "Manifest", "Model", "Plan",
    "Shortened", "StoredWeights", "TensorSpec", "View", "read", "rebuild", "seal", "sha256", "writing",
]  # fmt: skip

MIB = 2**20
FULL = errno.ENOSPC, errno.EDQUOT  # of an OSError: the disk, or what a user may have of it
MANIFEST, CHECKSUM = "manifest.json", "manifest.sha256"
BUILD = "give a folder that export/build.py wrote; it builds one with  python export/build.py CHECKPOINT --out FOLDER"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def fingerprint(self) -> str:
        """What all of it hashes to: the manifest, which has every file's hash."""
        return (self.path / CHECKSUM).read_text()

    def embedding(self) -> np.ndarray | Table:
        """Token embedding table, memory-mapped: `table[ids]` are rows of [vocab_size, hidden_size]."""
        table = self.manifest.model.embedding
        file, (rows, width) = self.file(WEIGHTS), table.shape
        if not table.group:
            return np.memmap(file, table.dtype, "r", table.offset, (rows, width))
        codes = np.memmap(file, np.uint8, "r", table.offset, (rows, table.blocks, table.group))
        scales = np.memmap(file, np.float32, "r", table.scales, (rows, table.blocks))
        return Table(codes, scales, 8, width)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(MIB):
            digest.update(block)
    return digest.hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Hash every file of `folder`, then write the manifest and its checksum into it."""
    names = [name for name in _files(folder) if name not in (MANIFEST, CHECKSUM)]
    files = {name: File(sha256(folder / name), (folder / name).stat().st_size) for name in names}
    manifest = dataclasses.replace(manifest, files=files, version=manifest.needs)
    manifest.check()
    text = json.dumps(manifest.as_data(), indent=1).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / CHECKSUM).write_text(hashlib.sha256(text).hexdigest())
    return manifest


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block ends well, and vanishes when it does not.

    Raises:
        UserError: `out` exists and is not a bundle, so replacing it could lose something; it lies in another bundle; or
            the disk is full.
    """
    try:
        out = Path(out).resolve()
        check_outside(out)
        if out.exists() and (reason := _irreplaceable(out)):
            raise UserError(f"{out} exists and {reason}: choose another --out or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({without_names(error)}): choose another --out") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        _replace(temporary, out)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(f"no space left to write {out}: free some or choose another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _irreplaceable(out: Path) -> str:
    """Why removing `out` could lose something: it is no empty folder, and not only a bundle, be it damaged."""
    if not out.is_dir():
        return "is not a bundle"
    if not any(out.iterdir()):
        return ""
    if not (known := _known(out)):
        return "is not a bundle"
    folders = {parent.as_posix() for name in known for parent in PurePosixPath(name).parents}
    strange = sorted({p.relative_to(out).as_posix() for p in out.rglob("*")} - known - folders)
    return f"holds {strange[0]}, which no build has put there" if strange else ""


def _known(folder: Path) -> set[str]:
    """A bundle's files as it names them itself, be it damaged; none where the folder is no bundle."""
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
        return {MANIFEST, CHECKSUM, *data["files"]} if data["format"] == FORMAT else set()
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return set()


def check_outside(path: Path, *read: Path) -> None:
    """Refuse a place to write to that lies in a bundle, or in a folder that is read.

    Raises:
        UserError: which it lies in.
    """
    target = path.resolve()
    for folder in read:
        if folder.resolve() in target.parents:
            raise UserError(f"{path} lies in {folder}, which is read: choose a place outside of it")
    for folder in target.parents:
        if _known(folder):
            raise UserError(f"{path} lies in the bundle {folder}: choose a place outside of it")


def _replace(new: Path, out: Path) -> None:
    """Rename `new` to `out`; an old bundle there is moved away first, removed last, and put back if that fails."""
    if not out.exists():
        os.rename(new, out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    try:
        os.rename(out, old / out.name)
        os.rename(new, out)
    finally:  # whatever ended it, also an interrupt between the two
        if not out.exists():
            os.rename(old / out.name, out)
        shutil.rmtree(old, ignore_errors=True)


def read(path: str | Path) -> Bundle:
    """Open a bundle and check it: manifest, format, and the hash of every file.

    Raises:
        UserError: not a bundle, another version's, or any byte of it changed.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"a bundle's folder must be a path, got {path!r}")
    path = Path(path)
    try:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: {BUILD}")
        if not (path / MANIFEST).is_file() or not (path / CHECKSUM).is_file():
            raise UserError(f"{path} is not a bundle (no {MANIFEST} with {CHECKSUM}): {BUILD}")
        return Bundle(path, _checked(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def rebuild(path: Path) -> str:
    return f"build it again from its checkpoint:  python export/build.py CHECKPOINT --out {path}"


def _damaged(what: str, path: Path) -> UserError:
    return UserError(f"{what}: copy the bundle again, or {rebuild(path)}")  # a device can only copy it


def _checked(path: Path) -> Manifest:
    text = _own(path, MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest().encode() != _own(path, CHECKSUM).read_bytes():
        raise _damaged(f"{path / MANIFEST} is damaged", path)
    data = parse_json(text, str(path / MANIFEST))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path} is no {FORMAT} bundle: {BUILD}")
    if (version := data.get("version")) not in range(WITHOUT_VIDEOS, VERSION + 1):
        newer = "update this program, or " * (type(version) is int and version > VERSION)
        known = f"and this program reads {WITHOUT_VIDEOS} to {VERSION}"
        raise UserError(f"{path} is a bundle of version {version}, {known}: {newer}{rebuild(path)}")
    manifest = parse(Manifest, data, str(path / MANIFEST))
    try:
        manifest.check()
    except ValueError as error:
        raise UserError(f"{path / MANIFEST}: {error}: {rebuild(path)}") from error
    for name, file in manifest.files.items():
        target = _own(path, name)
        if target.stat().st_size != file.bytes or sha256(target) != file.sha256:
            raise _damaged(f"{target} is damaged", path)
    return manifest


def _own(path: Path, name: str) -> Path:
    """A file that is in the bundle."""
    target = path / name
    if not target.is_file():
        raise _damaged(f"{target} is missing", path)
    if not target.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{target} is a link out of the bundle: put the file itself there")
    return target
