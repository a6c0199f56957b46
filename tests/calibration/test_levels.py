"""The levels of a bundle under guard: what is judged and how, what is lightened, refused or let through, and told."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from calibration import guard as guards
from calibration import levels, samples
from calibration.guard import Guard
from calibration.lighten import changes
from calibration.samples import Sample
from engines.errors import UserError
from engines.guard import Guarded
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.recipe import Recipe
from tests.export import tiny

HARD = tiny.recipe(
    name="hard", budget={"keep": 0.2}, protect={"sinks": 0, "recent": 1}, window={"least": 2, "most": 2, "recent": 0.0}
)
OFF, LIGHT = recipes.load("off"), recipes.load("light")


@pytest.fixture(scope="module", autouse=True)
def short_answers() -> Iterator[None]:
    """A random model never ends its answer, and may repeat itself by chance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "MOST", 7)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.set_num_threads(1)
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint", count=8)
    lines = [
        {"images": [f"{i}.png"], "prompt": "what color is the shape ?", "answer": "red circle blue"} for i in range(8)
    ]
    (folder / "samples" / samples.FILE).write_text("\n".join(map(json.dumps, lines)))
    return checkpoints.load(folder)


def guarded(
    checkpoint: Checkpoint,
    *given: Recipe,
    way: str = "lighten",
    folder: Path | None = None,
    held_out: str | None = None,
) -> tuple[dict[str, Recipe], dict[str, Guarded], list[Sample], list[str]]:
    """What the guard makes of recipes, and what it says."""
    said: list[str] = []
    known = {recipe.name: recipe for recipe in given}
    found = levels.guarded(
        checkpoint, known, dict.fromkeys(known, way), folder, held_out, said.append, lambda *_: lambda: None
    )
    return *found, said


def test_a_level_that_breaks_its_limits_is_lightened_and_its_figures_are_those_of_what_is_built(
    checkpoint: Checkpoint,
) -> None:
    chosen, found, known, said = guarded(checkpoint, OFF, HARD, LIGHT)
    assert list(chosen) == ["off", "hard", "light"]
    assert (chosen["off"], chosen["light"]) == (OFF, LIGHT)
    assert found["off"] == Guarded(note=levels.UNCOMPRESSED)
    hard = found["hard"]
    assert [verdict.holds for verdict in hard.verdicts] == [False] * (len(hard.verdicts) - 1) + [True]
    assert len(hard.verdicts) > 1
    assert chosen["hard"].name == "hard"
    assert hard.lightened == changes(chosen["hard"], HARD)
    assert hard.lightened["budget.keep"] > HARD.budget.keep
    assert found["light"].lightened == {}

    calibration, held_out = samples.split(samples.read(checkpoint.path / "samples"))
    assert known == calibration
    alone = Guard(checkpoint, calibration, held_out)
    for built, kept in ((chosen["hard"], hard), (LIGHT, found["light"])):
        verdict = alone.judge(built)
        assert verdict == dataclasses.replace(kept.verdicts[-1], recipe=built.name)
    (told,) = [line for line in said if line.startswith("level hard is refused as it was given: ")]
    assert told.endswith("; ".join(hard.verdicts[0].reasons))
    assert f"level hard: {hard.line}" in said
    assert "; lightened: budget.keep = " in hard.line
    assert any(line.startswith("warning: 6 samples are few") for line in said)
    assert any(line.startswith("6 samples are few") for line in hard.verdicts[-1].warnings)


def test_a_level_is_refused_or_let_through_with_what_was_found(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match=r"recipe hard is refused: .*above.*--guard lighten.*\[guard\].*--guard warn"):
        guarded(checkpoint, OFF, HARD, way="refuse")
    chosen, found, _, said = guarded(checkpoint, OFF, HARD, way="warn")
    assert chosen["hard"] == HARD
    assert found["hard"].lightened == {}
    (verdict,) = found["hard"].verdicts
    assert not verdict.holds
    assert any(line.startswith("level hard: REFUSED on 2 held-out samples: ") for line in said)


def test_what_even_the_lightest_breaks_is_refused(checkpoint: Checkpoint) -> None:
    """No answer can gain 5 points where all were right."""
    impossible = dataclasses.replace(LIGHT, guard=dataclasses.replace(LIGHT.guard, logit_kl=0.0))
    with pytest.raises(
        UserError, match=r"recipe light is refused, even as light-lighter-\d, the lightest of it: logit KL"
    ):
        guarded(checkpoint, impossible)


