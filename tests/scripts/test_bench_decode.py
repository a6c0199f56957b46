"""scripts/bench_decode.py: what is timed and what is not, whose figures are compared, who is left out and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench_decode
import figures
import runtime
from decode_bench import models, report, ways, worker
from decode_bench.models import MODELS, Model
from decode_bench.ours import Ours
from decode_bench.report import Cell
from decode_bench.ways import Process, Way
from engines.errors import UserError
from tests.runtime import toy

TOY = Model("toy", "toy", (40,), lambda folder: None)
LOOSE, TIGHT = (Way(f"ours {level}", "ours", exact=level == "loose", options={"level": level}) for level in toy.LEVELS)


@pytest.fixture(scope="module")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("decode") / "bundle")


class Fake(worker.Decoder):
    """Of steps that take 1, 2, 3 ... seconds, half of them the processor's; what comes before each takes 100."""

    versions = {"fake": "1"}  # noqa: RUF012
    kv_bytes = 5

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = self.used = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        return np.arange(len(prompt) + len(forced))

    def fill(self, context: int) -> None:
        self.calls.append(f"fill {context}")

    def ready(self) -> None:
        self.now += 100

    def step(self) -> None:
        self.calls.append("step")
        self.now += len(self.calls)
        self.used += len(self.calls) / 2

    def rewind(self) -> None:
        self.calls.append("rewind")


def test_a_turn_times_steps_alone_and_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(worker, "time", fake)
    answer = worker.obey(fake, {"order": "steps", "count": 3})
    assert fake.calls == ["step"] * 4 + ["rewind"]
    assert answer["seconds"] == [2, 3, 4]
    assert answer["processor"] == [1, 1.5, 2]
    assert answer["peak_rss"] > 2**20


def test_orders() -> None:
    fake = Fake()
    told = worker.obey(fake, {"order": "logits", "prompt": [1] * 3000, "forced": [2, 3]})
    assert told["best"] == 3001
    assert len(told["logits"]) == worker.SHOWN
    assert told["logits"][0] == 0
    assert told["logits"][-1] == 3001
    assert worker.obey(fake, {"order": "fill", "context": 7})["kv_bytes"] == 5
    assert fake.calls == ["fill 7"]


@pytest.mark.parametrize("level", toy.LEVELS)
def test_ours_says_what_generate_says(toy_bundle: Path, level: str) -> None:
    vlm = runtime.open(toy_bundle, "ort", level, threads=1)
    question = "what is it how many left ?"
    said = vlm.generate(question, max_new_tokens=6, ignore_eos=True).tokens
    ids, own = vlm.prompts.ids(question, []), Ours(toy_bundle, level, 1)
    assert [int(own.logits(ids, said[:n]).argmax()) for n in range(6)] == said


def test_ours_decodes_behind_a_full_bucket_and_goes_back_there(toy_bundle: Path) -> None:
    own = Ours(toy_bundle, "tight", 1)
    own.fill(40)
    assert (own.context.bucket.length, own.context.state.count, own.context.position) == (40, 4, 40)
    for _ in range(3):  # four slots are free: a fifth step begins behind none
        worker.timed(own, 4)
        assert own.context.state.compactions == 0
        own.rewind()
        assert (own.context.state.count, own.context.position) == (4, 40)
    assert own.kv_bytes == own.context.state.nbytes


def test_a_long_conversation_beside_a_fresh_one(toy_bundle: Path) -> None:
    own = Ours(toy_bundle, "tight", 1)
    own.fill(40)
    told = own.long(windows=2, count=5)
    assert len(told["long"]) == len(told["fresh"]) == 5
    assert told["every"] == 4
    assert told["compaction"] > 0
    assert own.context.state.compactions == 0
    loose = Ours(toy_bundle, "loose", 1)
    loose.fill(40)
    assert loose.long(2, 5) == {}


