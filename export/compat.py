"""What this exporter builds on in transformers: the releases it was run with, and what newer ones must keep."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from engines import releases
from engines.errors import UserError, one_line
from export.attention import LOWEST, LayerAttention, attention_by, full_attention, use_hook
from export.graphs.graph import added
from export.graphs.prefill import before_layer
from export.mrope import FAMILIES, mrope_of

TESTED = "5.24.0"
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 4
POSITIONS = torch.arange(3, 8)[None]  # not those that a model takes by itself, and without gaps, which it would mask


def check_transformers(model_type: str) -> None:
    """Raises `UserError` for a release of transformers whose modelling code is not what this exporter takes it for.

    An older one's checkpoints name weights differently. A newer release than the tested one is looked at with a tiny
    random model, in a fraction of a second.
    """
    installed = transformers.__version__
    releases.check("transformers", installed)
    if Version(installed) > Version(TESTED) and (broken := broken_assumption(model_type)):
        raise UserError(
            f"transformers {installed} no longer does what this exporter builds on: {broken}; nothing was built: "
            f"pip install 'transformers=={TESTED}', the newest that was tested"
        )


def broken_assumption(model_type: str) -> str | None:
    """The first of the assumptions that the installed release breaks; None if all hold."""
    checks = ASSUMPTIONS | ({COUNTED: lambda: _counts_positions(model_type)} if model_type in FAMILIES else {})
    _model.cache_clear()
    for assumption, holds in checks.items():
        try:
            if not holds():
                return assumption
        except Exception as error:  # what has changed fails anywhere in code that is not ours
            return f"{assumption} ({type(error).__name__}: {one_line(error)})"
    return None


def _has_names() -> bool:
    """Everything that export/ imports from transformers is there."""
    for file in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    getattr(module, name.name)
    return True


@cache
def _model() -> tuple[Any, Tensor]:
    """A tiny Llama, and embeddings of a prompt, [1, tokens, hidden_size]. PyTorch's random numbers are left alone."""
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=12, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = transformers.LlamaModel(config).eval().requires_grad_(False)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.5)  # else attention hardly tells tokens apart
        return model, torch.randn(1, POSITIONS.shape[1], config.hidden_size)


def _causal(_layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    tokens = query.shape[2]
    return full_attention(query, key, value, torch.full((1, tokens, tokens), LOWEST).triu(1), scale)


def _run(attention: LayerAttention = _causal) -> Tensor:
    """The model's hidden states with our attention, [1, tokens, hidden_size]: called as the graphs call it."""
    model, embeddings = _model()
    use_hook(model)
    with attention_by(attention):
        given: Tensor = model(
            inputs_embeds=embeddings, position_ids=POSITIONS, attention_mask=None, use_cache=False
        )[0]  # fmt: skip
    return given


def _seen() -> list[tuple[int, Tensor, Tensor, Tensor, float]]:
    """What attention is called with, call by call."""
    calls: list[Any] = []

    def note(*call: Any) -> Tensor:
        calls.append(call)
        return _causal(*call)

    _run(note)
    return calls


def _calls_attention() -> bool:
    tokens = POSITIONS.shape[1]
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    calls = _seen()
    return [call[0] for call in calls] == [*range(LAYERS)] and all(
        [t.shape for t in call[1:4]] == shapes and abs(call[4] - HEAD_DIM**-0.5) < 1e-6 for call in calls
    )


def _turns_keys() -> bool:
    """Number i of a key's first half is turned with number i of the second by position · base^(-2i / head_dim)."""
    model, embeddings = _model()
    layer = model.layers[0]
    key = layer.self_attn.k_proj(layer.input_layernorm(embeddings)).unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(1, 2)
    base = model.config.rope_parameters["rope_theta"]
    angles = POSITIONS[0, :, None] * base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = key.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    tables = model.rotary_emb(torch.zeros(1), POSITIONS)
    return torch.allclose(_seen()[0][2], turned, atol=1e-4) and all(
        torch.allclose(table[0], torch.cat([half, half], dim=-1), atol=1e-4)
        for table, half in zip(tables, (cos, sin), strict=True)
    )


def _uses_answer() -> bool:
    """With our attention the model says what it says with Hugging Face's own."""
    model, embeddings = _model()
    ours = _run()
    model.config._attn_implementation = "eager"
    own = model(inputs_embeds=embeddings, position_ids=POSITIONS, use_cache=False)[0]
    return torch.allclose(ours, own, atol=1e-4)


def _takes_fewer_rows() -> bool:
    """The last rows alone behind the first layer, whose tokens then are all that the second one looks at."""
    model, _ = _model()
    tokens, rows = POSITIONS.shape[1], torch.tensor([[2, 3, 4]])
    lengths: list[int] = []

    def note(*call: Any) -> Tensor:
        lengths.append(call[2].shape[2])
        return _causal(*call)

    with before_layer(model, 1, lambda hidden: (hidden[:, 2:], rows)):
        given = _run(note)
    return lengths == [tokens, 3] and given.shape[1] == 3


def _adds_taps() -> bool:
    model, embeddings = _model()
    with added(model, torch.ones(1, *embeddings.shape)):
        tapped = _run()
    return not torch.allclose(tapped, _run(), atol=1e-4)


def _counts_positions(model_type: str) -> bool:
    """Of a prompt with text, a picture of 2 x 3 tokens and text, as the lean runtime counts them."""
    tiny: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    tiny |= dict.fromkeys(
        ["bos_token_id", "eos_token_id", "pad_token_id"]
    )  # else it warns that there are no such tokens
    vision = {"spatial_merge_size": 2, "depth": 1, "hidden_size": 16, "num_heads": 2}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(model_type, text_config=tiny, vision_config=vision)
        model = transformers.AutoModel.from_config(config)
    rule, grid, types = mrope_of(config), [1, 4, 6], torch.tensor([[0] * 3 + [1] * 6 + [0] * 2])
    given, _ = model.get_rope_index(
        types, mm_token_type_ids=types, image_grid_thw=torch.tensor([grid]), attention_mask=torch.ones_like(types)
    )
    return rule is not None and np.array_equal(given[:, 0].numpy(), rule.position_ids(types[0].numpy() == 1, [grid]))


COUNTED = "position ids of text around a picture are counted by M-RoPE's rule"
ASSUMPTIONS: dict[str, Callable[[], bool]] = {
    "the names that are imported from it exist": _has_names,
    "every layer calls the registered attention once, with queries, keys and values by head and the softmax scale, "
    "without a cache": _calls_attention,
    "keys reach attention, as they would a cache, turned by RoPE for the given position ids": _turns_keys,
    "layers go on with what the registered attention returns": _uses_answer,
    "layers return hidden states alone": _adds_taps,
    "layers take hidden states first and RoPE's tables as position_embeddings": _takes_fewer_rows,
}
