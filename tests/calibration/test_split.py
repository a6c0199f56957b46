"""What is held out: chosen by the seed, and never an image that calibration sees."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibration import samples
from calibration.samples import Sample
from engines.errors import UserError
from tests.export import tiny


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tiny.samples(tmp_path_factory.mktemp("split") / "samples", 8)
    return [folder / f"{i}.png" for i in range(8)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 7), max_size=2), min_size=2, max_size=12),
    st.integers(0, 9),
    st.sampled_from([0.1, 0.25, 0.5]),
)
def test_no_image_is_on_both_sides(images: list[Path], chosen: list[list[int]], seed: int, share: float) -> None:
    given = [Sample([images[i] for i in own], f"question {n} ?") for n, own in enumerate(chosen)]
    try:
        calibration, held = samples.split(given, seed, share)
    except UserError:  # all of them hang together, or all are needed
        return
    assert sorted(s.prompt for s in (*calibration, *held)) == sorted(s.prompt for s in given)
    assert [s for s in given if s in held] == held
    assert len(held) >= share * len(given)
    sides = [{path for s in side for path in s.images} for side in (calibration, held)]
    assert not sides[0] & sides[1]
    assert samples.split(given, seed, share) == (calibration, held)
    shuffled = random.Random(seed).sample(given, len(given))
    assert {s.prompt for s in samples.split(shuffled, seed, share)[1]} == {s.prompt for s in held}


def test_the_seed_chooses_and_names_of_files_do_not(images: list[Path], tmp_path: Path) -> None:
    given = [Sample([path], "what ?") for path in images]
    found = {tuple(s.images[0].name for s in samples.split(given, seed)[1]) for seed in range(20)}
    assert len(found) > 5
    assert all(len(held) == 2 for held in found)
    copies = [tmp_path / f"copy-{path.name}" for path in images]
    for path, copy in zip(images, copies, strict=True):
        shutil.copy(path, copy)
    held = samples.split([Sample([path], "what ?") for path in copies])[1]
    assert [s.images[0].name for s in held] == [f"copy-{s.images[0].name}" for s in samples.split(given)[1]]
    both = [*given, *(Sample([path], "and this ?") for path in copies)]
    calibration, held = samples.split(both)
    assert len(held) == 4
    assert {s.images[0].name.removeprefix("copy-") for s in held}.isdisjoint(
        s.images[0].name.removeprefix("copy-") for s in calibration
    )


def test_held_out_samples_that_calibration_has_seen_are_left_out(images: list[Path], tmp_path: Path) -> None:
    copy = Path(shutil.copy(images[0], tmp_path / "copy.png"))
    known = [Sample([images[0]], "what ?"), Sample([], "how many ?")]
    others = [Sample([copy, images[2]], "and this ?"), Sample([images[1]], "what ?"), Sample([], "how many ?")]
    left, (warning,) = samples.apart(known, others)
    assert left == others[1:2]
    assert warning.startswith("2 of 3 samples of --held-out share an image")
    assert samples.apart(known, left) == (left, [])
    with pytest.raises(UserError, match=r"2 of 2 samples of --held-out share an image .*: give others"):
        samples.apart(known, known)


def test_one_image_cannot_be_split(images: list[Path]) -> None:
    with pytest.raises(UserError, match="3 samples are too few to hold some out"):
        samples.split([Sample([images[0]], str(i)) for i in range(3)])
