"""What tests of shortening share: random rows, and Hugging Face's own layers called one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from export.stages.shorten.shorten import Rows
from export.stages.tokens import PADDING, TEXT, VISUAL
from tests.export.stages.strategies import seeds, tensor


def by_hand(
    model: Any,
    embeddings: Tensor,
    positions: Tensor,
    layer: int,
    choose: Callable[[Tensor, Tensor], tuple[list[int], Tensor, Tensor]],
) -> Tensor:
    """Logits of every token by Hugging Face's layers, called one after another.

    Args:
        embeddings: [tokens, hidden_size]; positions: [tokens].
        choose: hidden states [tokens, hidden_size] before `layer` and attention [heads, tokens, tokens] in the one
            before it -> the rows that go on, their hidden states, and what is added to every query's logits of them.
    """
    decoder = model.model.language_model
    looks: list[Tensor] = []
    hidden, places, bias = embeddings[None], positions, torch.zeros(len(positions))
    with torch.no_grad():
        for number, block in enumerate(decoder.layers):
            if number == layer:
                rows, states, bias = choose(hidden[0], looks[-1] if looks else torch.empty(0))
                hidden, places = states[None], places[rows]
            mask = torch.full((len(places), len(places)), -torch.inf).triu(1) + bias
            hook = block.self_attn.register_forward_hook(lambda _module, _args, out: looks.append(out[1][0]))
            hidden = block(
                hidden, attention_mask=mask[None, None], position_embeddings=decoder.rotary_emb(hidden, places[None])
            )
            hook.remove()
        return model.lm_head(decoder.norm(hidden))[0]


@st.composite
def rows(draw: st.DrawFn, most: int = 33) -> Rows:
    """Odd lengths, padding up to the whole row, few different attentions, visual tokens alone, one or more frames."""
    rng = np.random.default_rng(draw(seeds))
    batch, length = draw(st.integers(1, 2)), draw(st.integers(2, most))
    kinds = rng.choice([TEXT, VISUAL], (batch, length), p=draw(st.sampled_from([(0.2, 0.8), (0, 1), (0.5, 0.5)])))
    kinds[:, -1] = TEXT
    kinds[np.arange(length) < rng.integers(0, length, (batch, 1))] = PADDING
    attention = rng.integers(0, draw(st.sampled_from([1, 3, 1000])), kinds.shape) / 1000
    fixed = (kinds == TEXT) | (np.arange(length) >= length - draw(st.integers(1, 2)))
    return Rows(
        tensor(rng.standard_normal((batch, length, 6)).astype(np.float32)),
        torch.arange(length).expand(batch, -1),
        tensor(kinds.astype(np.int32)),
        tensor(np.where(kinds == PADDING, -np.inf, 0).astype(np.float32)),
        tensor(np.where(kinds == PADDING, 0, attention).astype(np.float32)),
        tensor(np.sort(rng.integers(1, draw(st.integers(2, 5)), kinds.shape)).astype(np.int32)),
        tensor(fixed),
    )
