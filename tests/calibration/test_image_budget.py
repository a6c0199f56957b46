"""Thresholds, buckets, quotas and gates that are fitted to images, against trying all of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Picture

from calibration import __main__ as command_line
from calibration import image_budget
from calibration import samples as sampling
from calibration.image_budget import STEPS, Image
from engines.config import parse
from engines.errors import UserError
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.graphs import Vision
from export.recipe import Recipe
from export.stages.perception import Diversity
from tests.export import tiny

settings.register_profile("fits", deadline=None, max_examples=60)
settings.load_profile("fits")


@st.composite
def curves(draw: st.DrawFn) -> list[np.ndarray]:
    """Of images of as many tokens: coverage that never falls, and is 1 at its end; with equal steps among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens, images, places = draw(st.integers(2, 9)), draw(st.integers(1, 6)), draw(st.sampled_from([1, 3]))
    rows = np.sort(np.round(rng.uniform(0.1, 1, (images, tokens)), places), axis=1).astype(np.float32)
    rows[:, -1] = 1
    return list(rows)


def needed(curve: Iterable[float], threshold: float) -> int:
    for count, covered in enumerate(curve, 1):
        if covered >= threshold:
            return count
    return count


def rounded(needs: Sequence[int], counts: Sequence[int]) -> int:
    return sum(min(count for count in counts if count >= need) for need in needs)


def least(needs: Sequence[int], number: int) -> int:
    """The fewest tokens that any buckets leave."""
    sizes = range(1, max(needs) + 1)
    sets = (some for k in range(1, number + 1) for some in itertools.combinations(sizes, k) if max(some) >= max(needs))
    return min(rounded(needs, counts) for counts in sets)


@given(needs=st.lists(st.integers(1, 8), min_size=1, max_size=8), number=st.integers(1, 4))
def test_no_buckets_are_better(needs: list[int], number: int) -> None:
    counts = image_budget.buckets(needs, number)
    assert counts == sorted(set(counts))
    assert len(counts) <= number
    assert rounded(needs, counts) == least(needs, number)
    assert image_budget.rounded_up(needs, counts).sum() == rounded(needs, counts)
    if len(counts) > 1:  # none that saves nothing
        assert least(needs, len(counts) - 1) > rounded(needs, counts)


@given(curves=curves(), mean=st.floats(1, 9), number=st.integers(1, 3))
def test_no_higher_threshold_keeps_as_few(curves: list[np.ndarray], mean: float, number: int) -> None:
    threshold, counts = image_budget.threshold_for(curves, mean, number)
    needs = [needed(curve, threshold) for curve in curves]
    assert needs == [image_budget.need(curve, threshold) for curve in curves]
    assert rounded(needs, counts) == least(needs, number) <= mean * len(curves) + 1e-9
    if threshold < 1:
        more = [needed(curve, threshold + 1 / STEPS) for curve in curves]
        assert least(more, number) > mean * len(curves)


@pytest.mark.parametrize(("curve", "mean"), [([0.5, 1.0], 0.4), ([0.0, 1.0], 1.5)])
def test_fewer_tokens_than_any_threshold_leaves_are_refused(curve: list[float], mean: float) -> None:
    with pytest.raises(UserError, match=f"no threshold is low enough for {mean} tokens an image: raise --keep"):
        image_budget.threshold_for([np.array(curve, np.float32)], mean, 2)


def images_of(curves: Sequence[np.ndarray], entropies: Sequence[float]) -> list[Image]:
    return [Image(curve, entropy) for curve, entropy in zip(curves, entropies, strict=False)]


unit = st.floats(0, 1)
many = st.lists(unit, min_size=6, max_size=6)


@given(curves=curves(), keep=st.floats(0.51, 1), number=st.integers(1, 4))
def test_by_coverage_every_image_is_covered_by_the_wanted_tokens(
    curves: list[np.ndarray], keep: float, number: int
) -> None:
    images = images_of(curves, [0.5] * 6)
    stage = image_budget.by_coverage(images, Diversity(), keep, number)
    kept = [counts[0] for counts in image_budget.kept([[image] for image in images], stage)]
    assert np.mean(kept) <= keep * len(curves[0]) + 1e-9
    threshold, counts = image_budget.threshold_for(curves, keep * len(curves[0]), number)
    assert stage.counts(len(curves[0])) == counts  # shares round to the counts
    assert stage.floor == min(kept)
    for curve, count in zip(curves, kept, strict=True):
        assert curve[count - 1] >= threshold


