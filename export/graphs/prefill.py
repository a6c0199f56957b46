"""A whole prompt -> logits, a compressed store and the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engines.bundle import TensorSpec
from engines.errors import UserError
from export.attention import LOWEST, Block, blocks_of, full_attention, visible
from export.compress import KeyStatistics
from export.graphs.graph import Decoding
from export.graphs.state import State
from export.stages.importance import ExpectedAttention
from export.stages.importance.importance import Observation
from export.stages.positions import turns_halves
from export.stages.shorten.shorten import Rows, take
from export.stages.tokens import ALIGNED, PADDING, TEXT, Tokens, first_marks


@dataclass
class Prompt:
    """The prompt's rows as one layer sees them: behind the layer that shortens it, there are fewer.

    Attributes:
        positions: original ones, [batch, rows], int32; -1 where empty.
        kinds: PADDING, TEXT or VISUAL, [batch, rows], int32.
        bias: 0 a token, log(n) n merged, -inf padding, [batch, rows], float32.
        marks: as `Tokens.marks`, [batch, rows], int32.
        position_ids: of M-RoPE, [3, batch, rows].
        block, blocks: as in `attention.visible`.
    """

    positions: Tensor
    kinds: Tensor
    bias: Tensor
    marks: Tensor
    position_ids: Tensor | None = None
    block: Block | None = None
    blocks: Tensor | None = None
    _sights: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def sight(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Whether a query may look at a row, bool [batch, queries, rows], padding queries too; and what is added to the
        logits for it, finite. By the sliding window of a layer.
        """
        if window not in self._sights:
            seen = visible(self.kinds != PADDING, self.positions, window, self.block, self.blocks)
            self._sights[window] = seen, torch.where(seen, self.bias[:, None], LOWEST)
        return self._sights[window]

    def tokens(self, key: Tensor, value: Tensor, mass: Tensor, center: Tensor | None) -> Tokens:
        """The rows as cached tokens."""
        heads = (-1, key.shape[1], -1)
        travel = (self.positions, self.kinds, self.bias, self.marks)
        positions, kinds, bias, marks = (x[:, None].expand(heads) for x in travel)
        return Tokens(key, value, positions, kinds, bias, mass, center, marks)


