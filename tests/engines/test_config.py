from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config import parse, read_json
from engines.errors import UserError


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: Inner
    maybe: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    table: dict[str, list[float]] = field(default_factory=dict)
    pair: tuple[int, ...] = ()
    anything: Any = None
    on: bool = False
    number: Literal[1, 2] = 1


MINIMAL: dict[str, Any] = {"name": "x", "kind": "a", "inner": {"size": 1}}

sizes = st.integers(1 - 2**53, 2**53 - 1)
inners = st.builds(Inner, st.integers(0, 9), st.floats(0, 1))
outers = st.builds(
    Outer,
    st.text(),
    st.sampled_from(["a", "b"]),
    inners,
    st.none() | inners,
    st.lists(inners),
    st.dictionaries(st.text(), st.lists(st.floats(allow_nan=False, allow_infinity=False))),
    st.lists(sizes).map(tuple),
    st.none() | sizes | st.lists(st.text()),
    st.booleans(),
)


@given(outers)
def test_what_is_written_is_read_back(value: Outer) -> None:
    assert parse(Outer, json.loads(json.dumps(dataclasses.asdict(value))), "x") == value


def test_defaults_are_the_classes() -> None:
    assert parse(Outer, MINIMAL, "x") == Outer("x", "a", Inner(1))


def test_whole_numbers_are_floats_where_a_float_is_wanted() -> None:
    rate = parse(Inner, {"size": 1, "rate": 1}, "x").rate
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nmae": "x"}, "recipe.toml: unknown key 'nmae'; known keys: name, kind"),
        ({"inner": {"size": 1, "sise": 2}}, "recipe.toml.inner: unknown key 'sise'"),
        ({"inner": {}}, "recipe.toml.inner: missing key 'size'"),
        ({"inner": 3}, "recipe.toml.inner: expected a table, got 3"),
        ({"inner": None}, "recipe.toml.inner: expected a table, got None"),
        ({"inner": {"size": -1}}, "recipe.toml.inner: size must not be negative, got -1"),
        ({"inner": {"size": 1.5}}, "recipe.toml.inner.size: expected int, got 1.5"),
        ({"inner": {"size": True}}, "recipe.toml.inner.size: expected int, got True"),
        ({"inner": {"size": 1, "rate": True}}, "recipe.toml.inner.rate: expected float, got True"),
        ({"inner": {"size": 1, "rate": "1"}}, "recipe.toml.inner.rate: expected float, got '1'"),
        ({"kind": "c"}, "recipe.toml.kind: 'c' is none of 'a', 'b'"),
        ({"kind": ["a"]}, "recipe.toml.kind: ['a'] is none of"),
        ({"name": None}, "recipe.toml.name: expected str, got None"),
        ({"maybe": 1}, "recipe.toml.maybe: expected a table"),
        ({"many": {"size": 1}}, "recipe.toml.many: expected a list"),
        ({"many": [{"size": 1}, {"size": "2"}]}, "recipe.toml.many[1].size: expected int"),
        ({"table": [1]}, "recipe.toml.table: expected a table"),
        ({"table": {"k": [1, "2"]}}, "recipe.toml.table.k[1]: expected float"),
        ({"pair": "12"}, "recipe.toml.pair: expected a list"),
        ({"on": 1}, "recipe.toml.on: expected bool, got 1"),
        ({"number": 2.0}, "recipe.toml.number: 2.0 is none of 1, 2"),
        ({"number": True}, "recipe.toml.number: True is none of 1, 2"),
    ],
)
def test_mistake_names_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(Outer, MINIMAL | change, "recipe.toml")
    assert message in str(error.value)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_not_a_table(data: Any) -> None:
    with pytest.raises(UserError, match="expected a table"):
        parse(Outer, data, "x")


def test_read_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "é"}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": "é"}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_read_json_of_something_else(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not JSON"):
        read_json(tmp_path / "a.json")


def test_read_json_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.json: cannot be read: No such file"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path)
