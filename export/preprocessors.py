"""A checkpoint's processor, loaded without torchvision, and what the runtime must know of its image processor."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engines.preprocessor import AnyRes, Grid, ImagePreprocessor, Kind, LongestEdge, Patches, Plain, Split

VIDEO = "video_processor"
PALIGEMMA = "PaliGemmaProcessor"
PALIGEMMA_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is not string %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
CONFIGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")  # any may name the class


def load_processor(path: Path) -> Any:
    """The checkpoint's own processor: tokenizer, image processor and how a picture is written into the text.

    Some of Hugging Face's want torchvision for their videos, or say that they do. Only pictures are handed over here.
    """
    from transformers import AutoProcessor

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if (name := _class_name(path)) and (kind := processor_class(name)):
        processor = kind.from_pretrained(path, **options)
    else:
        processor = AutoProcessor.from_pretrained(path, **options)
    return _by_template(processor) if name == PALIGEMMA else processor


def _by_template(processor: Any) -> Any:
    """PaliGemma's processor writes <s> behind the images and ends every prompt with a line: let its template do it.

    A bundle has nothing else to write prompts by. Its checkpoints have no template: there it is images, then texts.
    """
    from transformers import ProcessorMixin

    template = processor.chat_template or processor.tokenizer.chat_template or PALIGEMMA_TEMPLATE
    processor.chat_template = (
        f"{{% set prompt %}}{template}{{% endset %}}{{% set parts = prompt.rsplit('{processor.image_token}', 1) %}}"
        f"{{% if parts | length > 1 %}}{{{{ parts[0] + '{processor.image_token}' }}}}{{% endif %}}"
        "{{ bos_token + parts[-1] + '\n' }}"
    )
    processor.prepare_inputs_layout = partial(ProcessorMixin.prepare_inputs_layout, processor)
    return processor


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


def settings(processor: Any) -> ImagePreprocessor:
    """The settings of the processor's image processor.

    Raises:
        ValueError: it is of no known kind, or does what the runtime does not.
    """
    images = processor.image_processor
    return ImagePreprocessor(
        kind=_kind(processor, images),
        resample=int(images.resample),
        rescale=float(images.rescale_factor) if images.do_rescale else 1.0,
        mean=[float(v) for v in images.image_mean] if images.do_normalize else [0.0] * 3,
        std=[float(v) for v in images.image_std] if images.do_normalize else [1.0] * 3,
    )


def _kind(processor: Any, images: Any) -> Kind:
    name = type(images).__name__.removesuffix("Pil").removesuffix("Fast").removesuffix("ImageProcessor")
    size = _given(images.size)
    if name not in KINDS:
        raise ValueError(f"{type(images).__name__} is none of {', '.join(known + 'ImageProcessor' for known in KINDS)}")
    if name in PLAIN or (name == "GotOcr2" and not (images.crop_to_patches and images.max_patches > 1)):
        if getattr(images, "do_pan_and_scan", False) or (name == "Llava" and images.do_pad):
            raise ValueError("pan and scan (do_pan_and_scan) and padding to a square (do_pad) are not supported")
        crops = getattr(images, "do_center_crop", False)
        return Plain(size if images.do_resize else None, _given(images.crop_size) if crops else None)
    if not images.do_resize:
        raise ValueError(f"{type(images).__name__} with do_resize off")
    if name == "GotOcr2":
        return Grid(size["height"], size["width"], images.min_patches, images.max_patches)
    if name in ("Idefics3", "SmolVLM"):
        tile = _given(images.max_image_size)["longest_edge"]
        return Split(size["longest_edge"], tile, bool(images.do_image_splitting))
    if name == "Pixtral":
        most = size.get("longest_edge", 0)
        multiple = processor.patch_size * processor.spatial_merge_size  # which is handed to the image processor
        return LongestEdge(most or size["height"], most or size["width"], multiple)
    if name in ("Qwen2VL", "Glm4v"):
        patch, merge, temporal = images.patch_size, images.merge_size, images.temporal_patch_size
        return Patches(patch, merge, temporal, size["shortest_edge"], size["longest_edge"], clip=name == "Glm4v")
    edges = {*size.values(), *(_given(images.crop_size).values() if images.do_center_crop else ())}
    if len(edges) != 1:
        raise ValueError(f"{type(images).__name__}: its tiles must be squares of one size, got {sorted(edges)}")
    return AnyRes(edges.pop(), [[int(edge) for edge in size] for size in images.image_grid_pinpoints])


PLAIN = ("CLIP", "Siglip", "Gemma3", "Llava")
KINDS = (*PLAIN, "GotOcr2", "Idefics3", "SmolVLM", "Pixtral", "Qwen2VL", "Glm4v", "LlavaNext", "LlavaOnevision")


def _given(size: Any) -> dict[str, int]:
    return {name: int(value) for name, value in dict(size).items() if value is not None}
