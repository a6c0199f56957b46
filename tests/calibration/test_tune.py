"""The search for a recipe: what is planted is found, targets are held, and a killed run ends as if it had not been."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from calibration import candidates, samples, tune
from calibration import guard as guards
from calibration.candidates import Draft
from calibration.tune import LEVELS, ORDER, RESERVE, Search
from calibration.workbench import Workbench
from engines.errors import UserError
from engines.guard import Limits, Task, Verdict
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.buckets import ROUND
from export.graphs import State
from export.recipe import Recipe
from export.stages.budget import Uniform
from tests.calibration import planted
from tests.export import tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
STEPS = dict(ORDER)
LENIENT = Limits(attention_kl=99, logit_kl=99, perplexity=1e9, task=100, blindness=1, drift=99, loops=99)
SMALL: dict[str, Any] = {
    "quantize": {"method": "int8"},
    "window": {"least": 2, "most": 2, "recent": 0.0, "dtype": "float16"},
    "protect": {"sinks": 1, "recent": 1},
}


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Few tokens an answer, since a random model never ends one; layers and heads alone, where the plants are."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "MOST", 4)
        patch.setattr(tune, "ORDER", tuple((step, STEPS[step]) for step in ("layers", "heads")))
        yield


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.save(tmp_path_factory.mktemp("planted") / "checkpoint", count=12)


def bench(folder: Path, trials: Path, base: Recipe | None = None, **options: Any) -> Workbench:
    base = base or dataclasses.replace(tiny.recipe(**SMALL), guard=LENIENT)
    return Workbench(checkpoints.load(folder), base, samples.read(folder / "samples"), trials, **options)


@pytest.fixture(scope="module")
def straight(plants: Path, tmp_path_factory: pytest.TempPathFactory) -> Search:
    search = Search(bench(plants, tmp_path_factory.mktemp("trials")))
    search.by_bytes(300)
    return search


def test_the_parts_share_no_sample_and_leave_none_out(straight: Search, plants: Path) -> None:
    own = straight.bench
    parts = [[sample.images[0] for sample in part] for part in (own.calibrate, own.choose, own.confirm)]
    assert sorted(itertools.chain(*parts)) == sorted(s.images[0] for s in samples.read(plants / "samples"))
    assert [len(part) for part in parts] == [3, 6, 3]


def test_needy_layers_get_slots_and_twins_become_one(straight: Search) -> None:
    own, recipe = straight.bench, recipes.parse(Recipe, straight.trials[-1].recipe, "found")
    assert own.losses[:, 0].argmin() == planted.NOISY  # it looks at all tokens alike: what it loses is told by any
    layer, *_ = planted.TWINS
    assert own.decoder(recipe).kv_heads == [3 if i == layer else 4 for i in range(planted.LAYERS)]
    (state, _), *_ = own.states(recipe)
    assert np.argmin(state.capacities) == planted.NOISY
    base = straight.trials[0]
    assert base.verdict
    assert straight.trials[-1].verdict
    assert straight.trials[-1].verdict.logit_kl < base.verdict.logit_kl


def test_every_trial_says_why_it_was_kept(straight: Search) -> None:
    """The best so far, told again from the verdicts alone."""
    best = straight.trials[0].verdict
    assert [trial.step for trial in straight.trials[-2:]] == ["confirm", "confirm"]
    for trial in straight.trials[1:-2]:
        assert trial.verdict
        assert best
        keys = [
            (v.holds, sum(t.asked * t.compressed for t in v.tasks.values()), -v.logit_kl) for v in (trial.verdict, best)
        ]
        assert trial.kept == (keys[0] > keys[1])
        assert "so far" in trial.why
        best = trial.verdict if trial.kept else best


def test_a_killed_run_goes_on_and_ends_the_same(
    straight: Search, plants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    judge = guards.Guard.judge

    def counting(self: Any, recipe: Recipe, later: bool = False) -> Verdict:
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(recipe.name)
        return judge(self, recipe, later)

    monkeypatch.setattr(guards.Guard, "judge", counting)
    with pytest.raises(KeyboardInterrupt):
        Search(bench(plants, tmp_path)).by_bytes(300)
    judged.append("the one that was killed")
    again = Search(bench(plants, tmp_path))
    again.by_bytes(300)
    assert again.trials == straight.trials
    assert len(judged) - 1 == len({json.dumps([t.recipe, t.step == "confirm"]) for t in again.trials})

    judged.clear()
    whole = Search(bench(plants, tmp_path))
    monkeypatch.setattr(guards.Guard, "judge", None)
    whole.by_bytes(300)
    assert whole.trials == straight.trials


def test_another_checkpoint_or_other_samples_are_measured_again(plants: Path, tmp_path: Path) -> None:
    first = bench(plants, tmp_path)
    recipe = first.at(Draft(first.base), 300)
    verdict = first.judge(recipe)
    (plants / "accuracy_curve.json").write_text("{}")  # decides nothing
    known = bench(plants, tmp_path)
    assert (known.judge(recipe), known.memory.found) == (verdict, 1)
    (file,) = tmp_path.glob("*.json")
    kept_verdict = json.loads(file.read_text())
    file.write_text(json.dumps({key: figure for key, figure in kept_verdict.items() if key != "failures"}))
    assert (known.judge(recipe), known.memory.found) == (verdict, 1)  # measured again
    assert json.loads(file.read_text()) == kept_verdict
    asked = plants / "samples" / samples.FILE
    lines = asked.read_text()
    asked.write_text(lines.replace('prompt": "', 'prompt": "how many ? ', 1))
    try:
        assert bench(plants, tmp_path).judge(recipe) is not None
    finally:
        asked.write_text(lines)
    weights = plants / "model.safetensors"
    kept = load_file(weights)
    try:
        name = next(name for name in kept if name.endswith("layers.0.self_attn.k_proj.weight"))
        save_file(kept | {name: kept[name] * 1.5}, weights, {"format": "pt"})
        other = bench(plants, tmp_path)
        assert other.judge(recipe).logit_kl != verdict.logit_kl
        assert other.memory.found == 0
    finally:
        save_file(kept, weights, {"format": "pt"})


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return bench(DEMO, tmp_path_factory.mktemp("trials"), recipes.load("balanced"))


@given(st.floats(400, 4000), st.sampled_from(recipes.presets()), st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_target_is_what_the_runtime_allocates(demo: Workbench, target: float, name: str, uniform: bool) -> None:
    base = recipes.load(name)
    if uniform:
        base = dataclasses.replace(base, budget=Uniform())
    try:
        recipe = demo.at(Draft(base), target)
    except UserError:  # its window alone takes more
        slots = dataclasses.replace(base, budget=Uniform(keep=1e-6))
        assert max(State(demo.checkpoint.decoder, slots, n).nbytes / n for n in (96, 592)) > target / 1.3
        return
    size = tokens = most = 0
    for sample in demo.choose:
        own = len(samples.model_inputs(demo.checkpoint, sample)["input_ids"][0])
        pruned = own - len(sample.images) * (64 - recipe.perception.count(64, recipe.perception.quota))
        rows = -(-pruned // ROUND) * ROUND
        decoder = demo.checkpoint.decoder
        for spec in State(decoder, recipe, rows).specs().values():
            size += math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
        held = dataclasses.replace(recipe, budget=Uniform(keep=1.0))
        most += State(decoder, held, rows).nbytes
        tokens += own
    assert size <= target * tokens * (1 + 1e-9)
    assert size >= 0.98 * min(target * tokens, most)
    assert demo.bytes_per_token(recipe) == pytest.approx(size / tokens)


class Imagined:
    """A workbench whose recipes hold from some bytes on, more where that is confirmed; the wanted ones have less KL."""

    def __init__(self, needs: dict[tuple[int, int], int], more: float = 1.0):
        self.base = tiny.recipe(protect={"sinks": 0, "recent": 0})
        self.checkpoint = SimpleNamespace(decoder=SimpleNamespace(fp16_token_bytes=FP16))
        self.needs, self.more, self.later, self.doing = needs, more, False, ""

    def at(self, draft: Draft, bytes_per_token: float) -> Recipe:
        budget = dataclasses.replace(draft.recipe.budget, kv_bytes=bytes_per_token / FP16)
        return dataclasses.replace(draft.recipe, budget=budget)

    def bytes_per_token(self, recipe: Recipe, confirm: bool = False) -> float:
        return (recipe.budget.kv_bytes or 1.0) * FP16

    def need(self, recipe: Recipe) -> int:
        return self.needs[recipe.protect.sinks, recipe.protect.recent]

    def judge(self, recipe: Recipe, confirm: bool = False) -> Verdict:
        need, size = self.need(recipe) * (self.more if confirm else 1.0), self.bytes_per_token(recipe)
        return verdict(holds=size >= need, logit_kl=need / size)


FP16 = 6144


def verdict(holds: bool = True, logit_kl: float = 0.1, right: float = 50.0) -> Verdict:
    return Verdict(
        recipe="a", later=False, holds=holds, reasons=[] if holds else ["too few"], warnings=[], limits=LENIENT,
        calibrated=1, held_out=2, tokens=9, read=7, layers=[1], attention_kl=[[0.1, 0.2]], logit_kl=logit_kl,
        perplexity=2.0, perplexity_compressed=3.0, perplexity_change=50.0, failures=[],
        tasks={"a": Task(2, 50, right, right - 50, 9)},
    )  # fmt: skip


def steps_of(*knobs: str) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (knob, lambda bench, best, knob=knob: [candidates.knobs("protect", **{knob: n}) for n in range(3)])
        for knob in knobs
    )


def test_what_cannot_be_is_a_row_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise UserError("no such thing")

    steps = (("sinks", lambda bench, best: [("worse", refuse), *steps_of("sinks")[0][1](bench, best)]), ("all", refuse))
    monkeypatch.setattr(tune, "ORDER", steps)
    imagined: Any = Imagined({(0, 0): 900, (1, 0): 300, (2, 0): 600})
    search = Search(imagined)
    found = search.by_bytes(1000)
    assert found is not None
    assert found.protect.sinks == 1
    told = [(trial.step, trial.verdict is None, trial.kept, trial.why) for trial in search.trials]
    assert told[1] == ("sinks", True, False, "not possible: no such thing")
    assert told[-3] == ("all", True, False, "not possible: no such thing")
    assert [trial.kept for trial in search.trials[2:4]] == [True, False]
    monkeypatch.setattr(imagined, "at", refuse)
    with pytest.raises(UserError, match="100 bytes a token: no such thing"):
        Search(imagined).by_bytes(100)


@given(st.lists(st.integers(120, 4000), min_size=9, max_size=9), st.floats(1.0, 3.0))
@settings(deadline=None)
def test_an_accuracy_is_held_with_few_bytes_and_a_reserve(needs: list[int], more: float) -> None:
    imagined: Any = Imagined({(i, j): needs[3 * i + j] for i in range(3) for j in range(3)}, more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "ORDER", steps_of("sinks", "recent"))
        search = Search(imagined)
        found = search.by_accuracy()
    levels = [0.75 * FP16 / 1.1**level for level in range(LEVELS + 1)]

    def lowest(need: float) -> int:
        return max((level for level, size in enumerate(levels) if size >= need), default=-1)

    best = (0, 0)
    for step in (0, 1):
        for value in range(3):
            other = (value, best[1]) if step == 0 else (best[0], value)
            best = other if imagined.needs[other] < imagined.needs[best] else best
    want = min(max(lowest(imagined.needs[best]) - RESERVE, 0), lowest(imagined.needs[best] * more))
    if want < 0:
        assert found is None
        return
    assert found is not None
    assert imagined.bytes_per_token(found) == pytest.approx(levels[want])
    assert lowest(imagined.need(found)) == lowest(imagined.needs[best])
    assert search.trials[-1].kept
