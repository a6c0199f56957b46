"""Every family's architecture, tiny and with random weights, as Hugging Face makes it of a configuration.

`model("qwen2_vl")` is one; `picture(model, 112, 84)` is a random picture of that size for it, as its own image
processor would hand it over, and what its vision encoder wants to know besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

IMAGE, VIDEO = 300, 301  # ids of the image and the video token
START, END = 303, 304  # what some families write around a picture

TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
PIXTRAL = {"model_type": "pixtral", **VISION}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
CLIP = {"model_type": "clip_vision_model", **VISION, "projection_dim": 64}
PATCHES: dict[str, Any] = {"depth": 3, "hidden_size": 64, "num_heads": 4, "patch_size": 14}  # Qwen's kind
MERGED = {"intermediate_size": 128, "out_hidden_size": 128}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [56, 168], [168, 56]]
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MARKS = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
SLIDING = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

ZOO: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": CLIP,
        "text_config": {"model_type": "llama"},
        "image_seq_length": 16,
    },
    "llava_pixtral": {
        "model_type": "llava",
        "vision_config": PIXTRAL,
        "text_config": {"model_type": "mistral", "head_dim": 16},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral3": {
        "vision_config": PIXTRAL,
        "text_config": {"model_type": "mistral", "head_dim": 16},
        "spatial_merge_size": 2,
    },
    "llava_next": {
        "vision_config": CLIP,
        "text_config": {"model_type": "llama"},
        "image_grid_pinpoints": PINPOINTS,
    },
    "llava_onevision": {
        "vision_config": SIGLIP,
        "text_config": {"model_type": "qwen2"},
        "image_grid_pinpoints": PINPOINTS,
        "vision_aspect_ratio": "anyres_max_2",  # so few that the larger pictures' tokens are resampled
    },
    "idefics3": {"vision_config": VISION, "text_config": {"model_type": "llama"}, "scale_factor": 2},
    "smolvlm": {"vision_config": VISION, "text_config": {"model_type": "llama"}, "scale_factor": 2},
    "qwen2_vl": {
        "vision_config": {**PATCHES, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2},
        "text_config": {"rope_parameters": MROPE},
        **MARKS,
    },
    "qwen2_5_vl": {
        "vision_config": {**PATCHES, **MERGED, "window_size": 56, "fullatt_block_indexes": [1]},
        "text_config": {"rope_parameters": MROPE},
        **MARKS,
    },
    "qwen3_vl": {
        "vision_config": {
            **{**PATCHES, **MERGED, "patch_size": 16},
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "text_config": {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 16},
        **MARKS,
    },
    "glm4v": {
        "vision_config": {**PATCHES, **MERGED, "image_size": 56},
        "text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_start_token_id": 305,
        "video_end_token_id": 306,
    },
    "internvl": {
        "vision_config": VISION,
        "text_config": {"model_type": "qwen2"},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
    "got_ocr2": {
        "vision_config": {
            "hidden_size": 64,
            "output_channels": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 128,
            "patch_size": 16,
            "window_size": 3,
            "global_attn_indexes": [1],
            "mlp_dim": 128,
        },
        "text_config": {"model_type": "qwen2"},
    },
    "aya_vision": {
        "vision_config": SIGLIP,
        "text_config": {"model_type": "cohere2", "sliding_window": 12, "logit_scale": 0.5},
        "downsample_factor": 2,
        "adapter_layer_norm_eps": 1e-6,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "paligemma": {
        "vision_config": SIGLIP,
        "text_config": {"model_type": "gemma", "head_dim": 16},
        "projection_dim": 128,
    },
    "paligemma2": {
        "model_type": "paligemma",
        "vision_config": SIGLIP,
        "text_config": {"model_type": "gemma2", **SLIDING},
        "projection_dim": 128,
    },
    "gemma3": {
        "vision_config": SIGLIP,
        "text_config": {"model_type": "gemma3_text", **SLIDING},
        "mm_tokens_per_image": 4,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
}


def model_type(name: str) -> str:
    return ZOO[name].get("model_type", name)


def model(name: str, seed: int = 0, **text: Any) -> Any:
    """A family's model in float32, ready to run.

    Args:
        name: a key of `ZOO`.
        text: of the decoder's configuration, what is to differ.
    """
    own = {key: value for key, value in ZOO[name].items() if key != "model_type"}
    settings = {**own, "text_config": {**TEXT, **own["text_config"], **text}}
    config = hf.AutoConfig.for_model(model_type(name), image_token_id=IMAGE, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    strengthen(made, seed)
    return made.eval().requires_grad_(False)


def strengthen(module: nn.Module, seed: int = 0) -> None:
    """Random weights so large that attention is far from uniform and no output nearly constant."""
    generator = torch.Generator().manual_seed(seed)
    inner = (nn.Linear, nn.Conv2d, nn.Conv3d)
    products = {id(each.weight) for each in module.modules() if isinstance(each, inner)}
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if id(weight) in products:
                weight.copy_(1.5 / sqrt(weight[0].numel()) * noise)
            elif weight.ndim > 1:  # embeddings, positions
                weight.copy_(0.5 * noise)
            else:  # norms are 1 and biases 0, or both 0
                weight.add_(0.1 * noise)


@dataclass(frozen=True)
class Picture:
    """A picture as an image processor hands it over.

    Attributes:
        more: what `get_image_features` takes besides `pixel_values`.
        grid: [t, h, w] of patches where a family has one, else [].
    """

    pixel_values: Tensor
    more: dict[str, Tensor]
    grid: list[int]


def picture(model: Any, height: int, width: int, frames: int = 1, tiles: int = 1, seed: int = 0) -> Picture:
    """A random picture of that size, which must be one that the family's processor brings pictures to.

    Args:
        frames: pairs of a video's frames, for encoders that take them together.
        tiles: how many there are, of `height` by `width` each, where the size of the picture does not say.
    """
    generator = torch.Generator().manual_seed(seed)
    vision = model.config.vision_config

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if hasattr(vision, "temporal_patch_size"):
        grid = [frames, height // vision.patch_size, width // vision.patch_size]
        size = 3 * vision.temporal_patch_size * vision.patch_size**2
        taken = pixels(grid[0] * grid[1] * grid[2], size)
        return Picture(taken, {"image_grid_thw": torch.tensor([grid])}, grid)
    if hasattr(model.config, "image_grid_pinpoints"):
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        side = vision.image_size
        count = image_size_to_num_patches([height, width], model.config.image_grid_pinpoints, side)
        return Picture(pixels(1, count, 3, side, side), {"image_sizes": torch.tensor([[height, width]])}, [])
    if vision.model_type == "pixtral":
        return Picture(pixels(1, 3, height, width), {"image_sizes": torch.tensor([[height, width]])}, [])
    shape = (1, tiles) if hasattr(model.config, "scale_factor") else (tiles,)  # Idefics3's tiles have a batch around
    return Picture(pixels(*shape, 3, height, width), {}, [])


def features(model: Any, picture: Picture) -> tuple[Tensor, Tensor | None]:
    """Hugging Face's visual tokens [N, hidden_size] and deepstack taps [taps, N, hidden_size]."""
    with torch.no_grad():
        if picture.grid and picture.grid[0] > 1:
            video = {"pixel_values_videos": picture.pixel_values, "video_grid_thw": torch.tensor([picture.grid])}
            found = model.get_video_features(**video, return_dict=True)
        else:
            found = model.get_image_features(pixel_values=picture.pixel_values, **picture.more, return_dict=True)
    tokens = found.pooler_output
    if isinstance(tokens, (list, tuple)):
        tokens = torch.cat([each.flatten(0, -2) for each in tokens])
    taps = [torch.cat(list(each)) for each in getattr(found, "deepstack_features", None) or ()]
    return tokens.flatten(0, -2), torch.stack(taps) if taps else None
