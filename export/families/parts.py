"""What the adapters share: parts of Hugging Face's vision encoders exchanged for what is known of one layout."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

# "flash": then Hugging Face's code gives queries, keys and values of all segments at once, their ends, and no mask.
SEGMENTED = "unicache_flash"


class Constant(nn.Module):
    """Returns what is known already, whatever it is called with."""

    def __init__(self, *tensors: Tensor):
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"tensor{index}", tensor, persistent=False)

    def forward(self, *_args: Any, **_options: Any) -> Any:
        known = tuple(self.buffers())
        return known if len(known) > 1 else known[0]


def with_parts(module: Any, **parts: nn.Module) -> Any:
    """The module with some parts exchanged. The original keeps its own, and both share all weights."""
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if getattr(module, "_can_record_outputs", None):
        maybe_install_capturing_hooks(module)  # else every copy hangs its own on shared layers
    changed = copy.copy(module)
    changed._modules = {**module._modules, **parts}
    return changed


def output_of(part: nn.Module, run: Callable[[], object]) -> Tensor:
    """What a part returns while `run` runs."""
    seen: list[Tensor] = []
    hook = part.register_forward_hook(lambda _part, _args, output: seen.append(output))
    with torch.no_grad():
        run()
    hook.remove()
    return seen[0]


@contextlib.contextmanager
def segmented(config: Any) -> Iterator[None]:
    """Within the block, the attention of a vision encoder with this configuration goes by segments."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SEGMENTED, _attention)
    before, config._attn_implementation = config._attn_implementation, SEGMENTED
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Any = None,
    max_length_q: int | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attention of every segment's tokens among themselves; equal segments that follow each other are done at once.

    Args:
        query, key, value: [1, heads, tokens, head_dim].
        cu_seq_lens_q: where segments end, 0 first; where the last one ends before the last token, they begin anew.
            Not read if one segment holds all tokens.
        max_length_q: tokens of the longest segment.

    Returns:
        [1, tokens, heads, head_dim].
    """
    tokens, outputs = query.shape[2], []
    ends = [0, tokens] if max_length_q == tokens else cu_seq_lens_q.tolist()
    frames = [states[0].unflatten(1, (-1, ends[-1])) for states in (query, key, value)]  # [heads, frames, frame, D]
    for length, run in groupby(pairwise(ends), lambda segment: segment[1] - segment[0]):
        segments = list(run)
        rows = slice(segments[0][0], segments[-1][1])
        many = [states[:, :, rows].unflatten(2, (-1, length)) for states in frames]  # [heads, frames, segments, ...]
        batch = [states.flatten(0, 2)[None] for states in many]
        output = scaled_dot_product_attention(batch[0], batch[1], batch[2], scale=scaling)
        outputs.append(output.reshape(frames[0][:, :, rows].shape))
    return torch.cat(outputs, dim=2).flatten(1, 2).transpose(0, 1)[None], None
