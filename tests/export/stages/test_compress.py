"""What holds of every recipe: any importance, modality and merge together keep the right tokens of any cache."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.config import parse
from export.compress import Compress, KeyStatistics
from export.recipe import Recipe
from export.stages import importance, merge, modality
from export.stages.tokens import Tokens
from tests.export.stages.strategies import cached


def methods(union: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = [typing.get_args(typing.get_type_hints(kind)["method"])[0] for kind in typing.get_args(union)]
    return st.sampled_from([{"method": name} for name in names])


BY_CONTENT = ["h2o", "decayed", "frequency", "expected-attention", "keydiff", "knorm", "value-norm"]  # not by place

tables = st.fixed_dictionaries(
    {
        "importance": methods(importance.Methods),
        "modality": methods(modality.Methods),
        "merge": methods(merge.Methods),
        "protect": st.fixed_dictionaries(
            {
                "sinks": st.integers(0, 3),
                "recent": st.integers(0, 3),
                "sentence_first": st.booleans(),
                "discount": st.sampled_from([0.0, 0.5, 1.0]),
            }
        ),
    }
)


def compress(settings: dict[str, Any], capacity: int, tokens: Tokens) -> Compress:
    heads, head_dim = tokens.key.shape[1], tokens.key.shape[3]
    absmax = torch.full((heads, head_dim), 4.0)
    statistics = KeyStatistics(torch.zeros(heads, head_dim), absmax, value_absmax=absmax)
    return Compress(parse(Recipe, {"name": "any", **settings}, "any"), capacity, 0.5, statistics)


@given(tokens=cached(), settings=tables, capacity=st.integers(1, 31))
def test_the_right_number_in_order_no_padding_and_all_that_is_protected(
    tokens: Tokens, settings: dict[str, Any], capacity: int
) -> None:
    kept, index = compress(settings, capacity, tokens).select(tokens)
    sinks, recent = (settings["protect"][name] for name in ("sinks", "recent"))
    count, real, positions = tokens.key.shape[2], tokens.real.numpy(), tokens.positions.numpy()
    assert index.shape == (*real.shape[:2], capacity)
    assert (index.diff(dim=-1) > 0).all()
    assert index.min() >= 0
    assert index.max() < max(count, capacity)
    for b, h in np.ndindex(*real.shape[:2]):
        mine = {int(i) for i in index[b, h] if i < count and real[b, h, i]}
        assert len(mine) == min(capacity, int(real[b, h].sum()))  # no padding while a token is dropped
        assert int(kept.real[b, h].sum()) == len(mine)
        ends = positions[b, h] < sinks, positions[b, h] > positions[b, h].max() - recent
        protected = set(np.flatnonzero(real[b, h] & (ends[0] | ends[1])).tolist())
        assert protected <= mine if len(protected) <= capacity else mine <= protected
    for name in ("key", "value", "mass"):
        assert getattr(kept, name).isfinite().all(), name
    assert not kept.bias.isnan().any()
    inside = np.where(index < count, index, 0)
    where = np.where(kept.real, np.take_along_axis(positions, inside, 2), 0)
    np.testing.assert_array_equal(np.where(kept.real, kept.positions, 0), where)  # original positions, not renumbered


@given(tokens=cached(), settings=tables, capacity=st.integers(1, 31))
def test_a_batch_is_its_samples(tokens: Tokens, settings: dict[str, Any], capacity: int) -> None:
    stage = compress(settings, capacity, tokens)
    kept, index = stage.select(tokens)
    for b in range(tokens.key.shape[0]):
        rows = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
        one = Tokens(**{name: row[b : b + 1] for name, row in rows.items() if row is not None})
        alone, its = stage.select(one)
        np.testing.assert_array_equal(index[b], its[0])
        for name in ("key", "value", "bias", "mass"):
            torch.testing.assert_close(getattr(kept, name)[b], getattr(alone, name)[0], atol=1e-5, rtol=1e-5)


@given(tokens=cached(), settings=tables, capacity=st.integers(1, 31), scored=st.sampled_from(BY_CONTENT))
def test_of_equal_tokens_the_first_are_kept(
    tokens: Tokens, settings: dict[str, Any], capacity: int, scored: str
) -> None:
    rows = {name: torch.ones_like(getattr(tokens, name)) for name in ("key", "value", "mass", "kinds")}
    equal = dataclasses.replace(tokens, **rows, marks=torch.zeros_like(tokens.marks))
    settings = {**settings, "importance": {"method": scored}, "protect": {"sinks": 0, "recent": 0}}
    _, index = compress(settings, capacity, equal).select(equal)
    for b, h in np.ndindex(*tokens.real.shape[:2]):
        real = np.flatnonzero(tokens.real[b, h])
        kept = np.intersect1d(index[b, h], real)
        np.testing.assert_array_equal(kept, real[: len(kept)])


ROWS = ({"method": "int8"}, {"method": "per-head"}, {"method": "per-token", "bits": 4}, {"method": "float16"})
NO_ROWS = ({"method": "int4"}, {"method": "k8v4"}, {"method": "mixed"}, {"method": "kivi"})


@pytest.mark.parametrize("quantize", ROWS, ids=str)
@given(tokens=cached(), settings=tables, capacity=st.integers(1, 31))
def test_rows_that_move_are_what_quantizing_them_again_makes(
    quantize: dict[str, Any], tokens: Tokens, settings: dict[str, Any], capacity: int
) -> None:
    settings = {**settings, "merge": {"method": "evict"}, "quantize": quantize}
    stage = compress(settings, min(capacity, tokens.key.shape[2]), tokens)
    assert stage.moves
    stored = stage.quantize.quantize(tokens)
    key, value = stage.quantize.restore(stored, tokens.key.shape[3])
    restored = dataclasses.replace(tokens, key=key, value=value)
    moved, again = stage(restored, stored), stage(restored)
    assert moved.keys() == again.keys()
    real = again["store_bias"] > -1e4
    for name, want in again.items():
        torch.testing.assert_close(moved[name][real].float(), want[real].float(), atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("quantize", [*NO_ROWS, {"method": "int8"}], ids=str)
def test_rows_do_not_move_where_others_share_their_scale_or_become_part_of_them(quantize: dict[str, Any]) -> None:
    tokens = Tokens(*(torch.zeros(1, 1, 4, 8) for _ in "kv"), *(torch.zeros(1, 1, 4) for _ in "pkbm"))
    merge = {"method": "three-way" if quantize["method"] == "int8" else "evict"}
    assert not compress({"quantize": quantize, "merge": merge}, 2, tokens).moves
