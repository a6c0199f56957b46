"""Questions and images for the toy bundle, and a recorder of what the runtime's sessions were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime import backends
from runtime.generate import Result
from runtime.model import VLM
from tests.runtime import toy


def image(seed: int) -> np.ndarray:
    """Of the size that the vision graph takes, so that resizing leaves it as it is."""
    return np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)


def patchy(seed: int) -> np.ndarray:
    """Of patches that differ more, so that some images need fewer of them than others."""
    grey = np.random.default_rng(seed).integers(0, 220, (2, 2, 1)).repeat(4, 0).repeat(4, 1)
    return (grey + image(seed) // 8).astype(np.uint8)


def ids_of(question: str, images: int) -> list[int]:
    places = "".join(f" image {k + 1} : <image>" for k in range(images))
    return [toy.WORDS.index(word) for word in f"<s> user :{places} {question} assistant :".split()]


def places(ids: list[int]) -> list[int]:
    return [i for i, token in enumerate(ids) if token == toy.IMAGE]


def ask(vlm: VLM, question: str, images: list[np.ndarray], **options: Any) -> Result:
    result = vlm.generate(question, images=images, **options)
    assert isinstance(result, Result)
    return result


class Recorder:
    """Wraps the sessions that the runtime loads, and keeps what went in and out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        self.loaded: list[str] = []
        load = backends.load

        def recording(bundle: Any, graph: str, *options: Any) -> Any:
            session: Any = load(bundle, graph, *options)
            run = session.run
            self.loaded.append(graph)

            def recorded(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                before = {name: array.copy() for name, array in feeds.items()}
                outputs = run(feeds)
                self.calls.append((graph, before, {name: array.copy() for name, array in outputs.items()}))
                return outputs

            session.run = recorded
            return session

        monkeypatch.setattr(backends, "load", recording)

    def steps(self) -> list[tuple[list[int], np.ndarray]]:
        """Of every decode and extend, the positions of the tokens read and the logits after the last of them."""
        steps = []
        for graph, feeds, outputs in self.calls:
            if graph.startswith("decode"):
                steps.append((feeds["position"][0].tolist(), outputs["logits"][0]))
            if graph.startswith("extend"):
                steps.append((feeds["positions"][feeds["kinds"] > 0].tolist(), outputs["logits"][0]))
        return steps

    def of(self, kind: str) -> list[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
        return [call for call in self.calls if call[0].startswith(kind)]
