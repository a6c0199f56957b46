"""Which backend is chosen and what is said of the others; a plan that does not fit is one line, with what to type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runtime
from engines import bundle as bundles
from engines import cuda, ort, trt
from engines.bundle import Bundle, Library
from engines.errors import UserError, command
from engines.ort import OrtSession
from engines.plugins import cuda_library, store
from runtime import backends
from runtime.__main__ import main
from tests.engines import cuda_standin
from tests.engines.cuda_standin import Cuda


@pytest.fixture
def planned(bundle_path: Path, tmp_path: Path) -> Bundle:
    """The toy bundle, with plans of TensorRT 10.3.0 for sm_87."""
    return bundles.read(cuda_standin.with_plans(bundle_path, tmp_path / "bundle"))


def changed(bundle: Bundle, change: Callable[[bundles.Plan], bundles.Plan], libraries: list[Library] = []) -> Bundle:  # noqa: B006
    """The same with other plans, sealed."""
    plans = [change(plan) for plan in bundle.manifest.plans]
    manifest = dataclasses.replace(bundle.manifest, plans=plans, libraries=libraries)
    return Bundle(bundle.path, bundles.seal(bundle.path, manifest))


def test_float32_is_mapped_where_that_takes_little_time(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundles.read(bundle_path)

    def kinds(dtype: Any, library: Path | None = None) -> set[str]:
        """Of graphs that read the mapped weights; with a library only those whose products it computes."""
        weights = dataclasses.replace(bundle.manifest.weights, dtype=dtype)
        known = dataclasses.replace(bundle.manifest, weights=weights)
        opened: dict[str, bool] = {}

        def opens(
            path: Path, threads: int, own: Any, wanted: Any, arena: bool, mapped: bool, few_rows: bool
        ) -> OrtSession:
            assert mapped or not few_rows
            opened[path.name] = few_rows if library else mapped
            return OrtSession(path, threads)

        monkeypatch.setattr(ort, "load", opens)
        for name in known.graphs:
            backends.load(Bundle(bundle.path, known), name, 1, library)
        return {graph.kind for graph in known.graphs.values() if opened[graph.file]}

    library = Path("kernels")
    assert kinds("float32") == kinds("float32", library) == set()  # the toy's weights are small
    monkeypatch.setattr(backends, "LARGE", 1000)
    assert kinds("float32") == {"decode"}  # and its prompts short
    assert kinds("float32", library) == {"decode", "extend"}  # which reads eight tokens at a time
    assert kinds("int8", library) == set()
    assert kinds("float16") == kinds("int8") == kinds("int4") == set()
    monkeypatch.setattr(backends, "MANY", 1)
    assert kinds("float32") == {"prefill", "extend", "decode"}


def test_auto_takes_plans_where_they_run(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    choice = backends.choose("auto", planned)
    assert choice == backends.Choice("trt", f"TensorRT 10.3.0, {len(planned.manifest.plans)} plans for sm_87")
    assert backends.choose("ort", planned).name == "ort"
    vlm = runtime.open(planned.path)
    assert (vlm.backend, vlm.why) == ("trt", choice.reason)


def test_auto_tells_why_not_the_others(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = backends.choose("auto", planned)
    assert choice.name == "ort"
    assert choice.reason.startswith("onnxruntime ")
    assert choice.reason.endswith("; not trt nor trt-rtx: no NVIDIA GPU here, and plans run on one only")
    monkeypatch.setattr(trt, "gpu", lambda: "sm_90")
    reason = backends.choose("auto", planned).reason
    assert "; not trt: backend trt needs TensorRT, which is not installed: " in reason
    assert "; not trt-rtx: the bundle has no plans for trt-rtx: rebuild" in reason


def test_without_a_gpu_tensorrt_is_not_even_imported(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "gpu", lambda: None)
    monkeypatch.setattr(trt, "version", lambda backend: pytest.fail("imported"))
    assert backends.choose("auto", planned).name == "ort"


def refusal(bundle: Bundle) -> str:
    with pytest.raises(UserError) as error:
        runtime.open(bundle.path, "trt").generate("what is it", max_new_tokens=1)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": "10.16.2"}, "TensorRT 10.16.2 on sm_87, this machine has 10.3.0 on sm_87"),
        (
            {"compute_capabilities": ["sm_80", "sm_90"]},
            "TensorRT 10.3.0 on sm_80/sm_90, this machine has 10.3.0 on sm_87",
        ),
    ],
)
def test_another_machines_plan_is_refused(
    change: dict[str, Any], told: str, planned: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    bundle = changed(planned, lambda plan: dataclasses.replace(plan, **change))
    line = refusal(bundle)
    assert f"plans were built for {told}: " in line
    assert line.endswith(trt.rebuild("trt", bundle))
    assert str(bundle.path) in line
    assert line.endswith("--backend trt")


def test_a_plan_that_tensorrt_refuses(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    for plan in planned.manifest.plans:
        planned.file(plan.file).write_bytes(b"\x00" * 100)
    line = refusal(changed(planned, lambda plan: plan))
    assert ".trt.plan: TensorRT does not load this plan: magicTag == kEXPECTED_MAGIC_TAG failed: " in line
    assert line.endswith(trt.rebuild("trt", planned))


def test_a_plan_without_a_byte(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    for plan in planned.manifest.plans:
        planned.file(plan.file).write_bytes(b"")
    line = refusal(changed(planned, lambda plan: plan))
    assert ".trt.plan cannot be read: " in line
    assert line.endswith(trt.rebuild("trt", planned))


def test_a_damaged_plan(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    file = planned.file(planned.manifest.plans[0].file)
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is damaged: copy the bundle again, or {bundles.rebuild(planned.path)}" in refusal(planned)


def test_no_room_for_a_plan(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch, no_context=True)
    assert "no room to run it: choose a heavier level" in refusal(planned)


def test_a_plan_of_another_graph_is_refused(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    files = {plan.graph: planned.file(plan.file) for plan in planned.manifest.plans}
    files["prefill_loose_16"].write_bytes(files["prefill_loose_40"].read_bytes())
    line = refusal(changed(planned, lambda plan: plan))
    assert "prefill_loose_16.onnx as trt loads it: 'embeddings' is" in line


def test_without_cudas_package(planned: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_standin.with_tensorrt(monkeypatch)

    def missing() -> Any:
        raise UserError("no CUDA package: install it")

    monkeypatch.setattr(cuda, "device", missing)
    assert refusal(planned) == "backend trt cannot run here: no CUDA package: install it"
    assert "not trt: no CUDA package: install it" in backends.choose("auto", planned).reason


@pytest.fixture
def plugged(planned: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bundle:
    """Its plans have plugin layers, and it ships the library."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    planned.file(cuda_library.NAME).write_bytes(b"a library")
    shipped = Library(cuda_library.NAME, store.platform(), ["sm_87"], store.OPERATORS)
    return changed(planned, lambda plan: dataclasses.replace(plan, plugins={"TopKGather": 1}), [shipped])


