"""A recipe run as the runtime runs it, and what every head then looks at, told by the tokens as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calibration.evaluate import Eager, Prompt
from engines.errors import UserError
from engines.tokens import marked
from export.compress import KeyStatistics
from export.graphs import Compact, Decode, Decoder, Prefill
from export.recipe import Recipe
from export.stages.merge import Evict
from export.stages.tokens import FIRST, TEXT, VISUAL, Tokens


@dataclass
class Reading:
    """An answer read token by token behind a prompt.

    Attributes:
        log_probs: of the answer's first token, by the prompt, and of every later one, [answer, vocab_size].
        attention: by layer, of the tokens of the answer but the last, which is not read: [answer - 1, heads, tokens];
            tokens are the prompt's as it was before anything of it was pruned, and the answer's.
    """

    log_probs: Tensor
    attention: dict[int, Tensor]


class _Watched(nn.Module):
    """In a quantizer's place in decode: its attention while it is watched, kept by query head and slot."""

    def __init__(self, quantize: Any):
        super().__init__()
        self.quantize, self.on = quantize, False

    def attend(self, query: Tensor, store: dict[str, Tensor], key_window: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        if not self.on:
            return self.quantize.attend(query, store, key_window, *rest)
        group = query.shape[1] // key_window.shape[1]
        # The masses are means over a KV head's query heads: asked with one of them at a time, they are its own.
        each = [self.quantize.attend(query[:, i::group], store, key_window, *rest)[1:] for i in range(group)]
        self.on_store, self.on_window = (torch.stack(masses, dim=2)[0] for masses in zip(*each, strict=True))
        return self.quantize.attend(query, store, key_window, *rest)


class _Traced(nn.Module):
    """In a merge's place: also traces of which tokens' values a slot's value is the mean.

    `parts` has a row for every original position, that of the slot which bears it: [kv_heads, tokens + 1, tokens + 1].
    The last row and column are of empty slots, whose position is -1.
    """

    def __init__(self, merge: nn.Module, parts: Tensor):
        super().__init__()
        self.merge, self.parts = merge, parts

    def forward(self, tokens: Tokens, kept: Tokens, index: Tensor) -> Tokens:
        heads = torch.arange(len(self.parts))[:, None]
        its, own = (self.parts[heads, slots.positions[0].long()] for slots in (tokens, kept))
        mixed = self.merge(
            dataclasses.replace(tokens, value=its[None]), dataclasses.replace(kept, value=own[None]), index
        )
        self.parts[heads, kept.positions[0].long()] = mixed.value[0]
        return self.merge(tokens, kept, index)


class Observed(Eager):
    """A recipe at one bucket, batch 1, whose attention is watched while an answer is read.

    What a merged slot gets goes to the tokens of its mean, each by its part: that much of their values reaches the
    output. A row that `[shorten]` merged counts as the token in whose place it stands.
    """

    def __init__(
        self,
        decoder: Decoder,
        recipe: Recipe,
        length: int,
        layers: Collection[int],
        reach: int,
        statistics: list[KeyStatistics] | None = None,
        later: bool = False,
    ):
        """
        Args:
            layers: that are watched.
            reach: positions of a prompt and its answer, at most.
            later: whether what stands behind the images comes after the compression, token by token.
        """
        super().__init__(decoder, recipe, length, 1, statistics)
        self.reach, self.layers, self.later = reach, layers, later
        prefill, decode = self.graphs[Prefill], self.graphs[Decode]
        # A state that is never compacted has no positions: here they are wanted all the same.
        known = ("window_positions", *(f"store_positions.{layer}" for layer in layers))
        prefill.outputs += [name for name in known if name not in prefill.outputs]
        self.watched = {}
        for layer in layers:
            place = decode.layer(layer)
            self.watched[layer] = place.quantize = _Watched(place.quantize)  # type: ignore[assignment]
        self.parts: dict[int, Tensor] = {}
        if not isinstance(recipe.merge, Evict):
            for layer in layers:
                self.parts[layer] = torch.zeros(decoder.kv_heads[layer], reach + 1, reach + 1)
                for graph in (self.graphs[kind] for kind in (Prefill, Compact) if kind in self.graphs):
                    place = graph.layer(layer)
                    place.merge = _Traced(place.merge, self.parts[layer])  # type: ignore[assignment]

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        for parts in self.parts.values():
            parts.copy_(torch.eye(self.reach + 1))
        (prompt,) = prompts
        visual = (prompt.kinds == VISUAL).nonzero()
        split = int(visual[-1]) + 1 if self.later and len(visual) else len(prompt)
        rows = {f.name: getattr(prompt, f.name) for f in dataclasses.fields(prompt)}
        logits = super().prefill([Prompt(**{name: row[:split] for name, row in rows.items()})])
        kinds = marked(prompt.kinds.numpy(), prompt.segments.numpy())
        for row in range(split, len(prompt)):
            self._make_room()
            at, position_ids = int(prompt.positions[row]), int(prompt.position_ids[row].max())
            logits = self.decode(prompt.embeddings[row][None], [at], int(kinds[row]), [position_ids])
        return logits

    def _make_room(self) -> None:
        if self.full and not self.state.compacts:
            most = self.state.window - self.state.recent
            raise UserError(
                f"recipe {self.state.recipe.name} ends with {most} tokens after the prompt that is compressed, and a "
                "held-out sample has more: let its [window] compact, or make it longer"
            )
        if self.full:
            self.compact()

    def _watch(self, on: bool) -> None:
        for watched in self.watched.values():
            watched.on = on

    def looked_at(self, layer: int, position: int) -> Tensor:
        """What the token just read, at `position`, looked at: [heads, reach]."""
        watched = self.watched[layer]
        store, window = self.tensors[f"store_positions.{layer}"][0], self.tensors["window_positions"][0]
        window = torch.cat([torch.where(window == position, -1, window), torch.tensor([position])])
        seen = torch.zeros(*watched.on_store.shape[:2], self.reach + 1)
        for where, mass in ((store, watched.on_store), (window.expand(len(store), -1), watched.on_window)):
            place = torch.where(where < 0, self.reach, where).long()[:, None].expand(mass.shape)
            seen.scatter_add_(2, place, mass)
        if layer in self.parts:
            seen = seen @ self.parts[layer]
        return seen[..., : self.reach].flatten(0, 1)

    def read(self, prompt: Prompt, answer: Sequence[int], embedding: Tensor, sentence_ends: Collection[int]) -> Reading:
        """Read an answer, teacher-forced.

        Raises:
            UserError: the recipe never compacts its window, and the answer does not fit it.
        """
        logits = [self.prefill([prompt])]
        attention: dict[int, list[Tensor]] = {layer: [] for layer in self.layers}
        self._watch(True)
        at_end, position, shift = True, int(prompt.positions[-1]), prompt.next - 1 - int(prompt.positions[-1])
        for token in answer[:-1]:
            self._make_room()
            position += 1
            kinds = TEXT + FIRST * (at_end and token not in sentence_ends)
            logits.append(self.decode(embedding[token][None], [position], kinds, [position + shift]))
            at_end = token in sentence_ends
            for layer, seen in attention.items():
                seen.append(self.looked_at(layer, position))
        self._watch(False)
        rows = {layer: torch.stack(seen) for layer, seen in attention.items() if seen}
        return Reading(torch.cat(logits).log_softmax(dim=-1), rows)
