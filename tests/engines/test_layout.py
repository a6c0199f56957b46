"""What no layout can be."""

from __future__ import annotations

from typing import Any

import pytest

from engines.config import parse
from engines.errors import UserError
from engines.layout import Layout

RIGHT: dict[str, Any] = {
    "name": "4x6", "height": 4, "width": 6, "pixel_values": [24, 8], "text": "<i><i>", "tokens": 2, "grid": [1, 4, 6],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "6x4"}, "a layout of 4 x 6 must bear that name, got '6x4'"),
        ({"name": "0x6", "height": 0}, "layout 0x6 needs a size"),
        ({"tokens": 0}, "at least one token"),
        ({"text": ""}, "needs a size, a text"),
        ({"pixel_values": []}, r"pixel_values of the shape \[\]"),
        ({"pixel_values": [1, 3, 0, 6]}, r"the shape \[1, 3, 0, 6\]"),
        ({"grid": [4, 6]}, r"a grid of \[4, 6\]"),
        ({"grid": [1, 0, 6]}, r"a grid of \[1, 0, 6\]"),
    ],
)
def test_what_no_layout_can_be(change: dict[str, Any], message: str) -> None:
    assert parse(Layout, RIGHT, "it").tokens == 2
    with pytest.raises(UserError, match=message):
        parse(Layout, RIGHT | change, "it")
