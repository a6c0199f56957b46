"""What each layer needs: losses read from real caches, and budgets that no other split beats."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration import __main__ as command_line
from calibration import samples, sensitivity
from calibration.evaluate import Eager, Prompt, prompt_of
from calibration.sensitivity import RATIOS, allocate, continued, kept, spend, whole_cache
from engines.config import parse
from engines.errors import UserError
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from export.stages.budget import Measured

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
SLOTS = [9, 30, 5, 82, 1, 40]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return checkpoints.load(DEMO)


@pytest.fixture(scope="module")
def prompt(checkpoint: Checkpoint) -> Prompt:
    sample = samples.read(DEMO / "samples")[0]
    return prompt_of(checkpoint, samples.model_inputs(checkpoint, sample))


def recipe(**tables: Any) -> Recipe:
    window = {"least": 8, "most": 8, "recent": 0.0, "compact": False, "dtype": "float32"}
    return parse(Recipe, {"name": "a", "quantize": {"method": "float32"}, "window": window, **tables}, "a")


def best(losses: np.ndarray, ratios: Sequence[float], units: int, first: int, unit: int) -> float:
    """The least sum of losses of all splits, tried one by one."""
    monotone = [[min(row[: i + 1]) for i in range(len(row))] for row in losses]
    sums = []
    for split in itertools.product(range(first, unit + 1), repeat=len(losses)):
        if sum(split) <= units:
            sums.append(sum(np.interp(n / unit, ratios, row) for n, row in zip(split, monotone, strict=True)))
    return min(sums)


@given(st.data())
def test_no_other_split_of_the_units_loses_less(data: st.DataObject) -> None:
    layers, unit = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 9))
    ratios = [*sorted(data.draw(st.sets(st.sampled_from([0.05, 0.2, 0.3, 0.6, 0.9]), max_size=3))), 1.0]
    rows = st.lists(st.integers(0, 9), min_size=len(ratios), max_size=len(ratios))
    losses = np.array(data.draw(st.lists(rows, min_size=layers, max_size=layers)), dtype=float)
    first = data.draw(st.integers(1, 2))
    units = data.draw(st.integers(layers * first, layers * unit + 2))
    spent = spend(losses, ratios, units, first, unit)
    assert sum(spent) <= units
    assert all(first <= units <= unit for units in spent)
    monotone = np.minimum.accumulate(losses, axis=1)
    loss = sum(np.interp(n / unit, ratios, row) for n, row in zip(spent, monotone, strict=True))
    np.testing.assert_allclose(loss, best(losses, ratios, units, first, unit), atol=1e-9)


def test_a_layer_that_needs_nothing_gets_the_least_and_the_shares_add_up() -> None:
    losses = np.array([[5.0, 3.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.1, 0.0]])
    shares = allocate(losses, [0.05, 0.25, 1.0], keep=0.3, least=0.1)
    assert sum(shares) == pytest.approx(3 * 0.3)
    assert shares[0] > shares[2] > shares[1] >= 0.1
    greedy = allocate(np.array([[9.0, 8.0, 0.0]] + [[0.1, 0.0, 0.0]] * 2), [0.05, 0.25, 1.0], keep=0.9, least=0.01)
    assert greedy[0] == 1.0  # and what it cannot take goes to the others
    assert greedy[1:] == pytest.approx([0.85, 0.85])
    with pytest.raises(UserError, match=r"keep = 0.05 leaves less"):
        allocate(losses, [0.05, 0.25, 1.0], keep=0.05, least=0.1)


@pytest.mark.parametrize("split", [1, 40, 81])
def test_reading_on_from_the_whole_cache_is_reading_it_all(checkpoint: Checkpoint, prompt: Prompt, split: int) -> None:
    cache, _ = whole_cache(checkpoint.decoder, recipe(), prompt, split)
    logits = continued(checkpoint.decoder, cache, prompt.embeddings[None, split:], split)
    all_of_it = whole_cache(checkpoint.decoder, recipe(), prompt, len(prompt))[1]
    torch.testing.assert_close(logits[:, -1], all_of_it, atol=1e-4, rtol=1e-4)


def test_a_compressed_cache_says_what_prefill_and_decode_say(checkpoint: Checkpoint, prompt: Prompt) -> None:
    shares = {"method": "measured", "keep": sum(SLOTS) / 6 / len(prompt), "shares": [float(slots) for slots in SLOTS]}
    chosen = recipe(importance={"method": "keydiff"}, budget=shares, protect={"sinks": 1, "recent": 2})
    decoder, answer = checkpoint.decoder, [7, 30, 99, 7]
    eager = Eager(decoder, chosen, len(prompt))
    assert eager.state.capacities == SLOTS
    eager.prefill([prompt])
    rest = checkpoint.embedding[answer]
    steps = [eager.decode(row[None], [len(prompt) + i]) for i, row in enumerate(rest)]

    cache, _ = whole_cache(decoder, chosen, prompt, len(prompt))
    stores = [kept(chosen, cache[layer], slots, layer / 6) for layer, slots in enumerate(SLOTS)]
    assert [store.key.shape[2] for store in stores] == SLOTS
    torch.testing.assert_close(
        continued(decoder, stores, rest[None], len(prompt))[0], torch.cat(steps), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("later", [False, True])
def test_the_whole_cache_loses_nothing_and_an_empty_one_much(checkpoint: Checkpoint, later: bool) -> None:
    few = samples.read(DEMO / "samples")[:2]
    losses = sensitivity.measure(checkpoint, recipe(), few, later, ratios=(1 / 64, 1.0))
    assert losses.shape == (6, 2)
    assert (abs(losses[:, 1]) < 1e-4).all()
    assert (losses[:, 0] > -1e-4).all()
    assert losses[:, 0].max() > 1


def test_text_alone_cannot_be_compressed_before_the_question(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match="no sample has an image"):
        sensitivity.measure(checkpoint, recipe(), [samples.Sample([], "what is it ?")], later=True)


def test_from_command_to_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["sensitivity", str(DEMO), "--limit", "1", "--keep", "0.25", "--least", "0.02"]) == 0
    table, fragment = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 2 + 6
    assert len(table.splitlines()[1].split()) == 1 + len(RATIOS)
    budget = parse(Recipe, {"name": "a"} | tomllib.loads(fragment), "a").budget
    assert isinstance(budget, Measured)
    assert budget.keep == 0.25
    assert sum(budget.shares) / 6 == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["sensitivity", "nowhere"], "nowhere"),
        (["sensitivity", str(DEMO), "--keep", "2"], "must be a number from 0 to 1, got '2'"),
        (["sensitivity", str(DEMO), "--keep", "much"], "must be a number from 0 to 1, got 'much'"),
        (["sensitivity", str(DEMO), "--keep", "0"], "keep = 0.0 leaves less than"),
        (["sensitivity", str(DEMO), "--keep", "0.1", "--least", "0.5"], "keep = 0.1 leaves less than"),
        (["sensitivity", str(DEMO), "--recipe", "nothing"], "no recipe 'nothing'"),
        (["sensitivity", str(DEMO), "--samples", "nowhere"], "samples.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
