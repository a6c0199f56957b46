"""The bundle: a folder with all that a device needs, written atomically, opened with every hash checked.

    manifest.json      what is in it (the dataclasses below) and the sha256 of every other file
    manifest.sha256    sha256 of manifest.json
    *.onnx             static-shape graphs, their weights in one shared file
    weights.bin        external data of all graphs and the token embedding table
    *.plan             TensorRT plans, if built
    tokenizer.json, preprocessor.json, chat_template.jinja

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
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from engines.config import parse, parse_json
from engines.errors import UserError, one_line

FORMAT = "unicache-edge"
VERSION = 1
MANIFEST, CHECKSUM, WEIGHTS = "manifest.json", "manifest.sha256", "weights.bin"
REBUILD = "build it again with  python export/build.py"
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype and static shape of a graph's input or output."""

    name: str
    dtype: str
    shape: list[int]

    def __post_init__(self) -> None:
        _check_tensor(f"tensor {self.name}", self.dtype, self.shape, DTYPES)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Graph:
    """One static-shape ONNX graph of the bundle."""

    kind: Literal["vision", "prefill", "decode", "compact"]
    file: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan of one graph."""

    graph: str
    file: str
    backend: str
    version: str
    compute_capabilities: list[str]


@dataclass(frozen=True)
class Bucket:
    """Graphs and sizes for prompts of up to `length` tokens (after visual-token pruning).

    Attributes:
        length: S, prompts are left-padded to it.
        capacities: slots per KV head of each layer's store, C_l.
        window: W, tokens kept in full precision.
        recent: r, tokens that stay in the window when it is compacted.
        prefill, decode, compact: names of the graphs; `compact` is empty when nothing is ever compacted.
    """

    length: int
    capacities: list[int]
    window: int
    recent: int
    prefill: str
    decode: str
    compact: str

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= self.window or self.length < 1:
            raise ValueError(f"needs a length and 0 <= recent <= window, got {self}")
        if self.compact and self.recent == self.window:
            raise ValueError(f"compacting must free slots: recent and window are both {self.window}")


@dataclass(frozen=True)
class Level:
    """One compression level: a recipe made static.

    Attributes:
        recipe: the recipe's settings, as read from its TOML file.
        visual_tokens: tokens kept of every image.
        vision: name of the vision graph.
        buckets: shortest first.
    """

    recipe: dict[str, Any]
    visual_tokens: int
    vision: str
    buckets: list[Bucket]


@dataclass(frozen=True)
class Embedding:
    """Where the token embedding table lies in `weights.bin`; [vocab_size, hidden_size]."""

    offset: int
    dtype: str
    shape: list[int]

    def __post_init__(self) -> None:
        _check_tensor("embedding", self.dtype, self.shape, ("float32", "float16"))
        if self.offset < 0 or len(self.shape) != 2:
            raise ValueError(f"embedding must have an offset and two dimensions, got {self}")

    @property
    def end(self) -> int:
        """Offset of the first byte behind the table."""
        return self.offset + int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Model:
    """What the runtime must know of the model."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    image_token_id: int
    image_tokens: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    embedding: Embedding

    def kv_bytes(self, tokens: int, dtype: str = "float16") -> int:
        """Bytes of an uncompressed KV cache of `tokens` tokens."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * np.dtype(dtype).itemsize
        return tokens * per_token


@dataclass(frozen=True)
class File:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The whole description of a bundle.

    Attributes:
        levels: name -> level, lightest first.
        default_level: used when the caller names none.
        graphs: name -> graph.
        plans: TensorRT plans, one a graph and backend.
        backends: backend -> note of the build (version, what was built, why not).
        tools: versions of the packages that built it.
        files: every file but the manifest, with its hash; filled in when the bundle is sealed.
    """

    model: Model
    levels: dict[str, Level]
    default_level: str
    graphs: dict[str, Graph]
    plans: list[Plan] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    def check(self) -> None:
        """Every name must lead somewhere, and every file that is opened must have its hash.

        Raises:
            ValueError: one does not.
        """
        if self.default_level not in self.levels:
            raise ValueError(f"default level {self.default_level!r} is none of {', '.join(self.levels)}")
        for name, level in self.levels.items():
            if not level.buckets:
                raise ValueError(f"level {name!r} has no buckets")
            self._check_graph(level.vision, "vision")
            for bucket in level.buckets:
                self._check_graph(bucket.prefill, "prefill")
                self._check_graph(bucket.decode, "decode")
                if bucket.compact:
                    self._check_graph(bucket.compact, "compact")
                if len(bucket.capacities) != self.model.num_layers:
                    raise ValueError(f"level {name!r} gives {len(bucket.capacities)} layers of {self.model.num_layers}")
        for plan in self.plans:
            if plan.graph not in self.graphs:
                raise ValueError(f"plan {plan.file!r} is of an unknown graph {plan.graph!r}")
        for name in self.files:
            if not _is_inside(name):
                raise ValueError(f"file name {name!r} leads out of the bundle")
        for name in (*(graph.file for graph in self.graphs.values()), *(plan.file for plan in self.plans), WEIGHTS):
            if name not in self.files:
                raise ValueError(f"file {name!r} has no hash")
        if self.model.embedding.end > self.files[WEIGHTS].bytes:
            raise ValueError(f"the embedding table ends at {self.model.embedding.end}, behind the end of {WEIGHTS}")

    def _check_graph(self, name: str, kind: str) -> None:
        if name not in self.graphs or self.graphs[name].kind != kind:
            raise ValueError(f"no {kind} graph of the name {name!r}")


