"""Position ids of M-RoPE: three a token, of time, height and width, as Hugging Face's `get_rope_index` counts them.

One statement for the runtime and for calibration; numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MRope:
    """What families count differently.

    Attributes:
        merge: patches that one visual token is made of, along height and along width.
        tokens_per_second: positions that a second of a video takes (Qwen2.5-VL); None: one position a frame.
        frames_apart: whether every frame of a video stands by itself, its time as text before it (Qwen3-VL, GLM-4V).
    """

    merge: int = 2
    tokens_per_second: float | None = None
    frames_apart: bool = False

    def __post_init__(self) -> None:
        if self.merge < 1:
            raise ValueError(f"merge must be at least 1, got {self.merge}")

    def position_ids(
        self, visual: np.ndarray, grids: Sequence[Sequence[int]], start: int = 0, seconds: Sequence[float] | None = None
    ) -> np.ndarray:
        """Position ids of a prompt before any of its tokens is pruned, int32 [3, P].

        A text token takes the next position. A picture's tokens lie at the next position plus their frame, row and
        column; what follows begins behind the longer side. The token after the prompt has the highest of all ids + 1.

        Args:
            visual: which tokens are of pictures, bool [P].
            grids: [t, h, w] patches of each image (t is 1) and video, in the order of the prompt.
            start: position of the first token.
            seconds: that each of them shows by one of its t; 1 unless given.
        """
        blocks = [
            b for grid, s in zip(grids, seconds or [1.0] * len(grids), strict=True) for b in self._blocks(grid, s)
        ]
        ends = np.cumsum([offsets.shape[1] for offsets, _ in blocks], dtype=np.int64)
        places = np.flatnonzero(visual)
        if len(places) != (ends[-1] if blocks else 0):
            raise ValueError(f"the prompt has {len(places)} visual tokens, grids {[*map(list, grids)]} another number")
        advance = np.where(visual, 0, 1)
        advance[places[ends - 1]] = [sides for _, sides in blocks]
        ids = np.tile(start + np.cumsum(advance) - advance, (3, 1))
        if blocks:
            ids[:, places] += np.concatenate([offsets for offsets, _ in blocks], axis=1)
        return ids.astype(np.int32)

    def tokens(self, grid: Sequence[int]) -> int:
        """That [t, h, w] patches become."""
        return grid[0] * (grid[1] // self.merge) * (grid[2] // self.merge)

    def _blocks(self, grid: Sequence[int], seconds: float) -> list[tuple[np.ndarray, int]]:
        """Of each part that stands by itself: frame, row and column of its tokens, [3, n], and its longer side."""
        frames, height, width = grid[0], grid[1] // self.merge, grid[2] // self.merge
        times, alone = (frames, 1) if self.frames_apart else (1, frames)
        offsets = np.indices((alone, height, width)).reshape(3, -1)
        if self.tokens_per_second is not None:  # in float32, as there
            offsets[0] = offsets[0].astype(np.float32) * (np.float32(self.tokens_per_second) * np.float32(seconds))
        return [(offsets, max(height, width))] * times
