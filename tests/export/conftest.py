"""Models that the tests share: a tiny random one with grouped-query heads, and the demo checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from tests.export import tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's folder, never to be changed: tests that damage one copy it."""
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def checkpoint(tiny_path: Path) -> Checkpoint:
    return checkpoints.load(tiny_path)


@pytest.fixture(scope="session")
def reference(tiny_path: Path) -> Any:
    """The tiny model with Hugging Face's own eager attention."""
    return _hugging_face(tiny_path)


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    return checkpoints.load(DEMO)


@pytest.fixture(scope="session")
def demo_reference() -> Any:
    return _hugging_face(DEMO)


def _hugging_face(path: Path) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # the tests compare what comes after the end token too
    return model
