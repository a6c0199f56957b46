"""Write what NVIDIA's kvpress scores and keeps on random tensors: the fixture of tests/export/stages/test_kvpress.py.

kvpress 0.5.5 wants transformers < 5.3, older than this project's, hence an environment of its own:

    python3 -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install kvpress==0.5.5 "transformers<5.3"
    /tmp/kvpress/bin/python scripts/kvpress_reference.py
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "export" / "stages" / "kvpress.npz"
TOKENS, HEAD_DIM, HEADS, THETA = 40, 32, 4, 100.0
WINDOW, KERNEL, SINKS, FUTURE, RATIO = 8, 5, 4, 16, 0.5


def attention_of_random_tensors(kv_heads: int, seed: int) -> tuple:
    """A Llama attention module of random weights, its input, keys, values, attention weights and keyword arguments."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    config._attn_implementation = "eager"
    module = LlamaAttention(config, layer_idx=0).eval()
    module.rotary_emb = LlamaRotaryEmbedding(config)  # where kvpress looks for it
    hidden = 2 * torch.randn(1, TOKENS, config.hidden_size) + torch.randn(config.hidden_size)  # queries with a mean
    rope = module.rotary_emb(hidden, torch.arange(TOKENS)[None])

    def heads(rows: Tensor) -> Tensor:
        return rows.view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2)

    query, key = apply_rotary_pos_emb(heads(module.q_proj(hidden)), heads(module.k_proj(hidden)), *rope)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    attentions = module(hidden, position_embeddings=rope, attention_mask=mask)[1]
    value = heads(module.v_proj(hidden))
    return query, (module, hidden, key, value, attentions, {"position_embeddings": rope})


def main() -> None:
    import kvpress  # type: ignore[import-not-found]  # in an environment of its own

    presses = {
        "snapkv": kvpress.SnapKVPress(RATIO, window_size=WINDOW, kernel_size=KERNEL),
        "tova": kvpress.TOVAPress(RATIO),
        "observed": kvpress.ObservedAttentionPress(RATIO),
        "keydiff": kvpress.KeyDiffPress(RATIO),
        "knorm": kvpress.KnormPress(RATIO),
        "streaming": kvpress.StreamingLLMPress(RATIO, n_sink=SINKS),
        "expected": kvpress.ExpectedAttentionPress(RATIO, n_future_positions=FUTURE, n_sink=SINKS),
        "expected_mean": kvpress.ExpectedAttentionPress(
            RATIO, n_future_positions=FUTURE, n_sink=SINKS, use_covariance=False, use_vnorm=False
        ),
    }
    arrays: dict[str, Tensor] = {}
    for kv_heads in (1, 2, 4):
        with torch.no_grad():
            query, arguments = attention_of_random_tensors(kv_heads, seed=kv_heads)
            arrays |= {f"query.{kv_heads}": query, f"key.{kv_heads}": arguments[2], f"value.{kv_heads}": arguments[3]}
            for name, press in presses.items():
                keys, _ = press.compress(*arguments)  # in the order of their scores
                kept = (arguments[2][:, :, :, None] == keys[:, :, None]).all(dim=-1).any(dim=-1)
                arrays |= {f"{name}.score.{kv_heads}": press.score(*arguments), f"{name}.kept.{kv_heads}": kept}
    settings = {"theta": THETA, "window": WINDOW, "kernel": KERNEL, "sinks": SINKS, "future": FUTURE}
    contents: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()} | settings
    np.savez_compressed(FIXTURE, **contents)
    print(f"kvpress {version('kvpress')}: {len(arrays)} arrays, {FIXTURE.stat().st_size / 1e3:.0f} KB in {FIXTURE}")


if __name__ == "__main__":
    main()
