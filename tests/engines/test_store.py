"""Native code is loaded from this machine's store only: compiled here, or trusted by a person."""

from __future__ import annotations

import _ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import bundle as bundles
from engines.bundle import Bundle, Library, writing
from engines.errors import UserError
from engines.plugins import __main__ as command
from engines.plugins import cpu_library, cuda_library, store
from tests.engines import small_bundle


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compilers that write what they were asked for, and a list of their runs."""
    runs: list[str] = []

    def cpu(out: Path) -> list[str]:
        runs.append("cpu")
        out.write_bytes(b"native code")
        return ["avx2", "plain"]

    def cuda(out: Path, architectures: list[str]) -> None:
        runs.append(f"cuda {' '.join(architectures)}")
        out.write_bytes(b"code for GPUs")

    monkeypatch.setattr(cpu_library, "build", cpu)
    monkeypatch.setattr(cuda_library, "build", cuda)
    return runs


def failing(*_: object) -> list[str]:
    raise UserError("no compiler: install one")


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Bundle]:
    """A bundle that ships a library, for this platform or another one."""

    def write(platform: str | None = None, ships: bool = True) -> Bundle:
        library = Library(cpu_library.NAME, platform or store.platform(), ["plain"], store.OPERATORS)
        with writing(tmp_path / "bundle") as out:
            small_bundle.fill(out)
            (out / cpu_library.NAME).write_bytes(Path(_ctypes.__file__).read_bytes())  # any library that loads
            bundles.seal(out, dataclasses.replace(small_bundle.manifest(), libraries=[library] if ships else []))
        return bundles.read(tmp_path / "bundle")

    return write


def test_a_library_is_compiled_once(compiled: list[str]) -> None:
    first, second = store.cpu(), store.cpu()
    assert compiled == ["cpu"]
    assert first == second
    assert first.architectures == ["avx2", "plain"]
    assert first.path.read_bytes() == b"native code"
    described = first.described()
    assert (described.platform, described.operators) == (store.platform(), ["QuantKVAttention", "TopKGather"])


def test_other_sources_or_architectures_are_another_library(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "x.cu"
    source.write_text("1")
    monkeypatch.setattr(cuda_library, "sources", lambda: [source])
    first = store.cuda(["sm_87"])
    other = store.cuda(["sm_90"])
    source.write_text("2")
    changed = store.cuda(["sm_87"])
    assert len({first.path, other.path, changed.path}) == 3
    assert compiled == ["cuda sm_87", "cuda sm_90", "cuda sm_87"]


@pytest.mark.parametrize("damage", [b"", b"native cod"])
def test_a_damaged_library_is_compiled_again(compiled: list[str], opened: Callable[..., Bundle], damage: bytes) -> None:
    """Loading one that is cut off ends the process with a bus error."""
    path = store.cpu().path
    path.write_bytes(damage)
    assert store.for_onnxruntime(opened(ships=False))[0] is None
    assert store.cpu().path.read_bytes() == b"native code"
    assert compiled == ["cpu", "cpu"]


def test_a_compiler_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "build", failing)
    with pytest.raises(UserError, match="no compiler"):
        store.cpu()
    assert [*folder.iterdir()] == []


def test_what_was_compiled_here_is_loaded(compiled: list[str], opened: Callable[..., Bundle]) -> None:
    bundle = opened()
    built = store.cpu()
    assert store.for_onnxruntime(bundle) == (built.path, "kernels compiled here")
    assert store.for_onnxruntime(opened(ships=False))[0] == built.path


def test_a_bundles_library_is_loaded_only_once_it_is_trusted(opened: Callable[..., Bundle]) -> None:
    bundle = opened()
    path, why = store.for_onnxruntime(bundle)
    assert path is None
    assert f"python -m engines.plugins trust {bundle.path}" in why
    assert store.trust(bundle) == [store.for_onnxruntime(bundle)[0]]
    path, why = store.for_onnxruntime(bundle)
    assert path is not None
    assert not path.is_relative_to(bundle.path)
    assert path.read_bytes() == (bundle.path / cpu_library.NAME).read_bytes()


def test_trust_is_for_those_bytes_only(tmp_path: Path, opened: Callable[..., Bundle]) -> None:
    store.trust(opened())
    with writing(tmp_path / "bundle") as out:
        small_bundle.fill(out)
        (out / cpu_library.NAME).write_bytes(b"other code")
        library = Library(cpu_library.NAME, store.platform(), ["plain"], store.OPERATORS)
        bundles.seal(out, dataclasses.replace(small_bundle.manifest(), libraries=[library]))
    assert store.for_onnxruntime(bundles.read(tmp_path / "bundle"))[0] is None


def test_a_library_that_does_not_load_here_is_not_trusted(tmp_path: Path, folder: Path) -> None:
    with writing(tmp_path / "bundle") as out:
        small_bundle.fill(out)
        (out / cpu_library.NAME).write_bytes(b"of a later system")
        library = Library(cpu_library.NAME, store.platform(), ["plain"], store.OPERATORS)
        bundles.seal(out, dataclasses.replace(small_bundle.manifest(), libraries=[library]))
    with pytest.raises(UserError, match=r"does not load here .*: compile your own"):
        store.trust(bundles.read(tmp_path / "bundle"))
    assert [*folder.iterdir()] == []


def test_a_library_that_changes_after_the_check_is_not_trusted(opened: Callable[..., Bundle]) -> None:
    bundle = opened()
    (bundle.path / cpu_library.NAME).write_bytes(b"another")
    with pytest.raises(UserError, match="has changed since it was checked"):
        store.trust(bundle)


@pytest.mark.parametrize("name", ["weights.bin", "sub/libunicache_ort.so", "../libunicache_ort.so", "note.json"])
def test_a_manifest_names_libraries_only(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a library"):
        Library(name, store.platform(), ["plain"], store.OPERATORS)


def test_other_flags_are_another_library(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = tmp_path / "cpu_library.py"
    flags.write_text("-O2")
    monkeypatch.setattr(store, "CPU_BUILD", flags)
    first = store.cpu()
    flags.write_text("-O3")
    assert store.cpu().path != first.path


def test_a_process_that_was_quicker_is_no_error(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build = cpu_library.build

    def slow(out: Path) -> list[str]:
        monkeypatch.setattr(cpu_library, "build", build)
        store.cpu()
        return build(out)

    monkeypatch.setattr(cpu_library, "build", slow)
    assert store.cpu().path.read_bytes() == b"native code"
    assert compiled == ["cpu", "cpu"]


def test_a_store_that_cannot_be_written_is_one_line(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "file" / "store"))
    assert command.main(["build", "--only", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert f"name another folder by {store.FOLDER}" in error
    assert error.count("\n") == 1


def test_without_a_home_there_is_no_library(opened: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.FOLDER)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without an entry
    bundle = opened()
    assert store.for_onnxruntime(bundle)[0] is None
    with pytest.raises(UserError, match="no home folder"):
        store.trust(bundle)


@pytest.mark.parametrize(("platform", "ships", "why"), [("os9-ppc", True, "os9-ppc"), (None, False, "no kernels")])
def test_without_a_library_for_this_machine_it_says_why(
    opened: Callable[..., Bundle], platform: str | None, ships: bool, why: str
) -> None:
    bundle = opened(platform, ships)
    path, reason = store.for_onnxruntime(bundle)
    assert path is None
    assert why in reason
    assert "python -m engines.plugins build" in reason
    with pytest.raises(UserError, match="no libraries for"):
        store.trust(bundle)


def test_a_manifest_cannot_name_a_library_without_a_hash(opened: Callable[..., Bundle]) -> None:
    bundle = opened()
    files = {name: file for name, file in bundle.manifest.files.items() if name != cpu_library.NAME}
    with pytest.raises(ValueError, match="has no hash"):
        dataclasses.replace(bundle.manifest, files=files).check()


def test_architectures_ascend_and_are_named_once(compiled: list[str]) -> None:
    assert command.main(["build", "--only", "cuda", "--arch", "90", "80", "sm_90", "100"]) == 0
    assert compiled == ["cuda sm_80 sm_90 sm_100"]


def test_build_goes_on_without_nvcc(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_library, "build", failing)
    assert command.main(["build", "--out", str(tmp_path / "out")]) == 0
    assert "skipped: no compiler: install one" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == [cpu_library.NAME]


def test_libraries_are_not_put_into_a_bundle(
    compiled: list[str], opened: Callable[..., Bundle], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = opened()
    assert command.main(["build", "--out", str(bundle.path)]) == 2
    assert f"lies in the bundle {bundle.path}: choose a place outside" in capsys.readouterr().err
    assert compiled == []


@pytest.mark.parametrize("arguments", [["--arch", "87"], ["--only", "cuda"]])
def test_build_fails_where_the_gpu_was_asked_for(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(cuda_library, "build", failing)
    assert command.main(["build", *arguments]) == 2
    assert capsys.readouterr().err == "error: no compiler: install one\n"


@pytest.mark.parametrize("text", ["87", "sm_87", "8.7"])
def test_an_architecture_is_named_in_any_usual_way(compiled: list[str], text: str) -> None:
    assert command.main(["build", "--only", "cuda", "--arch", text]) == 0
    assert compiled == ["cuda sm_87"]


@pytest.mark.parametrize(
    "arguments",
    [["build", "--arch", "orin"], ["build", "--arch", "87", "--only", "cpu"], ["trust", "nowhere"], []],
)
def test_mistakes_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_trust_and_list(opened: Callable[..., Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trust", str(opened().path)]) == 0
    trusted = capsys.readouterr().out.strip()
    assert command.main(["list"]) == 0
    assert trusted in capsys.readouterr().out
