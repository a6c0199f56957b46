"""Load a Hugging Face checkpoint safely and describe it: never `trust_remote_code`, never pickle, no missing weight."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from engines import bundle
from engines.errors import UserError, one_line
from engines.layout import Layout, VideoStyle
from engines.preprocessor import ImagePreprocessor
from engines.time_limit import time_limit
from engines.tokens import NO_TOKEN, sentence_ends
from export.attention import use_hook
from export.compat import check_transformers
from export.families import FAMILIES, MISSING
from export.graphs import Decoder, split
from export.layouts import DO_NOT_FIT, layout, sizes_of
from export.preprocessors import load_processor, settings
from export.text_processor import TextProcessor
from export.videos import video_style
from export.weights.weights import Weights

if TYPE_CHECKING:
    from PIL.Image import Image

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers': else its threads read weights ahead, and hold them in memory


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its processor, and what the exporter needs to know of it.

    Attributes:
        preprocessor: None if the model takes no images; then the image token is `NO_TOKEN`.
        placeholder: what the chat template writes for a picture.
        layouts: what pictures are brought to, none if the model takes none; calibration works with the first one.
        encoders: of each layout, by its name: from its `pixel_values` to its visual tokens.
        video: how it sees a video by them, if it does.
    """

    path: Path
    model: Any
    processor: Any
    model_type: str
    decoder: Decoder
    preprocessor: ImagePreprocessor | None
    image_token_id: int
    placeholder: str
    layouts: list[Layout]
    encoders: dict[str, nn.Module]
    weights: Weights = dataclasses.field(default_factory=Weights)
    video: VideoStyle | None = None

    @property
    def takes_images(self) -> bool:
        return bool(self.layouts)

    @property
    def encoder(self) -> nn.Module:
        """Of the first layout, which calibration works with; an empty module where there is none."""
        return self.encoders[self.layouts[0].name] if self.layouts else nn.Module()

    @property
    def image_tokens(self) -> int:
        """N, visual tokens of a picture of the first layout; 0 where there is none."""
        return self.layouts[0].tokens if self.layouts else 0

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @cached_property
    def embedding(self) -> torch.Tensor:
        """Token embedding table, as its rows enter the decoder, [vocab_size, hidden_size], float32."""
        module = self.model.get_input_embeddings()
        return module.weight.detach() if getattr(module, "embed_scale", None) is None else self._scaled_embedding

    @cached_property
    def _scaled_embedding(self) -> torch.Tensor:
        """Scaled, it lies on another grid than the weight itself, which may be the head's too."""
        module = self.model.get_input_embeddings()
        return self.weights.nearest(module.weight.detach() * module.embed_scale)

    def quantized(self, weights: Weights) -> Checkpoint:
        """With weights as they will be stored. The model is changed in place: this checkpoint's too."""
        weights.quantize(self.decoder, self.model.get_input_embeddings().weight, self.encoder)
        return dataclasses.replace(self, weights=weights)

    @cached_property
    def sentence_ends(self) -> list[int]:
        """Ids of the tokens that end a sentence."""
        tokenizer = self.processor.tokenizer.backend_tokenizer
        ids = [[i] for i in range(tokenizer.get_vocab_size())]
        return sentence_ends(tokenizer.decode_batch(ids, skip_special_tokens=False))

    @property
    def pixel_size(self) -> tuple[int, int]:
        """Height and width of the pictures of the first layout."""
        return self.layouts[0].height, self.layouts[0].width

    def brought(self, image: Image) -> Image:
        """A picture at the size of the first layout, where the processor would make several sizes."""
        if not self.layouts or self.preprocessor is None or self.preprocessor.fixed_size:
            return image
        height, width = self.pixel_size
        return image.resize((width, height), self.preprocessor.resample)

    def max_positions(self, scale: float = 1.0) -> int:
        """Longest sequence that the model can read.

        Args:
            scale: how many times the positions of the training RoPE reaches.
        """
        return int(self.text_config.max_position_embeddings * scale)


def load(
    folder: str | Path, weights: bool = True, sizes: Sequence[tuple[int, int]] = (), scratch: Path | None = None
) -> Checkpoint:
    """Load a checkpoint in float32 for export.

    Args:
        sizes: heights and widths of its layouts, the first that of calibration; none: the processor's own, or 448.
        weights: False leaves them where they are: every parameter has its shape, on PyTorch's `meta` device.
        scratch: a folder on a disk with room for the weights in float32, to be mapped from there; None: in memory.

    Raises:
        UserError: not a checkpoint folder, a family without adapter, damaged or incomplete weights.
        OSError: `scratch` has no room (`bundle.FULL`), as `bundle.writing` expects it.
    """
    path = Path(folder)
    config = _config(path)
    model_type = config.get("model_type")
    supported = sorted(FAMILIES.keys() - MISSING)
    if not isinstance(model_type, str) or model_type not in supported:
        lacks = MISSING.get(str(model_type))
        why = f": it has {lacks}" if lacks else ""
        raise UserError(f"{path}: model type {model_type!r} is not supported{why}; supported: {', '.join(supported)}")
    check_transformers(model_type)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    family = FAMILIES[model_type]
    kind = AutoModelForImageTextToText if family.encoder else AutoModelForCausalLM
    model = _model(path, kind, scratch) if weights else _skeleton(path, kind)
    decoder = family.decoder(model)
    processor = _processor(path)
    use_hook(decoder.language_model)
    if family.encoder is None:
        _check_template(path, text := TextProcessor(processor))
        return Checkpoint(path, model, text, model_type, decoder, None, NO_TOKEN, "", [], {})
    try:
        preprocessor = settings(processor)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its image processor is not supported: {one_line(error)}") from error
    image_token_id = model.config.image_token_id
    layouts = [layout(path, processor, image_token_id, *size) for size in sizes_of(path, preprocessor, sizes)]
    encoders = {each.name: family.encoder(model, each).eval() for each in layouts}
    for each in layouts:
        _check_encoder(path, encoders[each.name], each, image_token_id, "cpu" if weights else "meta")
    parts = preprocessor, image_token_id, processor.image_token, layouts, encoders
    video = video_style(processor, model, preprocessor, layouts[0])
    return Checkpoint(path, model, processor, model_type, decoder, *parts, video=video)