class Prefill(Decoding):
    """Embeddings of a left-padded prompt -> logits of its last token, compressed store, window."""

    kind = "prefill"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        decoder, importance = state.decoder, state.recipe.importance
        if isinstance(importance, ExpectedAttention) and not turns_halves(decoder.language_model, decoder.head_dim):
            raise UserError("[importance] expected-attention needs RoPE that turns a head's two halves: take another")
        shape = [state.batch, state.length]
        self._takes(
            TensorSpec("embeddings", "float32", [*shape, state.decoder.hidden_size]),
            TensorSpec("positions", "int32", shape),
            TensorSpec("kinds", "int32", shape),
            *([TensorSpec("segments", "int32", shape)] if state.needs_segments else []),
            *self.more(shape),
        )
        self.outputs = ["logits", *state.specs()]

    def compute(  # type: ignore[override]
        self,
        embeddings: Tensor,
        positions: Tensor,
        kinds: Tensor,
        segments: Tensor | None = None,
        position_ids: Tensor | None = None,
        deepstack: Tensor | None = None,
    ) -> dict[str, Tensor]:
        state, real = self.state, kinds != PADDING
        importance, protect, shorten = state.recipe.importance, state.recipe.protect, state.recipe.shorten
        marks = torch.zeros_like(kinds) if segments is None else first_marks(kinds, segments)
        places, bias = torch.where(real, positions, -1), torch.where(real, 0.0, -torch.inf)
        block, blocks = state.decoder.block, blocks_of(state.decoder.block, kinds, segments)
        prompt = Prompt(places, kinds, bias, marks, position_ids, block, blocks)
        received = torch.zeros(kinds.shape)  # in the layer before the prompt is shortened
        cached: dict[int, Tokens] = {}

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            nonlocal received
            key, length = self.centred(key, layer), key.shape[2]
            seen, mask = prompt.sight(state.decoder.sliding_window(layer))

            @cache
            def seen_by(queries: int) -> Observation:
                last = slice(length - queries, length)
                its = seen[:, last] & (prompt.kinds != PADDING)[:, last, None]
                return Observation(
                    query[:, :, last], key, mask[:, last], its, prompt.kinds, scale,
                    center=self.center_of(layer), positions=prompt.positions, position_ids=prompt.position_ids,
                    rotary=partial(self.rotary, layer),
                )  # fmt: skip

            if state.shortened and layer == shorten.layer - 1 and shorten.queries:
                received = seen_by(min(shorten.queries, length)).attention.mean(dim=(1, 2)).sum(dim=1)
            observers = importance.observers(length)
            mass = importance.observe(seen_by(observers)) if observers else torch.zeros(key.shape[:3])
            tokens = cached[layer] = prompt.tokens(key, value, mass, self.center_of(layer))
            if protect.aligns:
                tokens.marks = tokens.marks + ALIGNED * protect.aligned(seen_by(length)).int()
            return self.attend(query, key, value, mask, scale)

        def fewer(hidden: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal prompt
            place = torch.arange(state.length).expand(kinds.shape)
            fixed = (kinds == TEXT) | (place >= state.length - max(state.recent, 1))
            numbers = torch.zeros_like(kinds) if segments is None else segments
            rows = shorten(Rows(hidden, place, kinds, prompt.bias, received, numbers, fixed))
            positions, marks = take(prompt.positions, rows.index), take(prompt.marks, rows.index)
            ids = None if position_ids is None else position_ids.gather(2, rows.index.expand(3, -1, -1))
            own = None if prompt.blocks is None else take(prompt.blocks, rows.index)
            prompt = Prompt(positions, rows.kinds, rows.bias, marks, ids, block, own)
            return rows.hidden, rows.index

        with before_layer(self.language_model, shorten.layer, fewer) if state.shortened else nullcontext():
            turned = positions if position_ids is None else position_ids
            result = {"logits": self.logits(embeddings, turned, attention, deepstack)}
        edges = [length - state.recent for length in state.lengths]  # what lies behind them is the window's
        newest = prompt.positions.amax(dim=1)
        for layer, edge in enumerate(edges):
            tokens = self.reachable(cached[layer][:edge], layer, newest)
            result |= {f"{name}.{layer}": t for name, t in self.layer(layer)(tokens).items()}
        window = [cached[layer][edge:] for layer, edge in enumerate(edges)]
        free = state.window - state.recent
        dtype = getattr(torch, state.recipe.window.dtype)
        result["key_window"] = pad(torch.cat([t.key for t in window], dim=1), (0, 0, 0, free)).to(dtype)
        result["value_window"] = pad(torch.cat([t.value for t in window], dim=1), (0, 0, 0, free)).to(dtype)
        result["window_mass"] = pad(torch.cat([t.mass for t in window], dim=1), (0, free))
        result["window_bias"] = pad(prompt.bias[:, edges[-1] :], (0, free), value=-torch.inf)
        result["window_positions"] = pad(prompt.positions[:, edges[-1] :], (0, free), value=-1)
        result["window_kinds"] = pad((prompt.kinds + prompt.marks)[:, edges[-1] :], (0, free), value=PADDING).to(
            torch.int8
        )
        return result

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """What a layer's attention gives, as `full_attention`."""
        return full_attention(query, key, value, mask, scale)


@contextmanager
def before_layer(
    language_model: nn.Module, first: int, change: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Within the block, `change` takes the hidden states [batch, rows, hidden_size] on their way into layer `first`.

    It returns those that go in, and which of the rows they are, [batch, fewer], int64. From there on every layer gets
    the RoPE tables of these rows: nothing is renumbered.
    """
    index = torch.empty(0)

    def shorten(_layer: nn.Module, args: tuple) -> tuple:
        nonlocal index
        hidden, index = change(args[0])
        return hidden, *args[1:]

    def cut(_layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"position_embeddings": tuple(take(t, index) for t in kwargs["position_embeddings"])}

    first_of_them, *_ = layers = list(language_model.get_submodule("layers").children())[first:]
    with ExitStack() as hooks:
        hooks.callback(first_of_them.register_forward_pre_hook(shorten).remove)
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(cut, with_kwargs=True).remove)
        yield
