"""No session's file, damaged or forged, is more than a UserError: FUZZ=20 tries so many times more of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UserError
from runtime import session as sessions
from runtime import tensors
from runtime.model import VLM
from runtime.session import Session
from tests.fuzz import examples


@examples(100)
@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_told(place: float, bit: int, saved: Path, tight: VLM) -> None:
    content = bytearray(saved.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    damaged = saved.with_name("damaged")
    damaged.write_bytes(content)
    with pytest.raises(UserError, match="damaged: no session, or damaged: ") as error:
        Session.load(tight, damaged)
    assert "\n" not in str(error.value)


@examples(100)
@given(content=st.binary(max_size=200) | st.integers(0, 10**4))
def test_what_is_no_session_is_told(content: bytes | int, saved: Path, tight: VLM) -> None:
    """Some bytes, a header that promises much, or the file as far as it was written."""
    other = saved.with_name("other")
    cut = saved.read_bytes()
    other.write_bytes(content if isinstance(content, bytes) else cut[: min(content, len(cut) - 1)])
    with pytest.raises(UserError, match="other: no session, or damaged"):
        Session.load(tight, other)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@examples(100)
@given(field=st.sampled_from([f.name for f in dataclasses.fields(sessions.Saved)]), value=JSON)
def test_a_forged_file_is_told_or_harmless(field: str, value: Any, saved: Path, tight: VLM) -> None:
    arrays, metadata = tensors.read(saved, "session", 1 << 30)
    forged = {**json.loads(metadata["session"]), field: value}
    path = saved.with_name("forged")
    tensors.write(path, arrays, metadata | {"session": json.dumps(forged)})
    with contextlib.suppress(UserError):
        Session.load(tight, path).ask("big", max_new_tokens=2)


@examples(100)
@given(data=st.data())
def test_forged_tensors_are_told_or_harmless(data: st.DataObject, saved: Path, tight: VLM) -> None:
    """Values that no session has, under a hash that fits; compacting and answering take them as they are."""
    arrays, metadata = tensors.read(saved, "session", 1 << 30)
    array = arrays[data.draw(st.sampled_from(sorted(arrays)))].reshape(-1)
    worst = [np.nan, np.inf, -np.inf, 1e38] if array.dtype.kind == "f" else [np.iinfo(array.dtype).min, -2, 10**6]
    with np.errstate(all="ignore"):
        value = np.array(data.draw(st.sampled_from([*worst, 0, -1, 1]))).astype(array.dtype)
    array[data.draw(st.sampled_from([slice(None), slice(0, 1), slice(-1, None)]))] = value
    path = saved.with_name("tensors")
    tensors.write(path, arrays, metadata)
    with contextlib.suppress(UserError):
        assert Session.load(tight, path).ask("is it red", max_new_tokens=9, ignore_eos=True).tokens