def _check_tensor(what: str, dtype: str, shape: list[int], dtypes: tuple[str, ...]) -> None:
    if dtype not in dtypes:
        raise ValueError(f"{what} has dtype {dtype!r}, which is none of {', '.join(dtypes)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"{what} has a negative dimension: {shape}")


def _is_inside(name: str) -> bool:
    """Whether a manifest's file name is a relative path that stays in the folder, on every system."""
    path = PurePosixPath(name)
    strange = any(c in name for c in "\\:\0")  # separators and drives of other systems
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not strange


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        return self.path / name

    def embedding(self) -> np.ndarray:
        """Token embedding table, memory-mapped, [vocab_size, hidden_size]."""
        table = self.manifest.model.embedding
        return np.memmap(self.file(WEIGHTS), table.dtype, "r", table.offset, tuple(table.shape))


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Hash every file of `folder`, then write the manifest and its checksum into it."""
    names = [name for name in _files(folder) if name not in (MANIFEST, CHECKSUM)]
    files = {name: File(sha256(folder / name), (folder / name).stat().st_size) for name in names}
    manifest = dataclasses.replace(manifest, files=files)
    manifest.check()
    text = json.dumps(dataclasses.asdict(manifest), indent=1).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / CHECKSUM).write_text(hashlib.sha256(text).hexdigest())
    return manifest


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block ends well, and vanishes when it does not.

    Raises:
        UserError: `out` exists and is not a bundle, so replacing it could lose something; or the disk is full.
    """
    out = Path(out).resolve()
    if out.exists() and not _replaceable(out):
        raise UserError(f"{out} exists and is not a bundle: choose another --out or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({one_line(error)}): choose another --out") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        _replace(temporary, out)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"no space left to write {out}: free some or choose another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replaceable(out: Path) -> bool:
    """An empty folder, or a bundle, be it damaged; not anything else that happens to hold a manifest.json."""
    if not out.is_dir():
        return False
    if not any(out.iterdir()) or (out / CHECKSUM).is_file():
        return True
    return (out / MANIFEST).is_file() and FORMAT.encode() in (out / MANIFEST).read_bytes()


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


def read(path: Path) -> Bundle:
    """Open a bundle and check it: manifest, format, and the hash of every file.

    Raises:
        UserError: not a bundle, another version's, or any byte of it changed.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: give the folder that export/build.py wrote")
        if not (path / MANIFEST).is_file() or not (path / CHECKSUM).is_file():
            raise UserError(f"{path} is not a bundle (no {MANIFEST} with {CHECKSUM}): {REBUILD} --out {path}")
        return Bundle(path, _checked(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def _checked(path: Path) -> Manifest:
    text = (path / MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest().encode() != (path / CHECKSUM).read_bytes():
        raise UserError(f"{path / MANIFEST} is damaged: {REBUILD} --out {path}")
    data = parse_json(text, str(path / MANIFEST))
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UserError(f"{path} is no {FORMAT} bundle of version {VERSION}: {REBUILD} --out {path}")
    manifest = parse(Manifest, data, str(path / MANIFEST))
    try:
        manifest.check()
    except ValueError as error:
        raise UserError(f"{path / MANIFEST}: {error}: {REBUILD} --out {path}") from error
    for name, file in manifest.files.items():
        target = path / name
        if not target.is_file():
            raise UserError(f"{target} is missing: {REBUILD} --out {path}")
        if not target.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{target} is a link out of the bundle: put the file itself there")
        if target.stat().st_size != file.bytes or sha256(target) != file.sha256:
            raise UserError(f"{target} is damaged: {REBUILD} --out {path}")
    return manifest