@given(curves=curves(), keep=st.floats(0.51, 1))
def test_by_quota_each_prompt_keeps_the_share(curves: list[np.ndarray], keep: float) -> None:
    images, tokens = images_of(curves, [0.5] * 6), len(curves[0])
    stage = image_budget.by_quota(images, Diversity(), keep)
    (kept,) = image_budget.kept([images], stage)
    assert sum(kept) == max(round(keep * len(images) * tokens), stage.floor * len(images))
    threshold, _ = image_budget.threshold_for(curves, keep * tokens, tokens)
    assert stage.floor == min(needed(curve, threshold) for curve in curves)
    assert min(kept) >= stage.floor


@given(curves=curves(), entropies=many, keep=st.floats(0.51, 1), number=st.integers(2, 4), pressure=unit)
def test_by_gate_the_lowest_base_that_is_enough(
    curves: list[np.ndarray], entropies: list[float], keep: float, number: int, pressure: float
) -> None:
    images, tokens = images_of(curves, entropies), len(curves[0])
    threshold, _ = image_budget.threshold_for(curves, keep * tokens, tokens)
    needs = [needed(curve, threshold) for curve in curves]
    if len(set(needs)) == 1:
        with pytest.raises(UserError, match="nothing for a gate to choose"):
            image_budget.by_gate(images, Diversity(), keep, number, pressure)
        return
    stage, gate = image_budget.by_gate(images, Diversity(), keep, number, pressure)
    counts = stage.counts(tokens)
    assert (counts[0], counts[-1]) == (min(needs), max(needs))
    assert len(counts) <= number

    def mean(base: float) -> float:
        """By the formula, written out."""
        kept = []
        for image in images:
            rate = base * (0.5 + pressure) * (0.5 + 1 - image.entropy)
            rate = min(max(rate, gate.least), gate.most)
            kept.append(next(count for count in [*counts, tokens] if count >= (1 - rate) * tokens - 1e-6))
        return float(np.mean([min(count, counts[-1]) for count in kept]))

    got = np.mean(image_budget.kept([[image] for image in images], stage, gate, pressure))
    assert got == pytest.approx(mean(gate.base))
    if gate.base < 1:
        assert mean(gate.base) <= keep * tokens + 1e-9
    if gate.base > 1 / STEPS:
        assert mean(gate.base - 1 / STEPS) > keep * tokens
    assert image_budget.kept([[Image(images[0].curve, 1.0)]], stage, dataclasses.replace(gate, base=1e-4)) == [
        [counts[-1]]
    ]
    steep = dataclasses.replace(gate, base=1.0, least=gate.most)
    assert image_budget.kept([[Image(images[0].curve, 0.0)]], stage, steep, 1.0) == [[counts[0]]]  # and no token more