@pytest.mark.parametrize("way", ["warn", "lighten"])
def test_a_model_that_computes_no_numbers_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    read = guards.Observed.read

    def ill(self: Any, *arguments: Any) -> Any:
        reading = read(self, *arguments)
        return dataclasses.replace(reading, log_probs=reading.log_probs * torch.nan) if self.state.compacts else reading

    monkeypatch.setattr(guards.Observed, "read", ill)
    with pytest.raises(UserError, match="logit KL nan nats"):
        guarded(checkpoint, LIGHT, way=way)


def test_a_recipe_for_unknown_questions_is_judged_with_the_question_later(checkpoint: Checkpoint) -> None:
    asks = dataclasses.replace(LIGHT, name="asks", unknown="talks")
    talks = dataclasses.replace(LIGHT, name="talks", unknown="talks")  # for its own unknown questions: nothing new
    _, found, _, said = guarded(
        checkpoint, asks, talks, dataclasses.replace(LIGHT, name="own", unknown="own"), way="warn"
    )
    assert {name: guard.verdicts[-1].later for name, guard in found.items()} == {
        "asks": False,
        "talks": True,
        "own": False,
    }
    calibration, held_out = samples.split(samples.read(checkpoint.path / "samples"))
    assert Guard(checkpoint, calibration, held_out).judge(talks, later=True) == found["talks"].verdicts[-1]
    assert any(line.startswith("level talks: ") and ", the question later: " in line for line in said)


def test_without_samples_a_level_is_not_guarded_and_that_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    free = dataclasses.replace(LIGHT, name="free", quantize=OFF.quantize)
    copy = shutil.copytree(checkpoint.path, tmp_path / "checkpoint")
    bare = dataclasses.replace(checkpoint, path=copy)
    one = (copy / "samples" / samples.FILE).read_text().splitlines()[0]
    (copy / "samples" / samples.FILE).write_text(one)
    _, found, known, said = guarded(bare, OFF, free)
    assert found["free"].note.startswith("not guarded: 1 samples are too few to hold some out")
    assert said[0] == f"warning: {found['free'].note}"
    assert said[1].startswith("warning: 1 samples are few")
    assert len(known) == 1
    shutil.rmtree(copy / "samples")
    chosen, found, known, said = guarded(bare, OFF, free)
    assert chosen == {"off": OFF, "free": free}
    assert found == {
        "off": Guarded(note=levels.UNCOMPRESSED),
        "free": Guarded(note=f"not guarded: no samples in {copy / 'samples'}"),
    }
    assert said == [f"warning: {found['free'].note}"]
    assert known == []
    with pytest.raises(UserError, match=r"samples\.jsonl does not exist"):
        guarded(bare, LIGHT)  # its keys are calibrated
    with pytest.raises(UserError, match=r"samples\.jsonl does not exist"):
        guarded(bare, free, folder=tmp_path)


def test_samples_of_ones_own_may_be_held_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"samples\.jsonl does not exist"):
        guarded(checkpoint, LIGHT, held_out=str(tmp_path))
    others = tmp_path / "others"
    tiny.samples(others, 5)
    with pytest.raises(UserError, match=r"5 of 5 samples of --held-out share an image"):
        guarded(checkpoint, LIGHT, held_out=str(others))
    for i in range(3):
        Image.fromarray(tiny.picture(100 + i)).save(others / f"{i}.png")
    _, found, known, said = guarded(checkpoint, LIGHT, held_out=str(others))
    assert said[0].startswith("warning: 2 of 5 samples of --held-out share an image")
    assert len(known) == 8
    (verdict,) = found["light"].verdicts
    assert (verdict.calibrated, verdict.held_out) == (8, 3)


def test_off_reads_samples_only_where_they_are_needed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bare = dataclasses.replace(checkpoint, path=tmp_path)
    assert guarded(bare, OFF)[1:] == ({"off": Guarded(note=levels.UNCOMPRESSED)}, [], [])
    _, found, known, said = guarded(checkpoint, OFF, HARD, LIGHT, way="off")
    assert [found[name].note for name in ("hard", "light")] == ["not guarded: off"] * 2
    assert (len(known), said) == (8, [])


def test_a_recipe_that_leaves_no_room_is_named_before_anything_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "Guard", None)
    with pytest.raises(UserError, match=r"the guard cannot judge recipe tight: .*kv_bytes = 0.001 .*--guard off"):
        guarded(checkpoint, tiny.recipe(name="tight", budget={"kv_bytes": 0.001}))


def test_a_recipe_that_cannot_be_judged_is_named(checkpoint: Checkpoint) -> None:
    short = tiny.recipe(name="short", window={"least": 2, "most": 2, "recent": 0.0, "compact": False})
    with pytest.raises(UserError, match=r"the guard cannot judge recipe short: recipe short ends with .*--guard off"):
        guarded(checkpoint, short)
