"""The guard's figures against loops over what both models say, its verdicts, and its warnings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from calibration import guard as guards
from calibration import samples, survey
from calibration.failures import BLINDNESS, DRIFT, LOOPS
from calibration.guard import Guard, Reader, attention_kl, logit_kl
from calibration.ranges import measure_ranges, of_map
from engines.config import parse
from engines.errors import UserError
from engines.guard import Failure, Limits, Verdict
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from tests.calibration import planted
from tests.calibration.guarded import guarded_folder, short_answers  # noqa: F401  # fixtures
from tests.export import tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
RUINOUS: dict[str, Any] = {
    "importance": {"method": "streaming-llm"},
    "budget": {"keep": 0.05},
    "protect": {"sinks": 0, "recent": 1},
    "quantize": {"method": "float32"},
}


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    torch.set_num_threads(1)
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def guard(checkpoint: Checkpoint) -> Guard:
    known = samples.read(checkpoint.path / "samples")
    return Guard(checkpoint, known[:2], known[2:], layers=2)


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.save(tmp_path_factory.mktemp("planted") / "checkpoint", count=36)


def compressed(guard: Guard, recipe: Recipe) -> Reader:
    prepared = guards.prepare(guard.checkpoint, {recipe.name: recipe}, guard.calibration)[recipe.name]
    return Reader(guard.checkpoint, recipe, prepared, guard.layers, guard.reach)


@pytest.mark.parametrize("name", ["balanced", "chat"])
def test_every_figure_is_what_loops_find(guard: Guard, name: str) -> None:
    recipe = recipes.load(name)
    verdict, reader = guard.judge(recipe), compressed(guard, recipe)
    tokenizer = guard.checkpoint.processor.tokenizer
    ends = guard.checkpoint.model.generation_config.eos_token_id
    apart: list[float] = []
    likelihoods: tuple[list[float], list[float]] = ([], [])
    looks: dict[tuple[int, int], list[float]] = {}
    right: dict[str, list[tuple[bool, bool]]] = {}
    read = 0
    for sample, reference in zip(guard.held_out, guard.references, strict=True):
        said = [tokenizer.decode(reader.say(reference.prompt), skip_special_tokens=True)]
        said.insert(0, tokenizer.decode(reference.said, skip_special_tokens=True))
        answer = tokenizer(sample.answer, add_special_tokens=False)["input_ids"] + [ends]
        if not sample.answer:
            answer = reference.said
        wanted = sample.answer or said[0].strip()
        right.setdefault(sample.task or "all", []).append((said[0].strip() == wanted, said[1].strip() == wanted))
        own, its = reference.reading, reader.read(reference.prompt, answer)
        read += len(answer) - 1
        for p, q, token in zip(own.log_probs.tolist(), its.log_probs.tolist(), answer, strict=True):
            apart.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            likelihoods[0].append(p[token])
            likelihoods[1].append(q[token])
        for layer in (1, 2):
            for head, step in itertools.product(range(8), range(len(answer) - 1)):
                p, q = own.attention[layer][step, head].tolist(), its.attention[layer][step, head].tolist()
                kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True) if b > 0)
                looks.setdefault((layer, head), []).append(kl)
    assert verdict.layers == [1, 2]
    want = [[np.mean(looks[layer, head]) for head in range(8)] for layer in (1, 2)]
    np.testing.assert_allclose(verdict.attention_kl, want, rtol=1e-3, atol=1e-5)
    assert verdict.logit_kl == pytest.approx(np.mean(apart), rel=1e-3, abs=1e-6)
    perplexities = [math.exp(-np.mean(row)) for row in likelihoods]
    assert [verdict.perplexity, verdict.perplexity_compressed] == pytest.approx(perplexities, rel=1e-4)
    assert verdict.perplexity_change == pytest.approx(100 * (perplexities[1] / perplexities[0] - 1), abs=1e-2)
    assert (verdict.tokens, verdict.read, verdict.held_out, verdict.calibrated) == (len(apart), read, 7, 2)
    assert list(verdict.tasks) == ["a", "all", "b"]
    for task, judged in right.items():
        before, after = (100 * sum(pair[side] for pair in judged) / len(judged) for side in (0, 1))
        found = verdict.tasks[task]
        assert (found.asked, found.uncompressed, found.compressed) == pytest.approx((len(judged), before, after))
        assert found.change == pytest.approx(after - before)


def test_what_is_not_compressed_costs_nothing(guard: Guard) -> None:
    verdict = guard.judge(recipes.load("off"))
    assert np.array(verdict.attention_kl).shape == (2, 8)
    assert (np.array(verdict.attention_kl) == 0).all()
    assert (verdict.logit_kl, verdict.perplexity_change) == (0, 0)
    assert {task.change for task in verdict.tasks.values()} == {0}
    assert verdict.perplexity == verdict.perplexity_compressed
    assert not [failure.name for failure in verdict.failures if failure.found]
    assert (verdict.holds, verdict.reasons) == (True, [])


def test_a_ruinous_recipe_is_refused_with_every_reason(guard: Guard) -> None:
    verdict = guard.judge(tiny.recipe(**RUINOUS, window={"least": 2, "most": 2, "recent": 0.0}))
    assert not verdict.holds
    told = " | ".join(verdict.reasons)
    assert "attention KL" in told
    assert "logit KL" in told
    for layer, heads in zip(verdict.layers, verdict.attention_kl, strict=True):
        assert (f"in layer {layer}" in told) == (np.mean(heads) == max(map(np.mean, verdict.attention_kl)))
    assert parse(Verdict, json.loads(json.dumps(dataclasses.asdict(verdict))), "verdict") == verdict


def test_limits_are_the_recipes_own(guard: Guard) -> None:
    stated = {
        "attention_kl": 100.0,
        "logit_kl": 100.0,
        "perplexity": 1e6,
        "task": 100.0,
        "blindness": 1.0,
        "loops": 1.0,
    }
    hard = tiny.recipe(**RUINOUS, guard={**stated, "layers": 1})
    told = guard.judge(hard)
    assert (told.holds, told.layers, told.limits) == (True, [2], Limits(**stated, layers=1))
    strict = dataclasses.replace(hard, guard=dataclasses.replace(hard.guard, logit_kl=told.logit_kl * 0.99))
    assert guard.judge(strict).reasons == [
        f"logit KL {told.logit_kl:.3g} nats a token is above {told.logit_kl * 0.99:g}"
    ]


def test_divergences_of_planted_distributions() -> None:
    p, q = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([5 / 9, 4 / 9, 0.0])
    assert attention_kl(p, q).item() == pytest.approx(-math.log(0.9))  # 90 % of the attention was kept
    assert attention_kl(p, p).item() == 0
    assert logit_kl(p.log(), q.clamp(min=1e-9).log()).item() == pytest.approx(
        0.5 * math.log(0.9) + 0.4 * math.log(0.9) + 0.1 * math.log(0.1 / 1e-9), rel=1e-4
    )


def test_merged_heads_are_compared_by_their_mean(plants: Path) -> None:
    """Twins become one head, the others get copies of their query heads: nothing is lost, and no copy counts."""
    checkpoint, known = checkpoints.load(plants), samples.read(plants / "samples")
    layer, *_ = planted.TWINS
    guard = Guard(checkpoint, known[:2], known[2:4], planted.LAYERS)
    limits = {"layers": planted.LAYERS}
    recipe = tiny.recipe(heads={"merge": True, "threshold": 0.99}, guard=limits)
    assert guards.prepare(checkpoint, {"a": recipe}, known[:2])["a"].decoder.kv_heads == [4, 3, 4, 4]
    found = guard.judge(recipe)
    assert [len(heads) for heads in found.attention_kl] == [8, 1, 8, 8]
    assert found.attention_kl[layer][0] < 1e-4
    assert found.holds
    ruined = guard.judge(tiny.recipe(heads={"merge": True, "threshold": -1.0}, guard=limits))
    assert ruined.attention_kl[layer][0] > 0.1


def test_pruned_images_are_judged_as_pruned(guard: Guard) -> None:
    """Where a request may choose, by the fewest tokens that it may take."""
    fixed = guard.judge(tiny.recipe(perception={"keep": 0.25}))
    adaptive = guard.judge(tiny.recipe(perception={"buckets": [0.25, 0.5]}))
    shared = guard.judge(tiny.recipe(perception={"quota": 0.25}))
    asking = guard.judge(tiny.recipe(perception={"method": "attention", "keep": 0.25, "layers": [1]}))
    assert fixed.logit_kl > 0.01
    assert fixed.logit_kl == pytest.approx(adaptive.logit_kl)
    assert fixed.logit_kl == pytest.approx(shared.logit_kl)
    assert asking.logit_kl > 0.01
    assert asking.logit_kl != pytest.approx(fixed.logit_kl)


@pytest.fixture(scope="module")
def pages() -> Guard:
    """The demo model on its samples of one page each."""
    known = [s for s in samples.read(DEMO / "samples") if s.task == "page" and len(s.images) == 1]
    return Guard(checkpoints.load(DEMO), known[:2], known[2:])


def failure(verdict: Verdict, name: str) -> Failure:
    return next(failure for failure in verdict.failures if failure.name == name)


def test_a_cache_without_the_image_is_blind(pages: Guard) -> None:
    """The first digit comes from prefill, which sees the page; the others from a cache that has nothing of it."""
    blind = pages.judge(tiny.recipe(**RUINOUS, window={"least": 8, "most": 8, "recent": 0.0}))
    found = failure(blind, BLINDNESS)
    assert found.found is True
    assert (found.figure or 0) >= 0.8  # what the question's tokens saw of the page stays in their own keys and values
    assert any(reason.startswith("visual blindness: ") and found.remedy in reason for reason in blind.reasons)
    assert blind.tasks["page"].compressed == 0
    assert any(reason.startswith("task page: -100") for reason in blind.reasons)
    seeing = pages.judge(recipes.load("light"))
    assert failure(seeing, BLINDNESS).found is False
    assert seeing.tasks["page"].change == 0
    assert failure(seeing, LOOPS).found is False


def test_questions_may_come_later(pages: Guard) -> None:
    """What the question asks for can go while it is not known: `extreme` is ruined by that, and `chat` made for it."""
    whole = pages.judge(recipes.load("off"), later=True)
    assert np.max(whole.attention_kl) < 1e-4
    assert whole.logit_kl < 1e-4
    assert whole.holds
    extreme, chat = recipes.load("extreme"), recipes.load("chat")
    assert pages.judge(extreme).tasks["page"].change == 0
    assert pages.judge(extreme, later=True).tasks["page"].change < -50
    assert pages.judge(chat, later=True).tasks["page"].change == 0


def test_drift_and_loops_are_reasons(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    read = guards.Observed.read

    def drifting(self: Any, prompt: Any, answer: Any, *more: Any) -> Any:
        """Ever more of what was said before is forgotten."""
        reading = read(self, prompt, answer, *more)
        blur = torch.linspace(1, 0, len(answer))[:, None]
        return dataclasses.replace(reading, log_probs=(reading.log_probs * blur).log_softmax(dim=-1))

    long = [dataclasses.replace(s, answer="red circle blue teal no yes 0 9") for s in guard.held_out]
    known = Guard(guard.checkpoint, guard.calibration, long)
    healthy = known.judge(recipes.load("off"))
    assert failure(healthy, DRIFT).found is False
    assert failure(healthy, LOOPS).found is False
    monkeypatch.setattr(guards.Observed, "read", drifting)
    monkeypatch.setattr(guards.Observed, "generate", lambda *_: [[8, 9] * 10])
    ill = known.judge(recipes.load("off"))
    assert failure(ill, DRIFT).found is True
    assert failure(ill, LOOPS).found is True
    assert any(reason.startswith("semantic drift: ") for reason in ill.reasons)
    assert any("merge_above" in reason for reason in ill.reasons)


def test_the_first_recipe_that_holds_is_chosen(guard: Guard) -> None:
    ruinous = tiny.recipe(**RUINOUS, window={"least": 2, "most": 2, "recent": 0.0})
    off, light = recipes.load("off"), recipes.load("light")
    judged = guard.first([ruinous, off, light])
    assert [recipe.name for recipe, _ in judged] == ["test", "off"]
    assert [verdict.holds for _, verdict in judged] == [False, True]
    refused = guard.first([ruinous, dataclasses.replace(ruinous, name="other")])
    assert [verdict.holds for _, verdict in refused] == [False, False]
    assert all(verdict.reasons for _, verdict in refused)


def test_calibration_on_text_alone_warns(plants: Path) -> None:
    checkpoint = checkpoints.load(plants)
    images, text = samples.read(plants / "samples"), samples.read(plants / "text", text_only=True)
    warned = Guard(checkpoint, text, images[32:]).warnings
    assert warned[0] == survey.TEXT_ONLY
    assert [warning.split()[0] for warning in warned[1:]] == ["keys", "values"]  # visual rows are 10 times as large
    assert Guard(checkpoint, images[:32], images[32:]).warnings == []
    few = Guard(checkpoint, images[:2], text[:1]).warnings
    assert few[0].startswith("2 samples are few")
    assert few[1].startswith("no held-out sample has an image")


def test_ranges_that_are_exceeded_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    known = samples.read(checkpoint.path / "samples")
    Image.new("RGB", (64, 64), (255, 255, 255)).save(tmp_path / "white.png")
    ranges = measure_ranges(checkpoint, known)
    low, high = ranges["keys"]
    assert guards.exceeding(ranges, ranges) == []
    assert guards.exceeding(ranges, ranges | {"keys": (low, high + 0.1 * (high - low))}) == []
    far = high.copy()
    far[1, 0, 7] += 1.5 * (high - low)[1, 0, 7]
    (warning,) = guards.exceeding(ranges, ranges | {"keys": (low, far)})
    assert "layer 1, KV head 0, channel 7 (4.0 times)" in warning
    many = low - 0.2 * (high - low)
    (warning,) = guards.exceeding(ranges, ranges | {"values": ranges["values"], "keys": (many, high)})
    assert "keys of held-out samples leave the calibrated range by more than 25% in 100% of the channels" in warning


def test_ranges_are_those_of_an_attention_map(checkpoint: Checkpoint) -> None:
    known = [dataclasses.replace(s, answer="") for s in samples.read(checkpoint.path / "samples")]
    asked = [dataclasses.replace(s, answer=" ") for s in known[:4]]  # a map reads answers too: here they are empty
    found, ranges = of_map(survey.measure(checkpoint, asked)), measure_ranges(checkpoint, known[:4])
    for what, ends in ranges.items():
        for end, of_the_map in zip(ends, found[what], strict=True):
            np.testing.assert_allclose(of_the_map, end, atol=1e-5)
    other = dataclasses.replace(
        survey.measure(checkpoint, asked),
        facts=dataclasses.replace(survey.measure(checkpoint, asked).facts, weights="other"),
    )
    with pytest.raises(UserError, match="the attention map is of checkpoint with other weights: measure it again"):
        Guard(checkpoint, known[:2], known[2:], known=other)
