"""A long text is read once, and recipe after recipe compresses what was read: prefill is the same for all of them.

For measuring at lengths where prefill takes minutes, on models of text alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from calibration.evaluate import Eager, Prompt
from calibration.observe import forward
from engines.errors import UserError
from engines.tokens import marked, segments
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Decoder, Extend, Prefill, State
from export.recipe import Recipe
from export.stages.tokens import TEXT


def prompt_of_ids(checkpoint: Checkpoint, ids: Sequence[int]) -> Prompt:
    """A text by its tokens."""
    tokens = torch.tensor(ids)
    sentences = torch.from_numpy(segments(tokens.numpy(), torch.zeros_like(tokens).numpy(), checkpoint.sentence_ends))
    places = torch.arange(len(tokens))
    return Prompt(checkpoint.embedding[tokens], torch.full_like(tokens, TEXT), places, sentences)


def observers(recipe: Recipe, length: int) -> int:
    """How many of a prompt's last queries its stages look through."""
    return length if recipe.protect.aligns else recipe.importance.observers(length)


@dataclass(eq=False)
class Read:
    """What prefill computes of a text before anything is compressed; of every layer, batch 1.

    Attributes:
        ids: the text.
        queries: the last ones, after RoPE, [1, heads, last, head_dim].
        keys, values: [1, kv_heads, tokens, head_dim], the keys after RoPE.
        scales: of the softmax.
        hidden: of the last token, [1, 1, hidden_size].
    """

    ids: list[int]
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


def read(checkpoint: Checkpoint, ids: Sequence[int], last: int, before: Read | None = None) -> Read:
    """Read a text in full precision.

    Args:
        ids: its tokens; those behind `before`, if that is given.
        last: queries to keep.

    Raises:
        UserError: the decoder's attention is not plainly causal.
    """
    decoder, start = checkpoint.decoder, len(before.ids) if before else 0
    if decoder.slides or decoder.block or decoder.mrope or decoder.softcap or checkpoint.takes_images:
        raise UserError(f"{checkpoint.path}: texts are read at once by plain causal attention only, as Llama's is")
    found = Read([*(before.ids if before else ()), *ids])
    mask = torch.ones(len(ids), start + len(ids), dtype=torch.bool).tril(start) if before else None

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        found.scales.append(scale)
        kept = query
        if before:
            key, value = (
                torch.cat([old[layer], new], dim=2) for old, new in ((before.keys, key), (before.values, value))
            )
            kept = torch.cat([before.queries[layer], query], dim=2)
        found.queries.append(kept[:, :, -last:].clone())
        found.keys.append(key)
        found.values.append(value)
        key, value = (rows.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for rows in (key, value))
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=float(scale)
        )

    whole = prompt_of_ids(checkpoint, found.ids)
    rows = {f.name: getattr(whole, f.name)[start:] for f in dataclasses.fields(whole)}
    # The last of the model's modules norms what its last layer gives: that is what the head reads.
    hook = decoder.language_model.register_forward_hook(
        lambda _module, _args, out: setattr(found, "hidden", out[0][:, -1:])
    )
    try:
        forward(decoder, Prompt(**rows), attention)
    finally:
        hook.remove()
    return found


class _Replayed(Prefill):
    """Prefill whose layers do not run: they hand on what they once computed."""

    known: Read

    def logits(self, embeddings: Tensor, positions: Tensor, attention, deepstack: Tensor | None = None) -> Tensor:
        for layer, scale in enumerate(self.known.scales):
            rows = (self.known.queries[layer], self.known.keys[layer], self.known.values[layer])
            # Left-padded to the bucket; queries that nobody looks through are missing.
            attention(layer, *(pad(row, (0, 0, self.state.length - row.shape[2], 0)) for row in rows), scale)
        return self.head(self.known.hidden[:, -1])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        return query  # nobody reads what comes of it


class _EveryRow(Extend):
    """Extend that tells the logits of all its rows, [batch, tokens, vocab_size]."""

    def told(self, hidden: Tensor) -> Tensor:
        return hidden


class Replay(Eager):
    """A recipe at one bucket, batch 1, on texts that were read before."""

    def __init__(self, decoder: Decoder, recipe: Recipe, length: int, statistics: list[KeyStatistics] | None = None):
        """
        Raises:
            UserError: the recipe changes prefill itself.
        """
        state = State(decoder, recipe, length)
        if state.shortened:
            raise UserError(f"recipe {recipe.name} shortens prompts inside the model: a text read before cannot tell")
        super().__init__(decoder, recipe, length, 1, statistics)
        self.replayed = _Replayed(self.state, statistics).eval()
        self.graphs |= {Prefill: self.replayed, Extend: _EveryRow(self.state, statistics).eval()}

    def score(self, checkpoint: Checkpoint, known: Read, following: Sequence[int]) -> Tensor:
        """Log probabilities of every token at the places of those that follow, [following, vocab_size].

        What follows is read as the runtime reads a long prompt or a new turn: a chunk at a time, and the window is
        compacted when it is full.

        Raises:
            UserError: the recipe never compacts its window, and this does not fit it.
        """
        self.replayed.known = known
        prompt = prompt_of_ids(checkpoint, known.ids)
        rows = [self.prefill([prompt])]
        whole = prompt_of_ids(checkpoint, [*known.ids, *following[:-1]])
        kinds = torch.from_numpy(marked(whole.kinds.numpy(), whole.segments.numpy()))
        at = len(prompt)
        while at < len(whole):
            if self.full and not self.state.compacts:
                raise UserError(
                    f"recipe {self.state.recipe.name} holds {self.state.window} tokens behind a prompt: score fewer"
                )
            if self.full:
                self.compact()
            end = min(at + min(self.state.chunk, self.state.window - self.count), len(whole))
            part = slice(at, end)
            logits = self.extend(whole.embeddings[None, part], whole.positions[None, part], kinds[None, part])
            rows.append(logits[0, at - end :])
            at = end
        return torch.cat(rows).log_softmax(dim=-1)
