"""Libraries of kernels on this machine: compiled here once, or taken over from a bundle on purpose.

A bundle ships its libraries, and opening a bundle must execute nothing that lies in it. So code is loaded from this
store only: what was compiled here from this package's own sources, and what a person has said to trust
(`python -m engines.plugins trust BUNDLE`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import Library
from engines.bundle import Bundle, sha256
from engines.errors import UserError, one_line
from engines.plugins import cpu_library, cuda_library

FOLDER = "UNICACHE_LIBRARIES"  # environment variable: where the store lies
OPERATORS = ["QuantKVAttention", "TopKGather"]
A_DAY = 86400.0
CPU_BUILD, CUDA_BUILD = Path(cpu_library.__file__), Path(cuda_library.__file__)


def folder() -> Path:
    """Where the store lies, be it there or not."""
    if chosen := os.environ.get(FOLDER):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "unicache-edge"


def platform() -> str:
    """Of libraries that run here, for example `linux-x86_64`."""
    return sysconfig.get_platform()


@dataclass(frozen=True)
class Stored:
    """A library in the store: a folder of its own, with a note of its hash and of what it was compiled for."""

    path: Path
    architectures: list[str]

    def described(self) -> Library:
        """As the manifest of a bundle that ships it tells."""
        return Library(self.path.name, platform(), self.architectures, OPERATORS)


def cpu() -> Stored:
    """The library for ONNX Runtime, compiled now if it is not there yet.

    Raises:
        UserError: there is no C++ compiler, or it refuses; or the store cannot be written.
    """
    return _compiled(cpu_library.NAME, _cpu_key(), cpu_library.build)


def cuda(architectures: Sequence[str] = cuda_library.ARCHITECTURES) -> Stored:
    """The library of TensorRT plugins, compiled now if it is not there yet.

    Raises:
        UserError: nvcc or TensorRT's headers are missing, or the compiler refuses; or the store cannot be written.
    """

    def build(out: Path) -> list[str]:
        cuda_library.build(out, architectures)
        return [*architectures]

    return _compiled(cuda_library.NAME, _cuda_key(architectures), build)


def _compiled(name: str, key: str, build: Callable[[Path], list[str]]) -> Stored:
    return _find(name, key) or _put(name, key, build)


def _cpu_key() -> str:
    return _key([*cpu_library.sources(), CPU_BUILD], ())


def _cuda_key(architectures: Sequence[str]) -> str:
    return _key([*cuda_library.sources(), CUDA_BUILD], architectures)


def _key(sources: Sequence[Path], options: Sequence[str]) -> str:
    """Of a library of these sources, the modules that compile them among them: flags change what is compiled."""
    known = hashlib.sha256(repr((platform(), *options)).encode())
    for source in sorted(sources):
        known.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return known.hexdigest()


def _find(name: str, key: str) -> Stored | None:
    """A library as it was put there, or None: loading one that is cut off would end the process."""
    place = folder() / key[:16]
    try:
        note = json.loads((place / "note.json").read_bytes())
        found = Stored(place / name, [*map(str, note["architectures"])])
        return found if note["sha256"] == sha256(found.path) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _put(name: str, key: str, make: Callable[[Path], list[str]]) -> Stored:
    """`make` writes the library to a path and returns its architectures."""
    place = folder() / key[:16]
    if place.parts[0] == "~":  # whoever runs this has none, and that is no name of a folder
        raise UserError(f"there is no home folder to keep libraries in: name one by {FOLDER}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(".new.*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > A_DAY:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".new.", dir=place.parent) as temporary:
            new = Path(temporary, "library")
            new.mkdir()
            architectures = make(new / name)
            (new / "note.json").write_text(json.dumps({"architectures": architectures, "sha256": sha256(new / name)}))
            if place.exists() and not _find(name, key):
                os.rename(place, Path(temporary, "damaged"))
            try:
                os.rename(new, place)
            except OSError:
                if not _find(name, key):  # else another process was quicker
                    raise
    except OSError as error:
        advice = f"free some space, or name another folder by {FOLDER}"
        raise UserError(f"{place.parent} cannot hold libraries ({one_line(error)}): {advice}") from error
    return Stored(place / name, architectures)


def for_onnxruntime(bundle: Bundle) -> tuple[Path | None, str]:
    """The library to load beside a bundle's ONNX graphs, and which it is; or None, and why there is none."""
    if local := _find(cpu_library.NAME, _cpu_key()):
        return local.path, "kernels compiled here"
    build = "compile your own with  python -m engines.plugins build"
    shipped = {library.file: library for library in bundle.manifest.libraries}.get(cpu_library.NAME)
    if shipped is None:
        return None, f"no kernels: {build}"
    if shipped.platform != platform():
        return None, f"the bundle's kernels are for {shipped.platform}, this is {platform()}: {build}"
    if trusted := _find(shipped.file, bundle.manifest.files[shipped.file].sha256):
        return trusted.path, "the bundle's kernels, trusted here"
    return None, f"the bundle's kernels are not trusted yet: python -m engines.plugins trust {bundle.path}, or {build}"


def for_tensorrt(bundle: Bundle, capability: str) -> Path:
    """The plugins of a bundle's plans: the bundle's own where they are trusted, or what was compiled here.

    Args:
        capability: of the GPU, for example `sm_87`.

    Raises:
        UserError: there are none for it, and where to get them.
    """
    shipped = {library.file: library for library in bundle.manifest.libraries}.get(cuda_library.NAME)
    found = _find(shipped.file, bundle.manifest.files[shipped.file].sha256) if shipped else None
    for architectures in ([capability], cuda_library.ARCHITECTURES):
        if found is None:
            found = _find(cuda_library.NAME, _cuda_key(architectures))
    if found is not None and capability in found.architectures:
        return found.path
    build = f"compile them with  python -m engines.plugins build --arch {capability.removeprefix('sm_')}"
    if shipped and shipped.platform == platform() and capability in shipped.architectures:
        build = f"trust the bundle's with  python -m engines.plugins trust {bundle.path}  or {build}"
    raise UserError(f"its plans need the operators' plugins for {capability}, which are not here: {build}")


def trust(bundle: Bundle) -> list[Path]:
    """Take over a bundle's libraries for this platform.

    Raises:
        UserError: it has none.
    """
    mine = [library for library in bundle.manifest.libraries if library.platform == platform()]
    if not mine:
        others = ", ".join(sorted({library.platform for library in bundle.manifest.libraries}))
        raise UserError(f"{bundle.path} has no libraries for {platform()}, only for {others or 'none'}")

    def copy(library: Library) -> Callable[[Path], list[str]]:
        def make(out: Path) -> list[str]:
            shutil.copyfile(bundle.file(library.file), out)
            if sha256(out) != bundle.manifest.files[library.file].sha256:
                raise UserError(f"{bundle.file(library.file)} has changed since it was checked: try again")
            try:
                ctypes.CDLL(str(out.resolve()))
            except OSError as error:
                advice = "compile your own with  python -m engines.plugins build"
                raise UserError(f"{library.file} does not load here ({one_line(error)}): {advice}") from error
            return library.architectures

        return make

    return [_put(each.file, bundle.manifest.files[each.file].sha256, copy(each)).path for each in mine]


def stored() -> list[Stored]:
    """Every library that is here."""
    places = sorted(path for path in folder().glob("*/*.so"))
    return [found for path in places if (found := _find(path.name, path.parent.name))]
