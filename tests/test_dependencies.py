"""Who may import whom (DESIGN.md, section 1), read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"calibration", "engines", "export", "runtime", "scripts", "tests"}
TRT = {"tensorrt", "tensorrt_rtx"}

MAY_IMPORT = {
    "runtime": {"engines", "numpy", "PIL", "tokenizers", "jinja2", "triton_python_backend_utils"},
    "engines": {"numpy", "cuda", "onnx", "onnxruntime", *TRT},
    "export": {
        "engines",
        "numpy",
        "torch",
        "transformers",
        "packaging",
        "onnx",
        "onnx_ir",
        "onnxscript",
        "onnxruntime",
        "safetensors",
        "rich",
        "PIL",
    },
    "calibration": {
        "export",
        "engines",
        "numpy",
        "torch",
        "transformers",
        "safetensors",
        "rich",
        "PIL",
        "jinja2",
        "matplotlib",
        "easy_vqa",
        "tomli_w",
    },
}
# The server is a package of its own within the runtime: only it needs the extra `serve`.
SERVER = ROOT / "runtime" / "server"
SERVE = {"fastapi", "h11", "idna", "starlette", "pydantic", "uvicorn", "prometheus_client"}
TOP = ROOT / "export" / "build.py"  # the user's entry may import everything but the runtime
LAZY = {
    "calibration": {"easy_vqa", "jinja2", "matplotlib", "tomli_w"},
    "engines": {"cuda", "onnx", "onnxruntime", *TRT},
    "runtime": {"PIL", "tokenizers", "jinja2"},
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path, at_import: bool = False) -> Iterator[str]:
    """Top-level names of what a module imports; `at_import` leaves out functions and TYPE_CHECKING blocks."""

    def walk(node: ast.AST) -> Iterator[str]:
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield path.relative_to(ROOT).parts[0] if node.level else (node.module or "").partition(".")[0]
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")))


def test_finds_imports_everywhere(tmp_path: Path) -> None:
    """The check itself: nested, conditional and dotted imports are seen."""
    module = tmp_path / "x.py"
    module.write_text("import a.b as c\nif 1:\n    from d.e import f\ndef g():\n    import h\nclass I:\n    import j\n")
    assert sorted(imports(module)) == ["a", "d", "h", "j"]
    assert sorted(imports(module, at_import=True)) == ["a", "d", "j"]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_only_what_it_may(package: str) -> None:
    wrong = []
    for path in sources(package):
        allowed = MAY_IMPORT[package] | {package}
        if path == TOP:
            allowed |= {"calibration", "jinja2"}
        if path.is_relative_to(SERVER):
            allowed |= SERVE
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}"
            for name in imports(path)
            if name not in allowed and name not in sys.stdlib_module_names
        ]
    assert wrong == []


@pytest.mark.parametrize("package", ["export", "calibration"])
def test_nobody_imports_the_entry(package: str) -> None:
    for path in sources(package):
        text = path.read_text(encoding="utf-8")
        assert path == TOP or not any(name in text for name in ("export.build", "from export import build"))


@pytest.mark.parametrize("package", LAZY)
def test_optional_packages_are_imported_where_used(package: str) -> None:
    """A backend that is not installed must not keep the others from running, nor slow them down."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path, at_import=True)
        if name in LAZY[package]
    ]
    assert wrong == []


def test_the_runtime_knows_of_its_server_only_the_command() -> None:
    """Which imports nothing that the extra `serve` brings before it is called."""
    for path in sources("runtime"):
        if not path.is_relative_to(SERVER):
            text = path.read_text(encoding="utf-8")
            assert text.count("runtime.server") == (path.name == "__main__.py"), path
    assert set(imports(SERVER / "command.py", at_import=True)) & (SERVE | {"runtime", "numpy"}) == set()
    assert list(imports(SERVER / "__init__.py")) == []


STAGES = ROOT / "export" / "stages"


@pytest.mark.parametrize("path", sorted(STAGES.rglob("*.py")), ids=lambda path: str(path.relative_to(STAGES)))
def test_a_stage_is_one_short_file_and_knows_no_other_slots_methods(path: Path) -> None:
    """Of another slot it may import the interface, `slot/slot.py`, and what the slot's folder offers by itself."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 200
    own = path.relative_to(STAGES).parts[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("export.stages."):
            slot, *module = (node.module or "").split(".")[2:]
            assert slot == own or module in ([], [slot]), f"{path.name} imports {node.module}"
            assert not [name.name for name in node.names if name.name.startswith("_")]


def test_scripts_and_tests_are_imported_by_nobody() -> None:
    for package in MAY_IMPORT:
        for path in sources(package):
            assert not {"scripts", "tests"} & set(imports(path)), path


def test_no_module_of_export_hides_another() -> None:
    """`python export/build.py` puts export/ first on sys.path: a module `queue.py` there would break everything."""
    taken = set(sys.stdlib_module_names) | set(packages_distributions()) | OURS
    names = {path.stem for path in (ROOT / "export").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {"torch", "onnx", "numpy", "queue"} <= taken
    assert (names - {"__init__", "__pycache__"}) & taken == set()


def test_every_source_folder_is_covered() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(MAY_IMPORT)
    for package in MAY_IMPORT.keys() & packages:
        assert sources(package)
