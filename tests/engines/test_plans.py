"""python -m engines plans: a bundle's plans built where they will run, with a stand-in for TensorRT's builder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from engines import bundle as bundles
from engines import plans, trt
from engines.__main__ import main
from engines.bundle import Bundle, Plan
from engines.errors import UserError
from engines.plugins import store
from tests.engines import small_bundle

COUNT = len(small_bundle.graphs())


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Small, with a plan of TensorRT-RTX and old ones of TensorRT."""
    path = tmp_path / "bundle"
    with bundles.writing(path) as folder:
        small_bundle.fill(folder)
        old = [Plan(name, f"{name}.old.plan", "trt", "10.3.0", ["sm_87"]) for name in small_bundle.graphs()]
        for plan in old:
            (folder / plan.file).write_bytes(b"old")
        bundles.seal(folder, small_bundle.manifest(plans=[*small_bundle.manifest().plans, *old]))
    return bundles.read(path)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith("manifest")}


def test_old_plans_become_new_ones_and_the_rest_stays(
    bundle: Bundle, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(bundle.path)
    weights = os.stat(bundle.file("weights.bin")).st_ino
    assert not trt.status("trt", bundle).available
    assert main(["plans", str(bundle.path)]) == 0

    new = bundles.read(bundle.path)  # every hash checked
    assert trt.status("trt", new).reason == f"TensorRT 11.0.0, {COUNT} plans for sm_87"
    after = contents(bundle.path)
    kept = {name: data for name, data in before.items() if not name.endswith(".old.plan")}
    assert {name: after[name] for name in kept} == kept
    assert after.keys() - kept.keys() == {f"{name}.trt.plan" for name in small_bundle.graphs()}
    assert os.stat(bundle.file("weights.bin")).st_ino == weights  # not copied
    assert [plan.backend for plan in new.manifest.plans] == ["trt-rtx", *["trt"] * COUNT]
    assert new.manifest.backends["trt"].startswith(
        f"{COUNT} plans by version 11.0.0 for sm_87, 0 operators as plugin layers"
    )
    assert dataclasses.replace(new.manifest, plans=[], backends={}, files={}) == dataclasses.replace(
        bundle.manifest, plans=[], backends={}, files={}
    )
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"[1/{COUNT}] vision: ")
    assert out[-1].startswith(f"{bundle.path}: {COUNT} plans by version 11.0.0")


def test_a_bundle_whose_plans_cannot_be_built_stays_as_it_is(
    bundle: Bundle, stand_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fingerprint = contents(bundle.path), bundle.fingerprint

    def refused(*arguments: object, **options: object) -> None:
        raise UserError("trt: graph decode: the builder refused it")

    monkeypatch.setattr(trt, "build_plans", refused)
    assert main(["plans", str(bundle.path)]) == 2
    assert capsys.readouterr().err == "error: trt: graph decode: the builder refused it\n"
    assert contents(bundle.path) == before
    assert bundles.read(bundle.path).fingerprint == fingerprint
    assert [path.name for path in bundle.path.parent.glob(".bundle*")] == []


def test_the_refusals_command_is_this_one(bundle: Bundle, stand_in: Path) -> None:
    command = trt.rebuild("trt", bundle).removeprefix("rebuild with  python -m engines ").split()
    assert main(command) == 0
    assert trt.status("trt", bundles.read(bundle.path)).available


def test_operators_become_plugins_or_bodies(
    bundle: Bundle, stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    graphs = {
        name: dataclasses.replace(graph, operators={"TopKGather": 1}) for name, graph in bundle.manifest.graphs.items()
    }
    changed = Bundle(bundle.path, bundles.seal(bundle.path, dataclasses.replace(bundle.manifest, graphs=graphs)))
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    assert main(["plans", str(bundle.path)]) == 2
    err = capsys.readouterr().err
    assert "compile them with python -m engines.plugins build --arch 87; or build the operators' bodies" in err
    assert err.endswith("--bodies\n")
    assert main(["plans", str(bundle.path), "--bodies"]) == 0

    library, given = tmp_path / "library.so", []
    library.touch()
    monkeypatch.setattr(store, "for_tensorrt", lambda bundle, capability: library if capability == "sm_87" else None)
    assert plans.plugins(changed, "trt") == library
    build = trt.build_plans

    def building(*arguments: object, plugins: Path | None) -> list[Plan]:
        given.append(plugins)
        return build(*arguments, plugins=None)  # type: ignore[arg-type]

    monkeypatch.setattr(trt, "build_plans", building)
    assert main(["plans", str(bundle.path)]) == 0
    assert given == [library]


def test_without_tensorrt_it_says_how_to_get_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(["plans", str(bundle.path)]) == 2
    assert "apt install nvidia-jetpack" in capsys.readouterr().err
