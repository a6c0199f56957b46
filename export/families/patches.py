"""Encoders of Qwen's kind: a picture of any size, or a video, as patches [t * h * w, channels * frames * side * side].

Where a patch lies, which others it attends to and how learned positions are stretched depends on the layout's grid
only: all of that is constant in the graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines.layout import Layout
from export.families.parts import Constant, segmented, with_parts


class Added(nn.Module):
    """GLM-4V's learned positions, stretched to the grid."""

    positions: Tensor

    def __init__(self, positions: Tensor):
        super().__init__()
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden + self.positions


def linear(convolution: Any) -> nn.Linear:
    """A convolution over single patches, laid out flat: one matrix product in place of one a patch."""
    weight = convolution.weight.flatten(1)
    outputs, inputs = weight.shape
    flat = nn.Linear(inputs, outputs, bias=convolution.bias is not None, device="meta")
    flat.weight, flat.bias = nn.Parameter(weight, requires_grad=False), convolution.bias
    return flat


class Patches(nn.Module):
    """Qwen2-VL, Qwen3-VL and GLM-4V, where every frame attends to itself.

    Returns visual tokens [1, N, hidden_size]; of Qwen3-VL also what is added behind its decoder's first layers,
    [taps, N, hidden_size].
    """

    positions: Tensor
    weights: Tensor
    indices: Tensor

    def __init__(self, model: Any, layout: Layout):
        super().__init__()
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

        visual, (frames, height, width) = model.model.visual, layout.grid
        self.frame, grid = height * width, torch.tensor([[1, height, width]] * frames)
        positions = get_vision_position_ids(grid, visual.spatial_merge_size).to(model.device)
        self.register_buffer("positions", positions, persistent=False)
        embed = linear(visual.patch_embed.proj)
        self.rotary = Constant(*visual.rotary_pos_emb(embed.weight, positions))
        parts: dict[str, nn.Module] = {"patch_embed": embed, "rotary_pos_emb": self.rotary}
        if hasattr(visual, "embeddings"):
            blank = torch.zeros(len(positions), embed.out_features, device=model.device)
            lengths = torch.full([frames], self.frame, device=model.device)
            parts["embeddings"] = Added(visual.embeddings(blank, lengths, grid.to(model.device), *positions.T))
        self.stretched = hasattr(visual, "num_grid_per_side")
        if self.stretched:
            indices, weights = get_vision_interpolation_indices_and_weights(
                grid,
                visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=visual.spatial_merge_size,
            )
            self.register_buffer("indices", indices.to(model.device), persistent=False)
            self.register_buffer("weights", weights.to(model.device), persistent=False)
        self.visual = with_parts(visual, **parts)

    def forward(self, pixel_values: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        known = {"position_ids": self.positions, "cu_seqlens": np.array([0, self.frame]), "max_seqlen": self.frame}
        if self.stretched:
            known |= {"interp_indices": self.indices, "interp_weights": self.weights}
        with segmented(self.visual.config):
            found = self.visual(pixel_values, grid_thw=None, return_dict=True, **known)
        tokens = found.pooler_output[None]
        taps = getattr(found, "deepstack_features", None)
        return tokens if taps is None else (tokens, torch.stack(taps))


class Windows(Patches):
    """Qwen2.5-VL: most layers attend within windows, of which those at the edges may be smaller.

    Windows of one size are put next to each other, so that a layer is a few batches of attention and not one a window.
    """

    order: Tensor
    back: Tensor

    def __init__(self, model: Any, layout: Layout):
        super().__init__(model, layout)
        from transformers.vision_utils import get_vision_window_index

        visual, unit = self.visual, self.visual.spatial_merge_unit
        index, ends = get_vision_window_index(
            torch.tensor([[1, *layout.grid[1:]]]), visual.spatial_merge_size, visual.window_size, visual.patch_size
        )
        windows = sorted(index.split((ends.diff() // unit).tolist()), key=len)
        self.ends = np.cumsum([0, *(len(window) * unit for window in windows)])
        frames = torch.arange(layout.grid[0])[:, None] * len(index)
        order = (frames + torch.cat(windows)).flatten().to(model.device)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)
        self.rotary = Constant(*(self.sorted(table) for table in self.rotary()))

    def sorted(self, rows: Tensor) -> Tensor:
        """Rows [patches, size], window after window; the patches that will be one token stay together."""
        return rows.unflatten(0, (len(self.order), -1))[self.order].flatten(0, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        visual = self.visual
        hidden = self.sorted(visual.patch_embed(pixel_values))
        with segmented(visual.config):
            for layer, block in enumerate(visual.blocks):
                ends = np.array([0, self.frame]) if layer in visual.fullatt_block_indexes else self.ends
                longest = int(np.diff(ends).max())
                hidden = block(hidden, cu_seqlens=ends, max_seqlen=longest, position_embeddings=self.rotary())
        return visual.merger(hidden)[self.back][None]