@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=2, max_size=7))
def test_agreement_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    images = [Image((np.arange(1, 5) >= need).astype(np.float32), float(entropy)) for entropy, need in pairs]
    got = image_budget.agreement(images, 1.0)
    ranks = []
    for values in zip(*pairs, strict=True):
        ranks.append([sum(o < v for o in values) + (sum(o == v for o in values) - 1) / 2 for v in values])
    centred = [np.array(rank) - np.mean(rank) for rank in ranks]
    size = math.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    if size == 0:
        assert math.isnan(got)
    else:
        assert got == pytest.approx((centred[0] * centred[1]).sum() / size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prompts about plain images, noisy images and both."""
    torch.set_num_threads(1)
    folder = tiny.save(tmp_path_factory.mktemp("images") / "checkpoint", count=6)
    lines = []
    for i in range(6):
        Picture.new("RGB", (tiny.IMAGE_SIZE, tiny.IMAGE_SIZE), (40 * i, 90, 120)).save(folder / f"samples/plain{i}.png")
        of = {"noisy": [f"{i}.png"], "plain": [f"plain{i}.png"], "both": [f"plain{i}.png", f"{i}.png"]}
        lines += [json.dumps({"images": names, "prompt": "what color ?", "task": task}) for task, names in of.items()]
    (folder / "samples" / sampling.FILE).write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return checkpoints.load(folder)


@pytest.mark.parametrize("method", ["diversity", "coverage", "attention"])
def test_images_are_seen_as_the_graph_sees_them(checkpoint: Checkpoint, folder: Path, method: str) -> None:
    table: dict[str, Any] = {"method": method} | ({"layers": [0]} if method == "attention" else {})
    samples = sampling.read(folder / "samples")[:3]
    found = image_budget.look(checkpoint, tiny.recipe(perception={**table, "keep": 0.5}), samples)
    assert [len(images) for images in found] == [1, 1, 2]
    vision = Vision(
        checkpoint.encoder,
        tiny.recipe(perception={**table, "quota": 1.0}),
        checkpoint.layouts[0],
        checkpoint.decoder,
    )
    for sample, images in zip(samples, found, strict=True):
        inputs = sampling.model_inputs(checkpoint, sample)
        ids = inputs["input_ids"][0]
        after = int((ids == checkpoint.image_token_id).nonzero()[-1]) + 1
        question = checkpoint.embedding[ids[after:]][None]
        guided = {"question": question, "asked": torch.ones(question.shape[:2])} if method != "diversity" else {}
        for pixels, image in zip(inputs["pixel_values"], images, strict=True):
            with torch.no_grad():
                seen = vision.compute(pixels[None], **guided)
            np.testing.assert_allclose(image.curve, seen["coverage"][0], atol=1e-5)
            assert image.entropy == pytest.approx(float(seen["entropy"][0]), abs=1e-5)


def pasted(text: str) -> Recipe:
    return parse(Recipe, {"name": "pasted", **tomllib.loads(text[text.index("[perception]") :])}, "pasted")


def test_the_command_gives_hard_images_more(folder: Path, checkpoint: Checkpoint, capsys) -> None:
    command = ["perception", str(folder), "--keep", "0.5"]
    assert command_line.main(command) == 0
    recipe = pasted(capsys.readouterr().out)
    assert recipe.perception.buckets
    assert command_line.main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    kept: dict[str, list[int]] = {}
    for image in printed["images"]:
        kept.setdefault(image["task"], []).append(image["tokens"])
        assert image["coverage"] >= recipe.perception.coverage
    assert max(kept["plain"]) < min(kept["noisy"])
    assert kept["both"][::2] == kept["plain"]
    assert kept["both"][1::2] == kept["noisy"]
    assert printed["mean"] <= 0.5 * tiny.IMAGE_TOKENS
    prompts = image_budget.look(checkpoint, recipe, sampling.read(folder / "samples"))
    again = [count for counts in image_budget.kept(prompts, recipe.perception) for count in counts]
    assert again == [image["tokens"] for image in printed["images"]]


def test_by_quota_a_prompt_shares_out_what_it_has(folder: Path, capsys) -> None:
    assert command_line.main(["perception", str(folder), "--keep", "0.5", "--by", "quota", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert pasted(printed["recipe"]).perception.quota == 0.5
    tokens = {task: [i["tokens"] for i in printed["images"] if i["task"] == task] for task in ("both", "plain")}
    assert tokens["plain"] == [tiny.IMAGE_TOKENS // 2] * 6
    for plain, noisy in zip(tokens["both"][::2], tokens["both"][1::2], strict=True):
        assert plain < noisy
        assert plain + noisy == tiny.IMAGE_TOKENS


def test_by_gate_what_entropy_cannot_tell_is_said(folder: Path, capsys) -> None:
    options = ["perception", str(folder), "--keep", "0.5", "--by", "gate", "--pressure", "1"]
    assert command_line.main([*options, "--json"]) == 0
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert pasted(printed["recipe"]).gate is not None
    assert ("cannot tell these images apart" in said.err) == (not printed["agreement"] >= 0.3)


def test_a_selector_keeps_its_knobs(folder: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[perception]\nmethod = "coverage"\nalpha = 0.25\n')
    assert command_line.main(["perception", str(folder), "--recipe", str(path)]) == 0
    stage: Any = pasted(capsys.readouterr().out).perception
    assert (stage.method, stage.alpha) == ("coverage", 0.25)


def test_samples_without_images_are_refused(folder: Path, capsys) -> None:
    text = folder / "text"
    text.mkdir()
    (text / sampling.FILE).write_text('{"images": [], "prompt": "what ?"}\n{"images": ["x.png"], "prompt": "what ?"}')
    Picture.new("RGB", (8, 8)).save(text / "x.png")
    assert command_line.main(["perception", str(folder), "--samples", str(text), "--limit", "1"]) == 2
    assert "no sample has an image" in capsys.readouterr().err
