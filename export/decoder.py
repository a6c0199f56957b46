"""The decoder inside a Hugging Face model, as its text configuration and its modules tell."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engines.errors import UserError
from export.graphs import Decoder

FULL, SLIDING = "full_attention", "sliding_attention"


class Head(nn.Module):
    """An LM head x -> W x whose logits are scaled, and capped by c: c tanh(x / c)."""

    def __init__(self, linear: nn.Module, scale: float | None, softcap: float | None):
        super().__init__()
        self.linear, self.scale, self.softcap = linear, scale, softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        if self.scale:
            logits = logits * self.scale
        return (logits / self.softcap).tanh() * self.softcap if self.softcap else logits


def decoder_of(model: Any, language_model: nn.Module, **known: Any) -> Decoder:
    """The decoder of a model with one LM head.

    Args:
        known: what its text configuration does not say: `block`, `first_position`, `mrope`, ...

    Raises:
        UserError: it has layers that are no attention of one of these kinds, or sliding windows beside M-RoPE.
    """
    text = model.config.get_text_config()
    kv_heads = [text.num_key_value_heads] * text.num_hidden_layers
    scale, softcap = getattr(model, "logit_scale", None), getattr(text, "final_logit_softcapping", None)
    decoder = Decoder(
        language_model=language_model,
        head=Head(model.lm_head, scale, softcap) if scale or softcap else model.lm_head,
        kv_heads=kv_heads,
        model_kv_heads=kv_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        hidden_size=text.hidden_size,
        sliding_windows=sliding_windows(text),
        softcap=getattr(text, "attn_logit_softcapping", None),
        **known,
    )
    if decoder.slides and decoder.mrope:  # decode knows no position in the sequence, only the position id
        raise UserError("this model has sliding windows and M-RoPE, which are not supported together yet")
    return decoder


def sliding_windows(text: Any) -> list[int | None]:
    """Of each layer; None where it looks back to the first token."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or [SLIDING if window else FULL] * text.num_hidden_layers
    if strange := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise UserError(f"this model has layers of type {strange[0]}, which are not supported yet")
    return [window if kind == SLIDING else None for kind in kinds]
