"""Run a recipe without exporting it: the graph modules, driven in PyTorch as the runtime drives their graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines.tokens import FIRST, segments
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import NEW, Compact, Decode, Decoder, Extend, Prefill, State, Stateful, added, split
from export.recipe import Recipe
from export.stages.tokens import PADDING, TEXT, VISUAL

NONE = torch.empty(0)


@dataclass(eq=False)
class Prompt:
    """A prompt as prefill takes it, without padding.

    Attributes:
        embeddings: of its tokens, visual ones in their places, [tokens, hidden_size], float32.
        kinds: TEXT or VISUAL, [tokens].
        positions: original positions, [tokens]; 0, 1, ... unless visual tokens were pruned.
        segments: number of a token's image or sentence, [tokens], as `engines.tokens` counts.
        position_ids: its position ids of M-RoPE, [tokens, 3]; the position three times unless given.
        deepstack: what is added behind the first layers, [tokens, taps, hidden_size]; of no taps unless given.
    """

    embeddings: Tensor
    kinds: Tensor
    positions: Tensor
    segments: Tensor
    position_ids: Tensor = NONE
    deepstack: Tensor = NONE

    def __post_init__(self) -> None:
        if self.position_ids.ndim == 1:
            self.position_ids = self.positions[:, None].expand(-1, 3)
        if self.deepstack.ndim == 1:
            self.deepstack = self.embeddings.new_zeros(len(self), 0, self.embeddings.shape[1])

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def next(self) -> int:
        """Position id of the token that follows."""
        return int(self.position_ids.max()) + 1

    def followed(self, embeddings: Tensor) -> Prompt:
        """The prompt and text behind it, [more, hidden_size]."""
        more = len(embeddings)
        return Prompt(
            embeddings=torch.cat([self.embeddings, embeddings]),
            kinds=torch.cat([self.kinds, torch.full([more], TEXT)]),
            positions=torch.arange(len(self) + more),
            segments=torch.cat([self.segments, self.segments.new_zeros(more)]),
            position_ids=torch.cat([self.position_ids, self.next + torch.arange(more)[:, None].expand(-1, 3)]),
            deepstack=torch.cat([self.deepstack, self.deepstack.new_zeros(more, *self.deepstack.shape[1:])]),
        )

    def read(self, decoder: Decoder) -> None:
        """Run the decoder on it; what its attention does is set around."""
        positions = decoder.turned(self.position_ids.T[:, None] if decoder.mrope else self.positions[None])
        with added(decoder.language_model, self.deepstack.movedim(1, 0)[:, None]):
            turned = decoder.turned(positions)
            decoder.language_model(inputs_embeds=self.embeddings[None], position_ids=turned, use_cache=False)


def prompt_of(checkpoint: Checkpoint, inputs: dict[str, Any]) -> Prompt:
    """The prompt that the processor's tensors (`samples.processed`, batch 1) describe, with every visual token."""
    ids: Tensor = inputs["input_ids"][0]
    visual = ids == checkpoint.image_token_id
    embeddings, decoder = checkpoint.embedding[ids].clone(), checkpoint.decoder
    deepstack = torch.zeros(len(ids), decoder.deepstack, decoder.hidden_size)
    if visual.any():
        with torch.no_grad():
            pictures = inputs["pixel_values"].reshape(-1, *checkpoint.layouts[0].pixel_values)
            encoded = [split(checkpoint.encoder(pixels)) for pixels in pictures]
        embeddings[visual] = torch.cat([tokens[0] for tokens, _ in encoded])
        deepstack[visual] = torch.cat([taps for _, taps in encoded], dim=1).movedim(0, 1)
    images = torch.where(visual, (visual.cumsum(0) - 1) // max(checkpoint.image_tokens, 1) + 1, 0)
    numbers = torch.from_numpy(segments(ids.numpy(), images.numpy(), checkpoint.sentence_ends))
    positions = torch.arange(len(ids))
    prompt = Prompt(embeddings, torch.where(visual, VISUAL, TEXT), positions, numbers, deepstack=deepstack)
    if decoder.mrope:
        grids = inputs["image_grid_thw"].tolist() if visual.any() else []
        prompt.position_ids = torch.from_numpy(decoder.mrope.position_ids(visual.numpy(), grids)).T
    return prompt


class Eager:
    """A recipe at one bucket, run on a batch of prompts. `perception` is not applied: prompts come as they are.

    Attributes:
        tensors: the KV state by name, as `State.specs` says; empty before `prefill`.
        count: window slots in use.
        compactions: since `prefill`.
    """

    def __init__(
        self,
        decoder: Decoder,
        recipe: Recipe,
        length: int,
        batch: int = 1,
        statistics: list[KeyStatistics] | None = None,
    ):
        """
        Args:
            length: the bucket; prompts are padded to it on the left.
            statistics: one a layer, where `recipe.quantize.calibrated`.
        """
        self.state = State(decoder, recipe, length, batch)
        kinds = (Prefill, Decode, Extend, *([Compact] if self.state.compacts else []))
        self.graphs: dict[type[Stateful], Stateful] = {kind: kind(self.state, statistics).eval() for kind in kinds}
        self.tensors: dict[str, Tensor] = {}
        self.count = self.compactions = 0

    @property
    def full(self) -> bool:
        """Whether the window must be compacted before the next token."""
        return self.count == self.state.window

    def run(self, kind: type[Stateful], feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a graph returns, by name; `feeds` may hold more than its inputs."""
        graph = self.graphs[kind]
        with torch.no_grad():
            results = graph(*(feeds[spec.name] for spec in graph.inputs.values()))
        return dict(zip(graph.outputs, results, strict=True))

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Read `batch` prompts; logits of their last tokens, [batch, vocab_size]."""
        state = self.state
        if (longest := max(map(len, prompts))) > state.length:
            raise ValueError(f"a prompt of {longest} tokens does not fit a bucket of {state.length}")
        texts = [int((prompt.kinds == TEXT).sum()) for prompt in prompts]
        if (short := state.shortened) and not all(map(short.fits, map(len, prompts), texts)):
            raise ValueError(f"{max(texts)} text tokens do not fit a prompt that is shortened to {short.tokens}")
        shape = (state.batch, state.length)
        embeddings = torch.zeros(*shape, state.decoder.hidden_size)
        positions = torch.zeros(shape, dtype=torch.int32)
        kinds = torch.full(shape, PADDING, dtype=torch.int32)
        numbers = torch.zeros(shape, dtype=torch.int32)
        position_ids = torch.zeros(3, *shape, dtype=torch.int32)
        deepstack = torch.zeros(state.decoder.deepstack, *shape, state.decoder.hidden_size)
        for row, prompt in enumerate(prompts):
            embeddings[row, -len(prompt) :] = prompt.embeddings
            positions[row, -len(prompt) :] = prompt.positions
            kinds[row, -len(prompt) :] = prompt.kinds
            numbers[row, -len(prompt) :] = prompt.segments
            position_ids[:, row, -len(prompt) :] = prompt.position_ids.T
            deepstack[:, row, -len(prompt) :] = prompt.deepstack.movedim(1, 0)
        feeds = {"embeddings": embeddings, "positions": positions, "kinds": kinds, "segments": numbers}
        out = self.run(Prefill, {**feeds, "position_ids": position_ids, "deepstack": deepstack})
        logits = out.pop("logits")
        self.tensors, self.count, self.compactions = out, state.recent, 0
        return logits

    def compact(self) -> None:
        """Move the older part of the window into the store."""
        replaced = self.run(Compact, self.tensors)
        self.tensors = {name.removeprefix(NEW): tensor for name, tensor in replaced.items()}
        self.count, self.compactions = self.state.recent, self.compactions + 1

    def decode(
        self,
        embedding: Tensor,
        positions: Sequence[int],
        kinds: int | Tensor = TEXT,
        position_ids: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits [batch, vocab_size] after one more token each; embedding [batch, hidden_size].

        Args:
            kinds: of the tokens, `FIRST` added where one begins a sentence, [batch].
            position_ids: their position ids; None: the positions.
        """
        position, ids = (torch.tensor(at, dtype=torch.int32)[:, None] for at in (positions, position_ids or positions))
        out = self.run(Decode, {**self.tensors, "embedding": embedding[:, None], "position": ids})
        return self._write(out, position, torch.as_tensor(kinds).expand(self.state.batch)[:, None])

    def extend(
        self,
        embeddings: Tensor,
        positions: Tensor,
        kinds: Tensor,
        position_ids: Tensor | None = None,
        deepstack: Tensor | None = None,
    ) -> Tensor:
        """Logits [batch, vocab_size] after several tokens more, read at once; the window must have room for them.

        Args:
            embeddings: [batch, tokens, hidden_size]; positions and kinds: [batch, tokens].
            position_ids: position ids, [3, batch, tokens]; None: the positions.
            deepstack: [taps, batch, tokens, hidden_size]; None: nothing is added.
        """
        padding, taps = self.state.chunk - positions.shape[1], self.state.decoder.deepstack
        position_ids = positions.expand(3, -1, -1) if position_ids is None else position_ids
        deepstack = embeddings.new_zeros(taps, *embeddings.shape) if deepstack is None else deepstack
        feeds = {
            "embeddings": pad(embeddings, (0, 0, padding, 0)),
            "positions": pad(positions.int(), (padding, 0)),
            "kinds": pad(kinds.int(), (padding, 0), value=PADDING),
            "position_ids": pad(position_ids.int(), (padding, 0)),
            "deepstack": pad(deepstack, (0, 0, padding, 0)),
        }
        return self._write(self.run(Extend, self.tensors | feeds), positions, kinds)

    def _write(self, out: dict[str, Tensor], positions: Tensor, kinds: Tensor) -> Tensor:
        """Take over what decode or extend returned, the last of its rows into free slots; the logits."""
        for name, tensor in out.items():
            if name.removeprefix(NEW) in self.tensors:
                self.tensors[name.removeprefix(NEW)] = tensor
        rows, t = positions.shape[1], self.tensors
        slots = slice(self.count, self.count + rows)
        t["key_window"][:, :, slots] = out["new_key"][:, :, -rows:]
        t["value_window"][:, :, slots] = out["new_value"][:, :, -rows:]
        if self.state.counts_mass:
            t["window_mass"][..., slots] = out["new_mass"][..., -rows:]
        t["window_bias"][:, slots] = 0
        if "window_positions" in t:
            t["window_positions"][:, slots] = positions.int()
        if "window_kinds" in t:
            t["window_kinds"][:, slots] = kinds.to(torch.int8)
        self.count += rows
        return out["logits"]

    def generate(
        self,
        prompts: Sequence[Prompt],
        embedding: Tensor,
        most: int,
        ends: Collection[int] = (),
        sentence_ends: Collection[int] = (),
    ) -> list[list[int]]:
        """Greedy answers, until each has ended or a window that is never compacted is full.

        Args:
            prompts: 1 to `batch`; missing ones are filled up and not returned.
            embedding: of every token id, [vocab_size, hidden_size].
            most: tokens of an answer, at most.
            ends: ids that end an answer.
            sentence_ends: ids that end a sentence of it.

        Returns:
            Token ids of every prompt's answer, up to and with the one that ends it.
        """
        if not 1 <= len(prompts) <= self.state.batch:
            raise ValueError(f"{len(prompts)} prompts do not fit a batch of {self.state.batch}")
        filled = [*prompts, *[prompts[-1]] * (self.state.batch - len(prompts))]
        tokens = [self.prefill(filled).argmax(dim=-1)]
        ended = torch.isin(tokens[0], torch.tensor([*ends]))
        ending, after = torch.tensor([*sentence_ends]), torch.tensor(True)  # an answer begins a sentence
        while len(tokens) < most and not ended.all():
            if self.full and not self.state.compacts:
                break
            if self.full:
                self.compact()
            # Answers go on from the prompt's last position, also where tokens before it were pruned.
            positions = [int(prompt.positions[-1]) + len(tokens) for prompt in filled]
            position_ids = [prompt.next - 1 + len(tokens) for prompt in filled]
            at_end = torch.isin(tokens[-1], ending)
            kinds = TEXT + FIRST * (after & ~at_end).int()
            tokens.append(self.decode(embedding[tokens[-1]], positions, kinds, position_ids).argmax(dim=-1))
            after = at_end
            ended |= torch.isin(tokens[-1], torch.tensor([*ends]))
        return [_until(row, ends) for row in torch.stack(tokens, dim=1)[: len(prompts)].tolist()]


def _until(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first that ends the answer."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens)) + 1]
