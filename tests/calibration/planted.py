"""A random model with things planted in it that calibration must find, and samples for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration

from calibration.samples import FILE
from tests.export import tiny

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 4, 16
NOISY = 2  # this layer's queries are next to nothing: it looks at all tokens alike, and at some more by chance
TWINS = (1, 0, 2)  # layer, and two of its KV heads that hold the same
SPIKE = (3, 1, HEAD_DIM - 1)  # layer, KV head and channel, which RoPE turns slowest, that a bias moves ...
SPIKED_BY = 60.0  # ... by this; keys are of size 1 to 5
VISUAL = 10.0  # keys and values of visual rows, in multiples of text rows
FLAG = 0  # the hidden channel by which text is smaller: it is large for text, and only normalization reads it


def llava() -> LlavaForConditionalGeneration:
    """The model: tiny, with biases, every plant in its place."""
    model = tiny.llava(HEADS, KV_HEADS, HEAD_DIM, LAYERS, bias=True)
    text, projector = model.model.language_model, model.model.multi_modal_projector
    width = text.embed_tokens.weight.shape[1]
    with torch.no_grad():
        text.embed_tokens.weight.mul_(5)  # to 1 a channel: what the layers add does not drown the plants
        text.embed_tokens.weight[:, FLAG] = (VISUAL**2 * width) ** 0.5
        projector.linear_2.weight.mul_(5)[FLAG] = 0
        for layer in text.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for reads in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                reads.weight[:, FLAG] = 0
            for writes in (attention.o_proj, mlp.down_proj):
                writes.weight.mul_(0.2)[FLAG] = 0
            attention.q_proj.weight.mul_(VISUAL)  # by small rows text still asks with large queries
        text.norm.weight.mul_(VISUAL)
        model.lm_head.weight[:, FLAG] = 0
        text.layers[NOISY].self_attn.q_proj.weight.mul_(1e-3)
        twins = text.layers[TWINS[0]].self_attn
        for projection in (twins.k_proj, twins.v_proj):
            rows = projection.weight.view(KV_HEADS, HEAD_DIM, -1)
            rows[TWINS[2]] = rows[TWINS[1]]
        layer, head, channel = SPIKE
        text.layers[layer].self_attn.k_proj.bias.view(KV_HEADS, HEAD_DIM)[head, channel] = SPIKED_BY
    return model


def save(folder: Path, count: int = 32) -> Path:
    """The model as a checkpoint folder with calibration samples, and in `text/` others without images."""
    tiny.save(folder, llava(), count)
    lines = [json.dumps({"images": [], "prompt": f"what color is the shape in row {i % 4} ?"}) for i in range(count)]
    (folder / "text").mkdir()
    (folder / "text" / FILE).write_text("\n".join(lines))
    return folder
