"""Checkpoints of real sizes with random weights: what a build takes does not depend on what the weights are.

Written tensor by tensor: the weights are never all in memory.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.samples import FILE
from demo_vlm.vocabulary import TOKEN_IDS
from export.preprocessors import processor_class

if TYPE_CHECKING:
    from torch import Tensor

SHARD = 500 * 10**6  # bytes of a file; one tensor may be more
SPREAD = 0.02  # of the weights
DTYPE = "bfloat16"  # theirs
SAMPLES, SIDE = 4, 448  # pictures to calibrate with, and their height and width
IMAGE = "<image>"
TURN = "{% for m in messages %}{{ m['role'] }} :{% for c in m['content'] %}{% if c['type'] == 'image' %}"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPLITS = ["<fake_token_around_image>", "<global-img>", *TILES]
QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]


@dataclass(frozen=True)
class Size:
    """A model as its configuration has it, and its processor.

    Attributes:
        config: of `AutoConfig.for_model`, but for the ids of special tokens.
        special: tokens, the one that stands for an image first.
        placeholder: what the chat template writes for an image.
        processor: makes one of a tokenizer.
        ids: keys of the configuration, by the special token whose id they are.
    """

    config: dict[str, Any]
    special: list[str]
    placeholder: str
    processor: Callable[[Any], Any]
    ids: dict[str, str]


def _smolvlm(edge: int, tokens: int) -> Callable[[Any], Any]:
    """One tile of a picture, which has so many pixels along an edge and so many tokens."""

    def make(tokenizer: Any) -> Any:
        import transformers

        pictures = transformers.SmolVLMImageProcessorPil(
            size={"longest_edge": edge}, max_image_size={"longest_edge": edge}
        )
        processor = processor_class("SmolVLMProcessor")
        return processor(pictures, tokenizer, image_seq_len=tokens, video_processor=None)

    return make


def _qwen(tokenizer: Any) -> Any:
    import transformers

    return processor_class("Qwen2VLProcessor")(transformers.Qwen2VLImageProcessorPil(), tokenizer)


def _smolvlm_size(text: dict[str, Any], vision: dict[str, Any]) -> Size:
    edge, patch, factor = vision["image_size"], vision["patch_size"], 4
    config = {"model_type": "smolvlm", "text_config": {"model_type": "llama", **text}, "scale_factor": factor}
    tokens = (edge // patch // factor) ** 2
    special, ids = [IMAGE, *SPLITS], {"image_token_id": IMAGE}
    return Size({**config, "vision_config": vision}, special, IMAGE, _smolvlm(edge, tokens), ids)


SIZES: dict[str, Size] = {
    "tiny": _smolvlm_size(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 256,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
    ),
    # SmolVLM-256M-Instruct: SmolLM2-135M with a head of its own, SigLIP base, 64 tokens a tile
    "smolvlm-256m": _smolvlm_size(
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49280,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
    ),
    # Qwen2-VL-2B-Instruct
    "qwen2-vl-2b": Size(
        {
            "model_type": "qwen2_vl",
            "text_config": {
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_hidden_layers": 28,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4},
            "tie_word_embeddings": True,
        },
        QWEN,
        "<|vision_start|><|image_pad|><|vision_end|>",
        _qwen,
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
    ),
}


def _tokenizer(size: Size) -> Any:
    """The demo's words."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    known = dict.fromkeys([*special, *size.special, *(word for word in TOKEN_IDS if word not in special)])
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in [*special, *size.special]])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    extra = {"image_token": size.special[0]} | ({"video_token": QWEN[1]} if size.special == QWEN else {})
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, extra_special_tokens=extra, clean_up_tokenization_spaces=False, **named
    )


def configuration(name: str) -> Any:
    """Of one of `SIZES`, as Hugging Face has it."""
    import transformers

    size = SIZES[name]
    words = ["<pad>", "<s>", "</s>", "<unk>", *size.special]
    ids = {key: words.index(word) for key, word in size.ids.items()}
    settings = {key: value for key, value in size.config.items() if key != "model_type"}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings["text_config"] = settings["text_config"] | ends
    return transformers.AutoConfig.for_model(size.config["model_type"], **settings, **ids)


def skeleton(config: Any, dtype: str = DTYPE) -> Any:
    """The model without its weights: every one has its shape, on PyTorch's `meta` device."""
    import torch
    import transformers

    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        return kinds[hasattr(config, "vision_config")].from_config(config, dtype=getattr(torch, dtype))


def write(folder: Path, name: str) -> Path:
    """A checkpoint of one of `SIZES`, with some samples."""
    size = SIZES[name]
    processor = size.processor(_tokenizer(size))
    processor.chat_template = (
        TURN + size.placeholder + "{% else %} {{ c['text'] }}{% endif %}{% endfor %} {% endfor %}assistant :"
    )
    save(folder, configuration(name), processor)
    _write_samples(folder / "samples")
    return folder


def save(folder: Path, config: Any, processor: Any, dtype: str = DTYPE) -> Path:
    """A checkpoint of any configuration.

    Args:
        processor: or tokenizer, of words; it gets as many more as the model has.
        dtype: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"word{i}": i for i in range(len(words), config.get_text_config().vocab_size)}
    file.write_text(json.dumps(tokenizer))
    model = skeleton(config, dtype)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    _write_weights(folder, model)
    return folder


def _write_weights(folder: Path, model: Any) -> None:
    from safetensors.torch import save_file

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    parts: list[list[str]] = [[]]
    filled = 0
    for name, weight in weights.items():
        filled += weight.nbytes
        if parts[-1] and filled > SHARD:
            parts.append([])
            filled = weight.nbytes
        parts[-1].append(name)
    where, seeds = dict[str, str](), itertools.count()
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        save_file({name: _weight(name, weights[name], next(seeds)) for name in part}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _weight(name: str, like: Tensor, seed: int) -> Tensor:
    """Random; what multiplies a row as a whole is 1, and what is added to one 0."""
    import torch

    if like.ndim < 2:
        return (torch.zeros if name.endswith("bias") else torch.ones)(like.shape, dtype=like.dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(like.shape, dtype=like.dtype).normal_(0, SPREAD, generator=generator)


def _write_samples(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    lines = []
    for i in range(SAMPLES):
        pixels = np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        lines.append(json.dumps({"images": [f"{i}.png"], "prompt": "what color is the shape ?", "answer": "red"}))
    (folder / FILE).write_text("\n".join(lines) + "\n")
