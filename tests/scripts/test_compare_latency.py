"""scripts/compare_latency.py on the toy bundle: what it measures, what it compares, what it says of the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import compare_latency
import figures
import runtime
from engines import bundle as bundles
from engines.ort import OrtSession
from tests.engines import cuda_standin
from tests.runtime import toy

pytest.importorskip("polygraphy", reason="polygraphy is not installed: pip install polygraphy")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    return bundles.read(toy.build(tmp_path_factory.mktemp("latency") / "bundle"))


def run(bundle: bundles.Bundle, *options: str) -> int:
    return compare_latency.main([str(bundle.path), "--runs", "3", "--threads", "1", *options])


def asked(bundle: bundles.Bundle, *options: str) -> dict[str, dict[str, np.ndarray]]:
    arguments = compare_latency.parse([str(bundle.path), "--level", "tight", "--threads", "1", *options])
    return compare_latency.ask(arguments)[1]


def test_every_graph_is_timed_and_compared(
    bundle: bundles.Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bundle, "--level", "tight", "--images", "3", "--json", str(tmp_path / "latency.json")) == 0
    printed = capsys.readouterr()
    values = figures.read(tmp_path / "latency.json").values

    graphs = ["vision_tight", "prefill_tight_40", "decode_tight_40", "compact_tight_40"]
    assert [row["graph"] for row in values["latency"]] == graphs
    for row in values["latency"]:
        assert (row["backend"], row["provider"], row["runs"]) == ("ort", "CPUExecutionProvider", 3)
        assert 0 < row["median"] <= row["p95"]
    assert [row["graph"] for row in values["differences"]] == graphs
    for row in values["differences"]:
        assert (row["first"], row["second"], row["agree"]) == ("ort CPU", "ort CPU -O0", True)
        assert row["outputs"] == len(bundle.manifest.graphs[row["graph"]].outputs)
        assert 0 <= row["difference"] < 1e-3
    assert values["request"]["images"] == 3
    # Store and window of both layers: rows, biases, positions, masses.
    state = sum(spec.nbytes for spec in bundle.manifest.graphs["compact_tight_40"].inputs)
    assert values["request"]["kv_bytes"] == state
    assert sorted(values["not_measured"]) == ["trt", "trt-rtx"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latency.json", "latency.svg"]

    assert printed.err == ""
    for text in (*graphs, f"{state:,} bytes", "not another backend", "not measured: trt: no NVIDIA GPU here"):
        assert text in printed.out
    assert "never compacts" not in printed.out


def test_a_level_that_never_compacts_says_so(bundle: bundles.Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bundle, "--level", "loose") == 0
    assert "no compact graph ran: this level never compacts its window" in capsys.readouterr().out


def test_graphs_are_fed_with_a_real_request(bundle: bundles.Bundle) -> None:
    feeds = asked(bundle)
    prefill = OrtSession(bundle.file("prefill_tight_40.onnx")).run(feeds["prefill_tight_40"])
    page = compare_latency.make_page(np.random.default_rng(compare_latency.SEED))[0]
    answer = runtime.open(bundle.path, level="tight").generate(compare_latency.QUESTION, [page], ignore_eos=True)
    assert int(prefill["logits"].argmax()) == answer.tokens[0]
    assert np.count_nonzero(feeds["prefill_tight_40"]["kinds"] == 2) == 2  # kept of the image
    # What was recorded is what the graph saw, not what the runtime wrote into the arrays afterwards.
    assert np.isneginf(feeds["compact_tight_40"]["window_bias"]).sum() == 0
    assert np.isneginf(feeds["decode_tight_40"]["window_bias"]).sum() > 0


def test_ones_own_images_and_question(bundle: bundles.Bundle, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (9, 5), (200, 30, 30)).save(tmp_path / "red.png")
    feeds = asked(bundle, "--image", str(tmp_path / "red.png"), "--question", "what is it")
    pixels = feeds["vision_tight"]["pixel_values"]
    assert np.ptp(pixels, axis=(2, 3)).max() == 0  # one colour
    assert "prefill_tight_16" in feeds  # a short question, the short bucket


def test_an_output_that_differs_is_named(bundle: bundles.Bundle, tmp_path: Path) -> None:
    feeds = asked(bundle)["vision_tight"]
    model = onnx.load(bundle.file("vision_tight.onnx"))
    (weights,) = [t for t in model.graph.initializer if list(t.dims) == [3, toy.HIDDEN]]
    changed = onnx.numpy_helper.to_array(weights) * np.float32(1.01)
    weights.CopyFrom(onnx.numpy_helper.from_array(changed, weights.name))
    onnx.save(model, tmp_path / "changed.onnx")

    cpu = ["CPUExecutionProvider"]
    good = compare_latency.onnx_runner("good", bundle.file("vision_tight.onnx"), 1, True, cpu)
    bad = compare_latency.onnx_runner("bad", tmp_path / "changed.onnx", 1, True, cpu)
    (difference,) = compare_latency.compare(bundle, "vision_tight", feeds, [good, bad])
    assert (difference.first, difference.second) == ("good", "bad")
    assert (difference.worst, difference.agree) == ("visual_tokens", False)
    expected = np.abs(OrtSession(bundle.file("vision_tight.onnx")).run(feeds)["visual_tokens"]).max() * 0.01
    assert difference.difference == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def planned(bundle: bundles.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bundles.Bundle:
    """The bundle with plans, and a stand-in for TensorRT on a GPU."""
    cuda_standin.with_tensorrt(monkeypatch)
    return bundles.read(cuda_standin.with_plans(bundle.path, tmp_path / "planned"))


def test_a_backend_with_plans_is_timed_and_compared_too(planned: bundles.Bundle, tmp_path: Path) -> None:
    assert run(planned, "--json", str(tmp_path / "latency.json")) == 0
    values = figures.read(tmp_path / "latency.json").values
    rows = [(row["backend"], row["provider"], row["kind"]) for row in values["latency"]]
    assert rows[len(rows) // 2 :] == [
        ("trt", "TensorRT 10.3.0", "vision"),
        ("trt", "TensorRT 10.3.0", "prefill"),
        ("trt", "TensorRT 10.3.0, CUDA graph", "decode"),
    ]
    assert {row["second"] for row in values["differences"]} == {"ort CPU -O0", "trt"}
    assert all(row["agree"] for row in values["differences"])
    assert [*values["not_measured"]] == ["trt-rtx"]


def test_a_plan_that_does_not_load_is_one_line(
    planned: bundles.Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_standin, "PLAN", "another format of ")
    assert run(planned, "--backend", "trt") == 2
    err = capsys.readouterr().err
    assert "vision_loose.trt.plan: TensorRT does not load this plan: magicTag" in err
    assert err.rstrip().splitlines()[-1].endswith("--backend trt")


def test_what_is_measured_and_why_the_rest_is_not(planned: bundles.Bundle) -> None:
    usable, missing = compare_latency.available(planned, ["trt"])
    assert usable == ["trt"]
    assert missing["ort"] == "not asked for (--backend)"
    assert missing["trt-rtx"].startswith("the bundle has no plans for trt-rtx: rebuild with")


def test_without_polygraphy_it_still_measures(
    bundle: bundles.Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_latency, "polygraphy", lambda: False)
    assert run(bundle) == 0
    printed = capsys.readouterr().out
    assert "decode_loose_40" in printed
    assert "outputs not compared: polygraphy is not installed" in printed


def test_the_provider_is_asked_of_the_profiler_when_nodes_could_fall_back(bundle: bundles.Bundle) -> None:
    feeds = asked(bundle)["decode_tight_40"]
    session = OrtSession(bundle.file("decode_tight_40.onnx"), 1)
    session.provider = "CUDAExecutionProvider"  # what ONNX Runtime would promise
    name, _, count = compare_latency.providers(session, bundle, "decode_tight_40", feeds).partition(" (")
    assert name == "CPUExecutionProvider"  # and what it did
    assert int(count.removesuffix(" nodes)")) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--level", "none"], "no level 'none'"),
        (["--images", "9"], "more than the longest bucket's 40"),
        (["--image", "no.png"], "no.png: no such file"),
        (["--runs", "0"], "--runs must be at least 1, got 0"),
        (["--backend", "cuda"], "unknown backend 'cuda': choose ort, trt-rtx, trt"),
        (["--json", "no/folder.json"], "no is not a folder"),
        (["--json", "BUNDLE/latency.json"], "latency.json lies in the bundle "),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, bundle: bundles.Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bundle, *(option.replace("BUNDLE", str(bundle.path)) for option in options)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_latency.parse(["--help"])
    printed = capsys.readouterr().out
    assert "python scripts/compare_latency.py build/demo-vlm" in printed
    assert "(default: 50)" in printed