def takes_images(folder: str | Path) -> bool:
    """Whether the model of a checkpoint's folder does; also where it is none that can be loaded."""
    family = FAMILIES.get(str(_config(Path(folder)).get("model_type")))
    return family is None or family.encoder is not None


def _check_template(path: Path, processor: TextProcessor) -> None:
    try:
        processor.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "?"}]}])
    except Exception as error:  # a base model has none, and one that is there can fail in any way
        raise UserError(f"{path}: its tokenizer makes no prompt of a chat: {one_line(error)[:300]}") from error


def _check_encoder(path: Path, encoder: nn.Module, layout: Layout, image_token_id: int, device: str) -> None:
    """The encoder must give as many tokens as the processor leaves room for."""
    try:
        with torch.no_grad(), torch.device(device):
            given = split(encoder(torch.zeros(layout.pixel_values)))[0].shape[1]
    except Exception as error:  # a configuration that does not fit its weights fails anywhere in the model's code
        raise UserError(f"{path}: its vision encoder cannot be run: {one_line(error)}") from error
    if given != layout.tokens:
        raise UserError(
            f"{path}: its prompts have {layout.tokens} image tokens (id {image_token_id}) an image, its vision encoder "
            f"gives {given}: {DO_NOT_FIT}"
        )


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{path} is not a Hugging Face checkpoint: it has no config.json")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a model configuration")
    return config


def _model(path: Path, kind: Any, scratch: Path | None) -> Any:
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{path} holds an adapter, which is not applied: merge it into the model first")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} holds no .safetensors weights (other formats can run code and are not loaded)")
    model: Any
    info: Any
    with _quiet(), _mapped(scratch):
        try:
            model, info = kind.from_pretrained(
                path,
                dtype=torch.float32,
                output_loading_info=True,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        except Exception as error:  # transformers raises many kinds for a damaged checkpoint
            if isinstance(error, OSError) and error.errno in bundle.FULL:
                raise  # of `scratch`, and no fault of the checkpoint's
            raise UserError(f"{path} cannot be loaded: {one_line(error)[:300]}") from error
    # A checkpoint of another transformers version can load with part of its weights silently random.
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info.get(problem) or ())):
            kind = problem.split("_")[0]
            raise UserError(
                f"{path}: {len(keys)} {kind} weights, for example {keys[0]}: it was saved by another version of "
                "transformers or is incomplete; nothing was built"
            )
    for name, weight in model.named_parameters():
        if weight.numel() and not all(
            end.isfinite() for end in weight.aminmax()
        ):  # without a second tensor of its size
            raise UserError(f"{path}: weight {name} is not finite; nothing was built")
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _mapped(folder: Path | None) -> Iterator[None]:
    """Within the block, what modules are given as parameters moves to files of `folder`, which have no name there.

    Their pages are mapped and count as no process' own: where memory is short, the kernel writes them out and drops
    them. What is there is read and changed as in memory. None: it stays in memory.
    """
    if folder is None:
        yield
        return
    moved: set[int] = set()  # addresses: a weight that is tied to another is given again

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or parameter.dtype != torch.float32 or not parameter.numel():
            return None
        if parameter.data_ptr() in moved:
            return None
        # A file each, closed once it is mapped: Python's mmap holds one open, and 1,024 are often all that may be.
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, parameter.nbytes)  # where the disk is full, it tells here
            place = torch.from_file(file.name, shared=True, size=parameter.numel(), dtype=torch.float32)
        mapped = nn.Parameter(place.view(parameter.shape).copy_(parameter.detach()), requires_grad=False)
        mapped.__dict__ |= parameter.__dict__  # transformers marks what it has loaded
        moved.add(mapped.data_ptr())
        return mapped

    before, hook = os.environ.get(ONE_BY_ONE), register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        hook.remove()
        os.environ.pop(ONE_BY_ONE)
        if before is not None:
            os.environ[ONE_BY_ONE] = before


def _skeleton(path: Path, kind: Any) -> Any:
    from transformers import AutoConfig

    with _quiet(), torch.device("meta"):
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            model = kind.from_config(config, dtype=torch.float32)
        except Exception as error:  # as above
            raise UserError(f"{path}: its configuration makes no model: {one_line(error)[:300]}") from error
    return model.eval().requires_grad_(False)


def _processor(path: Path) -> Any:
    with _quiet():
        try:
            processor = load_processor(path)
            processor.apply_chat_template = time_limit()(processor.apply_chat_template)
            return processor
        except Exception as error:
            raise UserError(f"{path}: its processor cannot be loaded: {one_line(error)[:300]}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' notes: what matters of them becomes a `UserError`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        transformers.logging.set_verbosity(verbosity)