def test_a_group_is_measured_in_processes(
    toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Way("none", "genai", package="no_such_package_at_all")
    monkeypatch.setattr(models, "bundle", lambda *arguments: toy_bundle)
    monkeypatch.setattr(bench_decode, "WAYS", [LOOSE, TIGHT, absent])
    monkeypatch.setattr(bench_decode, "MODELS", {"toy": TOY})
    monkeypatch.setattr(bench_decode, "tokens", lambda count: [5 + i % 20 for i in range(min(count, 12))])
    monkeypatch.setitem(ways.ALIKE, False, -1.0)  # what the toy drops is much of what it knows
    files = ["--home", str(tmp_path), "--json", str(tmp_path / "decode.json")]
    line = ["--models", "toy", "--threads", "1", "--rounds", "2", "--steps", "3", *files]
    report_of = bench_decode.told

    def interrupted(*arguments: Any) -> Any:
        raise UserError("interrupted")

    monkeypatch.setattr(bench_decode, "told", interrupted)
    assert bench_decode.main(line) == 2
    monkeypatch.setattr(bench_decode, "told", report_of)
    monkeypatch.setattr(bench_decode, "measure", interrupted)  # what was measured is not measured again
    assert bench_decode.main([*line, "--rounds", "3"]) == 2
    capsys.readouterr()
    assert bench_decode.main(line) == 0
    out = capsys.readouterr().out
    assert "| ours loose |" in out
    assert "not measured: none: no_such_package_at_all is not installed: python -m venv build/peers &&" in out
    assert "ours tight: compaction " in out
    values = figures.read(tmp_path / "decode.json").values
    assert [cell["way"] for cell in values["groups"][0]["cells"]] == ["ours loose", "ours tight"]
    for cell in values["groups"][0]["cells"]:
        assert [len(each) for each in cell["rounds"]] == [3, 3]
        assert cell["kv_bytes"] > 0
        assert cell["versions"].keys() == {"numpy", "onnxruntime"}
    assert values["groups"][0]["cells"][0]["alike"] == pytest.approx(1)
    assert "</svg>" in (tmp_path / "decode.svg").read_text()
    assert not (tmp_path / "progress.json").exists()


def cell(way: str, rounds: list[list[float]], weights: str = "float32", **more: Any) -> Cell:
    return Cell("m", 64, 1, way, weights, 1.0, rounds, [0.1], 2**20, 2**20, 0.0, **more)


def test_ratios_are_of_rounds_and_count_compactions() -> None:
    off = cell("ours off", [[1.0, 1.0, 9.0], [4.0, 4.0, 4.0], [2.0, 2.0, 2.0]])
    eager = cell("transformers eager", [[6.0], [20.0], [14.0]])
    assert report.ratio(off, eager) == 6.0  # of 6, 5 and 7, though the medians are 2 and 14
    balanced = cell("ours balanced", [[1.0], [4.0], [2.0]], compaction=4.0, every=4, flat=1.0)
    assert report.ratio(balanced, eager) == pytest.approx(4.0)  # 6 / 2, 20 / 5, 14 / 3
    assert balanced.tokens_per_second == pytest.approx(1 / 3)


def test_targets_are_told_whatever_came_out() -> None:
    cells = [
        cell("ours off", [[1.0]]), cell("ours balanced", [[0.5]], compaction=0.05, every=10, flat=1.01),
        cell("transformers eager", [[2.0]]), cell("genai fp32 KV", [[1.5]]), cell("genai int8 KV", [[0.9]]),
        cell("ours off, int4 weights", [[0.4]], "int4"), cell("genai int4 weights, fp32 KV", [[0.2]], "int4"),
    ]  # fmt: skip
    assert [*(aim.line() for aim in report.aims(cells)), *report.compactions(cells)] == [
        "ours off / genai fp32 KV: 1.50 (wanted: 1; yes)",
        "ours balanced / genai int8 KV: 1.78 (wanted: 1.5; yes)",
        "ours balanced / transformers eager: 3.96 (wanted: 5; no)",
        "ours off, int4 weights / genai int4 weights, fp32 KV: 0.50 (wanted: 1; no)",
        "ours balanced: compaction 50.0 ms every 10 steps, 1.0 % of decoding; a step once the window was full, over a "
        "fresh one's: 1.010",
    ]
    assert [(row[0], row[1], row[-1]) for row in report.table(cells)[1:4]] == [
        ("ours off", "1.0", "1.00"), ("ours balanced", "2.0", "1.98"), ("transformers eager", "0.5", "0.50"),
    ]  # fmt: skip


class Told:
    """A process that says these logits, or fails."""

    def __init__(self, logits: list[float] | None) -> None:
        self.logits = logits

    def order(self, what: str, **given: Any) -> dict[str, Any]:
        if self.logits is None:
            raise UserError("no memory")
        return {"logits": self.logits}


def test_who_computes_something_else_is_not_timed() -> None:
    eager, off, int4, wrong, broken = (
        Way("transformers eager", "huggingface", exact=True), Way("ours off", "ours", exact=True),
        Way("genai int4", "genai"), Way("genai", "genai", exact=True), Way("llama", "llama"),
    )  # fmt: skip
    base = np.random.default_rng(0).standard_normal(200)
    noise = 0.1 * np.random.default_rng(1).standard_normal(200)
    running: Any = {
        eager: Told([*base]), off: Told([*(3 * base + 1e-5)]), int4: Told([*(base + noise)]),
        wrong: Told([*(base + noise)]), broken: Told(None),
    }  # fmt: skip
    without: dict[str, str] = {}
    values = bench_decode.checked(running, without)
    assert [way.name for way in values] == ["transformers eager", "ours off", "genai int4"]
    assert without["llama"] == "no memory"
    assert without["genai"].startswith("WRONG: its logits correlate with those of transformers eager by 0.99")
    with pytest.raises(UserError, match="nothing to compare logits with"):
        bench_decode.checked({int4: running[int4]}, without)


def test_who_fails_in_a_round_ends_nobody_elses() -> None:
    class Turns:
        def __init__(self, most: int) -> None:
            self.left = most

        def order(self, what: str, **given: Any) -> dict[str, Any]:
            if not self.left:
                raise UserError("no memory")
            self.left -= 1
            return {"left": self.left}

    lasting, failing, without = Way("lasting", "ours"), Way("failing", "genai"), dict[str, str]()
    running: Any = {failing: Turns(1), lasting: Turns(3)}
    assert bench_decode.taken_in(running, range(3), 1, without) == {lasting: [{"left": 2}, {"left": 1}, {"left": 0}]}
    assert without == {"failing": "no memory"}


SAYS = "import sys; print('{\"versions\": {}}', flush=True); sys.stdin.readline(); "


def test_a_process_that_fails_says_why() -> None:
    process = Process([sys.executable, "-c", SAYS + 'print(\'{"error": "KeyError: x"}\', flush=True)'], 1, 60)
    with pytest.raises(UserError, match="KeyError: x"):
        process.order("steps", count=1)
    process.close()
    process = Process([sys.executable, "-c", SAYS + "sys.exit('killed by hand')"], 1, 60)
    with pytest.raises(UserError, match="it ended: killed by hand"):
        process.order("steps", count=1)
    process.close()
    process = Process([sys.executable, "-c", SAYS + "import time; time.sleep(60)"], 1, 60)
    process.patience = 0.1
    with pytest.raises(UserError, match="give more --patience"):
        process.order("steps", count=1)
    process.close()


def test_what_is_not_installed_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "interpreter", lambda way: None)
    why = {way.name: ways.missing(way, MODELS["smollm2"]) for way in ways.WAYS}
    install = "python -m venv build/peers && build/peers/bin/pip install -r scripts/decode_bench/peers.txt"
    assert why["genai fp32 KV"] == f"onnxruntime_genai is not installed: {install}"
    assert "scripts/decode_bench/llama-cpp.txt" in why["llama.cpp Q4_1 weights, q8_0 KV"]
    assert "no GGUF" in ways.missing(ways.llama("f16"), MODELS["tiny"])
    for name in ("peers.txt", "llama-cpp.txt"):
        assert (models.ROOT / "scripts" / "decode_bench" / name).is_file()


