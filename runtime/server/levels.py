"""The bundle's levels as models: NAME is the default level, NAME:LEVEL any other."""

from __future__ import annotations

from math import isqrt
from typing import Any

from engines.bundle import MANIFEST
from engines.layout import Layout
from engines.preprocessor import ImagePreprocessor
from runtime.model import VLM
from runtime.monitor import Monitor, Watch
from runtime.server.errors import Refused

NO_ALARM = Watch()


class Levels:
    """What can be asked, and the opened models.

    Attributes:
        name: of the bundle's folder.
        models: id of a model -> its level.
        layouts: what images are brought to, by name.
        opened: level -> the model at this level; opened when first asked for, and kept.
        memory: their budget, if there is one.
    """

    def __init__(self, first: VLM, kernels: bool = True, watch: Watch = NO_ALARM) -> None:
        """
        Args:
            first: the model at its default level; the others are opened like it.
            kernels: whether they may use compiled kernels.
            watch: what follows an alarm.
        """
        self.bundle, self.default, self.opened = first.bundle, first.level, {first.level: first}
        self._kernels, self._watch, self.memory = kernels, watch, first.memory
        first.monitor = Monitor(watch)
        self.name = self.bundle.path.resolve().name
        manifest = self.bundle.manifest
        self.models = {self.name: first.level} | {f"{self.name}:{level}": level for level in manifest.levels}
        self.layouts = {layout.name: layout for layout in manifest.model.layouts}
        if self.layouts:
            self.preprocessor = ImagePreprocessor.read(self.bundle.path)
        self._created = int((self.bundle.path / MANIFEST).stat().st_mtime)

    def open(self, level: str) -> VLM:
        """The model at a level; only the worker's thread opens one."""
        if level not in self.opened:
            first = self.opened[self.default]
            vlm = VLM(self.bundle, level, first.backend, first.threads, self._kernels, self.memory)
            vlm.monitor = Monitor(self._watch)
            self.opened[level] = vlm
        return self.opened[level]

    def level(self, model: str) -> tuple[str, str]:
        """The level of a model, and why it is that one.

        Raises:
            Refused: there is no such model.
        """
        if model not in self.models:
            message = f"the model {model!r} does not exist: choose {', '.join(self.models)}"
            raise Refused(404, message, "model_not_found", "model")
        return self.models[model], "the default level" if model == self.name else "named in the request"

    def described(self, model: str) -> dict[str, Any]:
        """A model as /v1/models tells it."""
        level = self.level(model)[0]
        recipe = self.bundle.manifest.levels[level].recipe
        own = {"level": level, "default": model == self.name, "description": recipe.get("description", "")}
        return {
            "id": model,
            "object": "model",
            "created": self._created,
            "owned_by": "unicache-edge",
            "unicache": own,
        }


def grid(layout: Layout) -> tuple[int, int] | None:
    """Rows and columns of an image's tokens where each is a square of pixels; None where they are no such grid."""
    height, width, tokens = layout.height, layout.width, layout.tokens
    edge = isqrt(height * width // tokens)
    return (height // edge, width // edge) if edge and edge * edge * tokens == height * width else None
