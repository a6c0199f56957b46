"""What the static-shape graphs share: tensors by name, the KV state, the decoder inside."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engines.bundle import TensorSpec
from export.attention import attention_by
from export.compress import Compress, KeyStatistics
from export.graphs.state import State
from export.stages.tokens import Tokens

Kind = typing.Literal["vision", "prefill", "decode", "extend", "compact"]
NEW = "new_"  # a graph cannot return a tensor under an input's name: `new_X` replaces X


class Graph(nn.Module):
    """A module whose positional inputs and outputs have names: `inputs` and `outputs`, in order."""

    kind: Kind
    inputs: dict[str, TensorSpec]
    outputs: list[str]

    def compute(self, **tensors: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.compute(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)

    def _takes(self, *specs: TensorSpec) -> None:
        self.inputs = {spec.name.replace(".", "__"): spec for spec in specs}


class Stateful(Graph):
    """What all but vision share: the KV state, the keys' centres and one `Compress` a layer."""

    center: Tensor | None  # of all layers' heads side by side, [sum of H_l, 1, D]

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__()
        self.state = state
        layers = state.decoder.num_layers
        known: Sequence[KeyStatistics | None] = statistics if statistics else [None] * layers
        by_layer = zip(state.quantize, state.recipe.modality.by_layer(layers), strict=True)
        recipes = [replace(state.recipe, quantize=q, modality=m) for q, m in by_layer]  # type: ignore[arg-type]  # methods
        self.compress = nn.ModuleList(
            Compress(recipe, slots, layer / layers, known[layer])
            for layer, (recipe, slots) in enumerate(zip(recipes, state.capacities, strict=True))
        )
        centers = [each.center for each in statistics or []] if any(own.center for own in state.quantize) else []
        self.register_buffer("center", torch.cat(centers)[:, None] if centers else None)

    def center_of(self, layer: int) -> Tensor | None:
        """What is subtracted from a layer's keys, [kv_heads, 1, head_dim]."""
        if self.center is None or not self.state.quantize[layer].center:
            return None
        return self.center[self.state.decoder.heads(layer)]

    def reachable(self, tokens: Tokens, layer: int, newest: Tensor) -> Tokens:
        """The tokens less those that no later query of a layer with a sliding window can see.

        Args:
            newest: position of the last token that was read, [batch].
        """
        window = self.state.decoder.sliding_window(layer)
        return tokens.only(newest[:, None, None] + 1 - tokens.positions < window) if window else tokens

    def layer(self, index: int) -> Compress:
        return typing.cast(Compress, self.compress[index])

    def state_of(self, tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
        """The store tensors of one layer, without the layer's number."""
        return {name.split("__")[0]: t for name, t in tensors.items() if name.endswith(f"__{layer}")}


class Decoding(Stateful):
    """What prefill, decode and extend share: the decoder itself and the centring of keys."""

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        self.language_model, self.head = state.decoder.language_model, state.decoder.head

    def more(self, shape: list[int]) -> list[TensorSpec]:
        """What M-RoPE and DeepStack take of a prompt or a chunk of this shape, [batch, tokens]."""
        decoder, specs = self.state.decoder, []
        if decoder.mrope:
            specs.append(TensorSpec("position_ids", "int32", [3, *shape]))
        if decoder.deepstack:
            specs.append(TensorSpec("deepstack", "float32", [decoder.deepstack, *shape, decoder.hidden_size]))
        return specs

    def centred(self, key: Tensor, layer: int) -> Tensor:
        """Keys less their head's calibrated mean: softmax does not change, quantization does."""
        center = self.center_of(layer)
        return key if center is None else key - center

    def rotary(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE of a layer: positions [batch, n] or position ids -> cos and sin, [batch, n, head_dim]."""
        model: Any = self.language_model
        # Gemma 3 turns the layers with a sliding window by a base of their own.
        which = [model.config.layer_types[layer]] if hasattr(model.rotary_emb, "layer_types") else []
        return model.rotary_emb(torch.zeros(1), self.state.decoder.turned(positions), *which)

    def logits(self, embeddings: Tensor, positions: Tensor, attention, deepstack: Tensor | None = None) -> Tensor:
        """Run the decoder with `attention` in every layer; logits of the last token, [batch, vocab_size].

        Args:
            positions: what RoPE takes, [batch, tokens] or [3, batch, tokens].
            deepstack: [taps, batch, tokens, hidden_size].
        """
        with attention_by(attention), added(self.language_model, deepstack):
            hidden = self.language_model(
                inputs_embeds=embeddings,
                position_ids=self.state.decoder.turned(positions),
                attention_mask=None,
                use_cache=False,
            )[0]
        return self.head(self.told(hidden))

    def told(self, hidden: Tensor) -> Tensor:
        """The rows [batch, tokens, hidden_size] that logits are wanted of."""
        return hidden[:, -1]


@contextmanager
def added(language_model: nn.Module, deepstack: Tensor | None) -> Iterator[None]:
    """Within the block the first layers' hidden states get one tap each, [taps, batch, tokens, hidden_size].

    Hugging Face adds a tap to the visual rows, which it picks by a mask: here text rows have zeros.
    """

    def add(tap: Tensor):
        return lambda _layer, _args, hidden: hidden + tap

    taps = () if deepstack is None else deepstack
    with ExitStack() as hooks:
        for layer, tap in zip(language_model.get_submodule("layers").children(), taps, strict=False):
            hooks.callback(layer.register_forward_hook(add(tap)).remove)
        yield
