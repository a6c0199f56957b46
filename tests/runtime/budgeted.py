"""What the tests of the memory budget share beside their fixtures."""

from __future__ import annotations

from gc import collect

import pytest

from runtime import memory
from runtime.model import VLM


def bare(patch: pytest.MonkeyPatch) -> None:
    """Nothing is done to the real process."""
    for name in ("settle", "populate"):
        patch.setattr(memory, name, lambda *_: None)
    patch.setattr(memory.gc, "collect", lambda: 0)


def reserved(vlm: VLM) -> int:
    """Bytes in use beside what is resident."""
    assert vlm.memory
    collect()
    return vlm.memory.in_use() - memory.resident()
