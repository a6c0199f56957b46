"""What fuzz tests share: how many cases they try, and what may become of bytes and of JSON.

Few cases where every change is tested, and thousands with  FUZZ=20 pytest -k fuzz
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SECONDS = 30  # that no case may take, however busy the machine is: it hangs, or would with a little more

TIMES = int(os.environ.get("FUZZ", 1))


def examples(count: int) -> settings:
    """Decorates a test that tries `count` cases, or `TIMES` as many."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count * TIMES, deadline=1000 * SECONDS, suppress_health_check=slow)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Other bytes: flipped, cut off, cut out, longer, in another order, or something else altogether."""
    kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "out", "longer", "in", "twice", "zero", "other"]))
    if kind == "other" or not content:
        return draw(st.binary(max_size=200).filter(lambda other: other != content))
    start, length = draw(st.integers(0, len(content) - 1)), draw(st.integers(1, 64))
    before, behind = content[:start], content[start + length :]
    if kind == "flip":
        places = {start, *draw(st.lists(st.integers(0, len(content) - 1), max_size=3))}
        changed = bytearray(content)
        for place in places:
            changed[place] ^= draw(st.integers(1, 255))
        return bytes(changed)
    if kind in ("longer", "in"):
        more = draw(st.binary(min_size=1, max_size=64))
        return content + more if kind == "longer" else before + more + content[start:]
    other = {"cut": before, "out": before + behind, "twice": content[: start + length] + content[start:]}
    other["zero"] = before + bytes(len(content) - len(before) - len(behind)) + behind
    return other[kind] if other[kind] != content else content + b"\0"


NAMES = ["", "../up", "/etc/passwd", "a\0b", "\ud800", "a" * 5000, "nan", "weights.bin", "{{ 1 }}", "<image>"]
NUMBERS = [0, -1, 2**31, 2**53, 2**63, -(2**63) - 1, 10**400, 1e308, float("inf"), float("nan"), 0.5, True]
ODD = st.one_of(
    st.sampled_from([None, [], {}, *NAMES]),
    st.sampled_from(NUMBERS),
    st.integers(-300, 300),
    st.text(max_size=5),
    st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
)


@st.composite
def mutated(draw: st.DrawFn, data: Any) -> Any:
    """JSON of which one to three places hold something else, are gone, stand twice or have another name."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        places = [*_places(data)]
        if not places:
            break
        parent, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["set", "set", "set", "gone", "twice", "named"]))
        if kind == "gone":
            del parent[key]
        elif kind == "set":
            parent[key] = draw(ODD)
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[draw(st.sampled_from([*parent, *NAMES]))] = parent.pop(key) if kind == "named" else parent[key]
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it; of long lists the first places, which are like the others."""
    for key in [*data][:20] if isinstance(data, dict) else range(min(len(data), 4)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])
