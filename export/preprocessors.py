"""A checkpoint's processor, which is loaded without torchvision."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VIDEO = "video_processor"
CONFIGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")  # any may name the class


def load_processor(path: Path) -> Any:
    """The checkpoint's own processor: tokenizer, image processor and how a picture is written into the text.

    Some of Hugging Face's want torchvision for their videos, or say that they do. Only pictures are handed over here.
    """
    from transformers import AutoProcessor

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if (name := _class_name(path)) and (kind := processor_class(name)):
        return kind.from_pretrained(path, **options)
    return AutoProcessor.from_pretrained(path, **options)


def processor_class(name: str) -> Any:
    """Of Hugging Face, without its video processor; None if it is not known. Not from the top of the package: what
    wants torchvision cannot be had from there."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():  # Pixtral's takes a function from there, which is Pillow's, too
        pixtral = "transformers.models.pixtral.image_processing_"
        sys.modules.setdefault(f"{pixtral}pixtral", importlib.import_module(f"{pixtral}pil_pixtral"))
    for model_type in (model_type for model_type, known in PROCESSOR_MAPPING_NAMES.items() if known == name):
        family = model_type_to_module_name(model_type)
        with contextlib.suppress(ModuleNotFoundError):  # a family that takes another's
            kind = getattr(importlib.import_module(f"transformers.models.{family}.processing_{family}"), name)
            return _without_video(kind) if VIDEO in kind.get_attributes() else kind
    return None


def _without_video(kind: Any) -> Any:
    class WithoutVideo(kind):
        video_processor = SimpleNamespace(num_frames=None, fps=None)  # SmolVLM asks whatever it is given

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != VIDEO]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **options: Any) -> list[Any]:
            return [*super()._get_arguments_from_pretrained(*args, **options), None]

    WithoutVideo.__name__ = kind.__name__  # which is written where it is saved
    return WithoutVideo


def _class_name(path: Path) -> str | None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    for file in (path / name for name in CONFIGS):
        if file.is_file() and (name := json.loads(file.read_text()).get("processor_class")):
            return str(name)
    return PROCESSOR_MAPPING_NAMES.get(json.loads((path / "config.json").read_text()).get("model_type"))
