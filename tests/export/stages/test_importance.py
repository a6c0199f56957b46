"""What every importance measure must hold, and the knobs that it refuses."""

from __future__ import annotations

import dataclasses
import re
import typing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.config import parse
from engines.errors import UserError
from export.recipe import Recipe
from export.stages import importance
from export.stages.importance import Decayed, ExpectedAttention, Frequency, Random, Signals, SnapKV, VLCache
from export.stages.importance.importance import Importance
from export.stages.tokens import PADDING, Tokens
from tests.export.stages.prompts import Prompt, prompts
from tests.export.stages.strategies import cached, tokens_of

METHODS: tuple[type[Importance], ...] = typing.get_args(importance.Methods)
OBSERVING = [method for method in METHODS if method().observers(9)]
DEPTHS = (0.0, 0.5, 0.9)
every = pytest.mark.parametrize("method", METHODS)
observing = pytest.mark.parametrize("method", OBSERVING)


def rows(tokens: Tokens, part: slice) -> Tokens:
    """Some of the batch."""
    fields = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
    return Tokens(**{name: rows[part] if name != "center" else rows for name, rows in fields.items()})


@every
@given(tokens=cached())
def test_scores_are_finite_and_one_a_token(method: type[Importance], tokens: Tokens) -> None:
    for depth in DEPTHS:
        score = method()(tokens, depth)
        assert score.dtype == torch.float32
        assert score.shape == tokens.mass.shape
        assert score.isfinite().all()


@every
@given(tokens=cached())
def test_a_batch_of_two_scores_as_two_single_ones(method: type[Importance], tokens: Tokens) -> None:
    together = method()(tokens, 0.5)
    for i in range(len(together)):
        torch.testing.assert_close(together[i : i + 1], method()(rows(tokens, slice(i, i + 1)), 0.5))


@every
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("rows", [torch.zeros, torch.ones])
def test_equal_tokens_and_padding_alone_score_finite(
    method: type[Importance], rows: typing.Callable[..., torch.Tensor], count: int
) -> None:
    same = tokens_of(rows(1, 2, count, 64), rows(1, 2, count, 64))
    empty = dataclasses.replace(
        same,
        positions=torch.full_like(same.positions, -1),
        kinds=torch.full_like(same.kinds, PADDING),
        bias=torch.full_like(same.bias, -torch.inf),
        mass=torch.zeros_like(same.mass),
    )
    for tokens in (same, empty):
        for depth in DEPTHS:
            assert method()(tokens, depth).isfinite().all()


@every
@given(tokens=cached())
def test_centring_the_keys_changes_no_score(method: type[Importance], tokens: Tokens) -> None:
    center = torch.linspace(-2, 2, tokens.key.shape[-1]).expand(tokens.key.shape[1], 1, -1)
    centred = dataclasses.replace(tokens, key=tokens.key - center, center=center)
    torch.testing.assert_close(method()(centred, 0.5), method()(tokens, 0.5), atol=1e-5, rtol=1e-5)


@observing
@given(prompt=prompts())
def test_mass_is_finite_and_padding_receives_nothing(method: type[Importance], prompt: Prompt) -> None:
    mass = prompt.observe(method())
    assert mass.shape == prompt.key.shape[:3]
    assert np.isfinite(mass).all()
    assert (mass >= 0).all()
    assert not (mass * ~prompt.real[:, None]).any()


@observing
@given(prompt=prompts(), seed=st.integers(0, 99))
def test_the_order_of_query_heads_in_a_group_does_not_matter(
    method: type[Importance], prompt: Prompt, seed: int
) -> None:
    heads = np.arange(prompt.query.shape[1]).reshape(-1, prompt.group)
    order = np.random.default_rng(seed).permuted(heads, axis=1).ravel()
    shuffled = dataclasses.replace(prompt, query=prompt.query[:, order])
    np.testing.assert_allclose(shuffled.observe(method()), prompt.observe(method()), atol=1e-5, rtol=1e-4)


@observing
@given(prompt=prompts())
def test_a_batch_of_two_is_observed_as_two_single_prompts(method: type[Importance], prompt: Prompt) -> None:
    together = prompt.observe(method())
    for i in range(len(together)):
        np.testing.assert_allclose(together[i : i + 1], prompt.only(i).observe(method()), atol=1e-5, rtol=1e-4)


@observing
@given(prompt=prompts(), more=st.integers(1, 5))
def test_more_padding_changes_nothing(method: type[Importance], prompt: Prompt, more: int) -> None:
    def left(array: np.ndarray, axis: int, fill: int) -> np.ndarray:
        widths = [(more if i == axis else 0, 0) for i in range(array.ndim)]
        return np.pad(array, widths, constant_values=fill)

    longer = dataclasses.replace(
        prompt,
        query=left(prompt.query, 2, 1),
        key=left(prompt.key, 2, 1),
        value=left(prompt.value, 2, 1),
        kinds=left(prompt.kinds, 1, PADDING),
        positions=left(prompt.positions, 1, -1),
    )
    np.testing.assert_allclose(longer.observe(method())[..., more:], prompt.observe(method()), atol=1e-5, rtol=1e-4)


@every
def test_a_recipe_selects_it_by_name(method: type[Importance]) -> None:
    name = typing.get_args(typing.get_type_hints(method)["method"])[0]
    assert dataclasses.fields(method)[-1].name == "method"  # type: ignore[arg-type]
    recipe = parse(Recipe, {"name": "test", "importance": {"method": name}}, "test")
    assert type(recipe.importance) is method
    assert parse(Recipe, recipe.settings(), "test").importance.method == name


def test_snapkv_is_the_default() -> None:
    assert METHODS[0] is SnapKV
    assert type(parse(Recipe, {"name": "test", "importance": {"window": 4}}, "test").importance) is SnapKV
    with pytest.raises(UserError, match="no method 'snap'"):
        parse(Recipe, {"name": "test", "importance": {"method": "snap"}}, "test")


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        *(
            (method, field, value)
            for method in (SnapKV, VLCache, Signals)
            for field, value in [("window", 0), ("pool", 4)]
        ),
        (SnapKV, "pool", 0),
        (Signals, "neighbours", 0),
        (Decayed, "gamma", 0.0),
        (Decayed, "gamma", 1.1),
        (Decayed, "window", 0),
        (Frequency, "share", 0.0),
        (Frequency, "share", 1.5),
        (Frequency, "window", 0),
        (ExpectedAttention, "future", 0),
        (ExpectedAttention, "future", 10**9),
        (Signals, "neighbours", 10**9),
        (Signals, "recency", 1e31),
        (Signals, "attention", -1e31),
        (ExpectedAttention, "sinks", -1),
        (Random, "seed", -1),
    ],
)
def test_importance_refuses(method: type[Importance], field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*, got {re.escape(str(value))}"):
        method(**{field: value})