def registry(standin: Cuda, loaded: list[str]) -> Any:
    class Registry:
        all_creators: tuple[Any, ...] = ()

        @staticmethod
        def load_library(path: str) -> object:
            loaded.append(path)
            return object()

    return Registry


def test_plugins_are_loaded_from_the_store_only(plugged: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    standin, loaded = cuda_standin.with_tensorrt(monkeypatch), list[str]()
    import tensorrt

    tensorrt.get_plugin_registry = lambda: registry(standin, loaded)
    line = refusal(plugged)
    assert "its plans need the operators' plugins for sm_87, which are not here: " in line
    assert f"python -m engines.plugins trust {plugged.path}  or " in line
    assert line.endswith("python -m engines.plugins build --arch 87")
    assert loaded == []

    monkeypatch.setattr(store.ctypes, "CDLL", lambda path: None)
    (trusted,) = store.trust(plugged)
    assert runtime.open(plugged.path).backend == "trt"
    result = runtime.open(plugged.path, "trt").generate("what is it", max_new_tokens=2)
    assert set(loaded) == {str(trusted)}
    assert result.stats.kernels


@pytest.mark.parametrize("architectures", [["sm_87"], [*cuda_library.ARCHITECTURES]])
def test_plugins_that_were_compiled_here(
    architectures: list[str], plugged: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_library, "build", lambda out, architectures: out.write_bytes(b"compiled"))
    built = store.cuda(architectures)
    assert store.for_tensorrt(plugged, "sm_87") == built.path
    with pytest.raises(UserError, match=r"for sm_72, which are not here: compile them with .* build --arch 72"):
        store.for_tensorrt(plugged, "sm_72")


def test_plans_run_and_are_told_of_without_onnx_runtime(
    planned: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One backend is enough."""
    cuda_standin.with_tensorrt(monkeypatch)

    def missing() -> Any:
        raise UserError("ONNX Runtime cannot be imported: pip install onnxruntime")

    monkeypatch.setattr(ort, "_onnxruntime", missing)
    assert runtime.open(planned.path).generate("what is it", max_new_tokens=3, ignore_eos=True).tokens
    graphs = {name: dataclasses.replace(g, operators={"TopKGather": 1}) for name, g in planned.manifest.graphs.items()}
    bundles.seal(planned.path, dataclasses.replace(planned.manifest, graphs=graphs))
    assert command(main)(["info", str(planned.path)]) == 0
    assert "ort      no   ONNX Runtime cannot be imported" in capsys.readouterr().out


def test_info_tells_of_all(
    planned: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    assert command(main)(["info", str(planned.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["backends"]
    assert {name: each["available"] for name, each in told.items()} == {"ort": True, "trt-rtx": False, "trt": True}
    assert "plans for sm_87" in told["trt"]["reason"]


def test_ask_says_which_and_why(
    planned: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda_standin.with_tensorrt(monkeypatch)
    ask = ["ask", str(planned.path), "--max-new-tokens", "6", "what is it"]
    assert command(main)(ask) == 0
    why, statistics = capsys.readouterr().err.splitlines()
    assert why.startswith("backend trt: TensorRT 10.3.0, ")
    assert "trt (TensorRT 10.3.0" in statistics
    assert command(main)([*ask, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["backend"], values["backend_reason"]) == ("trt", why.removeprefix("backend trt: "))