def test_transformers_caches_agree_and_go_back(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from decode_bench.huggingface import HuggingFace

    folder = models.checkpoint(MODELS["tiny"], tmp_path)
    prompt, forced = bench_decode.tokens(12), bench_decode.tokens(4)
    dynamic = HuggingFace(str(folder), "eager", "dynamic", 1)
    whole = dynamic.logits([*prompt, *forced], [])
    np.testing.assert_allclose(dynamic.logits(prompt, forced), whole, atol=1e-5)
    for attention, cache in (("sdpa", "dynamic"), ("sdpa", "static")):
        other = HuggingFace(str(folder), attention, cache, 1)
        np.testing.assert_allclose(other.logits(prompt, forced), whole, atol=1e-5)
        other.fill(30)
        held = other.kv_bytes
        worker.obey(other, {"order": "steps", "count": 2})
        assert int(other.cache.get_seq_length()) == 30
        assert other.kv_bytes == held
        rows = 30 if cache == "dynamic" else 30 + 64
        assert held == 2 * 2 * 16 * 4 * rows  # keys and values of a layer with 2 KV heads of 16 floats


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["--models", "none"], ["--ways", "ours none"], ["--threads", "4096"], ["--json", "/no/where/x.json"]):
        assert bench_decode.main(["--quick", *line]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "no way 'ours none': choose from ours off; " in errors[1]


def test_a_quantized_store_is_filled_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from calibration import keys, samples
    from decode_bench.bundle import Filled
    from export import checkpoint as checkpoints
    from export import recipe
    from export.graphs import State
    from tests.export import tiny

    checkpoint = checkpoints.load(tiny.save(tmp_path / "checkpoint"))
    statistics = keys.key_statistics(checkpoint, samples.read(checkpoint.path / "samples"))
    filled = Filled(State(checkpoint.decoder, recipe.load("balanced"), 160), statistics)
    made = filled.compute(*(torch.randn(spec.shape) for spec in filled.inputs.values()))
    for name, spec in filled.specs.items():
        assert (made[name].dtype, [*made[name].shape]) == (getattr(torch, spec.dtype), spec.shape), name
    assert all((tensor == 0).all() for name, tensor in made.items() if name.startswith(("store_bias", "window_bias")))
    assert all((tensor > 0).all() for name, tensor in made.items() if "scale" in name)
    assert made["key_store.0"].dtype == torch.int8
    assert made["key_store.0"].unique().numel() > 50


@pytest.mark.slow
def test_quick_builds_a_tiny_model_and_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a bucket beyond the short one, whose prefill fills the cache without reading."""
    line = ["--quick", "--contexts", "160", "--home", str(tmp_path), "--json", str(tmp_path / "quick.json")]
    assert bench_decode.main(line) == 0, capsys.readouterr()
    cells = figures.read(tmp_path / "quick.json").values["groups"][0]["cells"]
    assert [each["way"] for each in cells] == ["ours off", "transformers eager"]
    assert cells[0]["alike"] > 0.9999
    own = Ours(next(tmp_path.glob("tiny/float32-*")), "off", 1)
    own.fill(160)
    state = own.context.state
    assert all((np.asarray(a) == 0).all() for name, a in state.arrays.items() if name.startswith("store_bias"))
    assert np.unique(np.asarray(state.arrays["key_store.0"])).size > 100
