"""The four static-shape graphs of a bundle, as PyTorch modules around Hugging Face's own layers.

A graph takes and returns tensors by name; the names, shapes and dtypes of the KV state are stated once, in `State`.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engines.bundle import TensorSpec
from engines.errors import UserError
from export.attention import LOWEST, attention_by, full_attention, store_window_attention
from export.compress import Compress, KeyStatistics
from export.recipe import Recipe
from export.stages.importance.importance import Observation
from export.stages.perception.perception import Guided
from export.stages.tokens import PADDING, TEXT, Tokens

NOT_DECODED = ("store_positions", "window_positions", "store_kinds", "window_kinds")  # decode does not read them
NEW = "new_"  # a graph cannot return a tensor under an input's name: `new_X` replaces X


@dataclass(frozen=True)
class Decoder:
    """The parts of a Hugging Face model that make logits from embeddings, and its sizes."""

    language_model: nn.Module
    head: nn.Module
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class State:
    """Names, shapes and dtypes of the KV state of one bucket (batch B, layers L, window W, capacities C_l)."""

    decoder: Decoder
    recipe: Recipe
    length: int
    batch: int = 1

    @property
    def capacities(self) -> list[int]:
        """C_l of every layer: by the recipe's share of tokens, or by what its share of bytes leaves for the store.

        Raises:
            UserError: the window alone takes the bytes that the recipe allows.
        """
        budget, layers = self.recipe.budget, self.decoder.num_layers
        if budget.kv_bytes is None:
            return budget.capacities(budget.keep * self.length, layers, self.length)
        fp16_token = 2 * layers * self.decoder.num_kv_heads * self.decoder.head_dim * 2 * self.batch
        window = sum(spec.nbytes for spec in self._specs([0] * layers).values())
        slot = sum(spec.nbytes for spec in self._specs([1] * layers).values()) - window  # one in every layer
        slots = (budget.kv_bytes * self.length * fp16_token - window) / slot
        if slots < budget.least:
            raise UserError(
                f"recipe {self.recipe.name}: kv_bytes = {budget.kv_bytes} leaves {slots:.1f} slots a layer beside the "
                f"window of {self.window} in a bucket of {self.length} tokens: raise kv_bytes or shorten the window"
            )
        return budget.capacities(slots, layers, self.length)

    @property
    def window(self) -> int:
        return self.recipe.window.sizes(self.length)[0]

    @property
    def recent(self) -> int:
        return self.recipe.window.sizes(self.length)[1]

    @property
    def compacts(self) -> bool:
        return self.recipe.window.compact

    def specs(self) -> dict[str, TensorSpec]:
        """name -> spec, store first."""
        return self._specs(self.capacities)

    def _specs(self, capacities: list[int]) -> dict[str, TensorSpec]:
        d, heads = self.decoder, [self.batch, self.decoder.num_kv_heads]
        specs: dict[str, tuple[str, list[int]]] = {}
        for layer, slots in enumerate(capacities):
            store = {
                "key_store": (self.recipe.store, [*heads, slots, d.head_dim]),
                "value_store": (self.recipe.store, [*heads, slots, d.head_dim]),
                "value_scale": ("float16", [*heads, slots, 1]),
                "store_bias": ("float16", [*heads, slots]),
                "store_positions": ("int32", [*heads, slots]),
                "store_mass": ("float32", [*heads, slots]),
                "store_kinds": ("int8", [*heads, slots]),
            }
            specs |= {f"{name}.{layer}": spec for name, spec in store.items() if self._used(name)}
        window = {
            "key_window": (self.recipe.window.dtype, [d.num_layers, *heads, self.window, d.head_dim]),
            "value_window": (self.recipe.window.dtype, [d.num_layers, *heads, self.window, d.head_dim]),
            "window_mass": ("float32", [d.num_layers, *heads, self.window]),
            "window_bias": ("float32", [self.batch, self.window]),
            "window_positions": ("int32", [self.batch, self.window]),
            "window_kinds": ("int8", [self.batch, self.window]),
        }
        specs |= {name: spec for name, spec in window.items() if self._used(name)}
        return {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in specs.items()}

    def _used(self, name: str) -> bool:
        if name == "value_scale":
            return self.recipe.store == "int8"
        if name.endswith("_kinds"):
            return self.compacts and self.recipe.needs_kinds
        return not name.endswith("_mass") or self.compacts


class Graph(nn.Module):
    """A module whose positional inputs and outputs have names: `inputs` and `outputs`, in order."""

    kind: typing.Literal["vision", "prefill", "decode", "compact"]
    inputs: dict[str, TensorSpec]
    outputs: list[str]

    def compute(self, **tensors: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.compute(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)

    def _takes(self, *specs: TensorSpec) -> None:
        self.inputs = {spec.name.replace(".", "__"): spec for spec in specs}


class Vision(Graph):
    """One image's pixels -> its kept visual tokens and their places among the image's tokens.

    Takes the question too, `question` [1, Q, hidden_size] and `asked` [1, Q], if tokens are chosen by it.
    """

    kind = "vision"

    def __init__(self, encoder: nn.Module, recipe: Recipe, height: int, width: int):
        super().__init__()
        self.encoder, self.perception = encoder, recipe.perception
        specs = [TensorSpec("pixel_values", "float32", [1, 3, height, width])]
        if isinstance(self.perception, Guided):
            with torch.no_grad():
                _, tokens, size = encoder(torch.zeros(specs[0].shape)).shape
            if self.perception.count(tokens) < tokens:
                asked = [1, self.perception.question_tokens]
                specs += [TensorSpec("question", "float32", [*asked, size]), TensorSpec("asked", "float32", asked)]
        self._takes(*specs)
        self.outputs = ["visual_tokens", "kept"]

    def compute(self, pixel_values: Tensor, **question: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        features = self.encoder(pixel_values)  # [1, N, d]
        kept = self.perception(features, **question)  # [1, K]
        if kept.shape[1] < features.shape[1]:
            features = features.gather(1, kept[..., None].expand(-1, -1, features.shape[2]))
        return {"visual_tokens": features, "kept": kept.int()}


class _Stateful(Graph):
    """What prefill, decode and compact share: the KV state, the keys' centres and one `Compress` a layer."""

    center: Tensor | None  # [L, Hkv, 1, D]

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__()
        self.state = state
        layers = state.decoder.num_layers
        self.compress = nn.ModuleList(
            Compress(state.recipe, slots, layer / layers, statistics[layer] if statistics else None)
            for layer, slots in enumerate(state.capacities)
        )
        centers = [known.center for known in statistics or []]
        self.register_buffer("center", torch.stack(centers)[:, :, None] if centers else None)

    def center_of(self, layer: int) -> Tensor | None:
        """What is subtracted from a layer's keys, [kv_heads, 1, head_dim]."""
        return None if self.center is None else self.center[layer]

    def layer(self, index: int) -> Compress:
        return typing.cast(Compress, self.compress[index])

    def state_of(self, tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
        """The store tensors of one layer, without the layer's number."""
        return {name.split("__")[0]: t for name, t in tensors.items() if name.endswith(f"__{layer}")}


class _Decoding(_Stateful):
    """What prefill and decode share: the decoder itself and the centring of keys."""

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        self.language_model, self.head = state.decoder.language_model, state.decoder.head

    def centred(self, key: Tensor, layer: int) -> Tensor:
        """Keys less their head's calibrated mean: softmax does not change, quantization does."""
        return key if self.center is None else key - self.center[layer]

    def logits(self, embeddings: Tensor, positions: Tensor, attention) -> Tensor:
        """Run the decoder with `attention` in every layer; logits of the last token, [batch, vocab_size]."""
        with attention_by(attention):
            hidden = self.language_model(
                inputs_embeds=embeddings, position_ids=positions.long(), attention_mask=None, use_cache=False
            )[0]
        return self.head(hidden[:, -1])


class Prefill(_Decoding):
    """Embeddings of a left-padded prompt -> logits of its last token, compressed store, window."""

    kind = "prefill"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        shape = [state.batch, state.length]
        self._takes(
            TensorSpec("embeddings", "float32", [*shape, state.decoder.hidden_size]),
            TensorSpec("positions", "int32", shape),
            TensorSpec("kinds", "int32", shape),
        )
        self.outputs = ["logits", *state.specs()]

    def compute(self, embeddings: Tensor, positions: Tensor, kinds: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        state, length = self.state, self.state.length
        real = kinds != PADDING
        order = torch.arange(length)
        visible = (order[:, None] >= order[None, :]) & real[:, None, :]
        bias = torch.where(visible, 0.0, LOWEST)  # [B, S, S]
        importance = state.recipe.importance
        observers = importance.observers(length)
        cached: dict[int, Tokens] = {}
        places = torch.where(real, positions, -1)
        empty = torch.where(real, 0.0, -torch.inf)

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            key = self.centred(key, layer)
            mass = torch.zeros(key.shape[:3])
            if observers:
                last = slice(length - observers, length)
                seen = visible[:, last] & real[:, last, None]
                mass = importance.observe(
                    Observation(
                        query[:, :, last], key, bias[:, last], seen, kinds, scale,
                        center=self.center_of(layer), positions=places,
                        rotary=lambda at: self.language_model.get_submodule("rotary_emb")(embeddings, at),
                    )
                )  # fmt: skip
            mine, its, holes = (x[:, None].expand(-1, key.shape[1], -1) for x in (places, kinds, empty))
            cached[layer] = Tokens(key, value, mine, its, holes, mass, self.center_of(layer))
            return full_attention(query, key, value, bias, scale)

        result = {"logits": self.logits(embeddings, positions, attention)}
        split = length - state.recent
        for layer, tokens in cached.items():
            result |= {f"{name}.{layer}": t for name, t in self.layer(layer)(tokens[:split]).items()}
        free = state.window - state.recent
        rows = [cached[layer] for layer in range(state.decoder.num_layers)]
        dtype = getattr(torch, state.recipe.window.dtype)
        result["key_window"] = pad(torch.stack([t.key[:, :, split:] for t in rows]), (0, 0, 0, free)).to(dtype)
        result["value_window"] = pad(torch.stack([t.value[:, :, split:] for t in rows]), (0, 0, 0, free)).to(dtype)
        result["window_mass"] = pad(torch.stack([t.mass[:, :, split:] for t in rows]), (0, free))
        result["window_bias"] = pad(empty[:, split:], (0, free), value=-torch.inf)
        result["window_positions"] = pad(places[:, split:], (0, free), value=-1)
        result["window_kinds"] = pad(kinds[:, split:], (0, free), value=PADDING).to(torch.int8)
        return result


class Decode(_Decoding):
    """One token's embedding and the state -> logits and the rows to write into the window."""

    kind = "decode"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        specs = {name: spec for name, spec in state.specs().items() if not name.startswith(NOT_DECODED)}
        self._takes(
            TensorSpec("embedding", "float32", [state.batch, 1, state.decoder.hidden_size]),
            TensorSpec("position", "int32", [state.batch, 1]),
            *specs.values(),
        )
        masses = [name for name in specs if "_mass" in name]
        self.outputs = [
            "logits",
            "new_key",
            "new_value",
            *(["new_mass", *(NEW + name for name in masses)] if masses else []),
        ]

    def compute(self, embedding: Tensor, position: Tensor, **state: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        new: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        itself = torch.zeros(self.state.batch, 1)
        window_bias = torch.cat([state["window_bias"], itself], dim=1)[:, None]  # [B, 1, W+1]

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            key = self.centred(key, layer)
            store = self.state_of(state, layer)
            key_window = torch.cat([state["key_window"][layer].float(), key], dim=2)
            value_window = torch.cat([state["value_window"][layer].float(), value], dim=2)
            keys, values, bias = store["key_store"], store["value_store"], store["store_bias"]
            if self.state.recipe.store == "int8":
                key_scale = self.layer(layer).key_scale[None, :, None]
                output, on_store, on_window = torch.ops.unicache.quant_kv_attention(
                    query, keys, key_scale, values, store["value_scale"],
                    bias, key_window, value_window, window_bias, scale,
                )  # fmt: skip
            else:
                output, on_store, on_window = store_window_attention(
                    query, keys.float(), values.float(), bias, key_window, value_window, window_bias, scale
                )
            new[layer] = (key, value, on_store, on_window)
            return output

        result = {"logits": self.logits(embedding, position, attention)}
        rows = [new[layer] for layer in range(self.state.decoder.num_layers)]
        dtype = getattr(torch, self.state.recipe.window.dtype)
        result["new_key"] = torch.stack([key for key, *_ in rows]).to(dtype)
        result["new_value"] = torch.stack([value for _, value, *_ in rows]).to(dtype)
        if self.state.compacts:
            update = self.state.recipe.importance.update
            on_old, on_new = [], []
            for layer, (_, _, on_store, on_window) in enumerate(rows):
                row, old = (on_store, on_window), state["window_mass"][layer]
                result[f"new_store_mass.{layer}"] = update(state[f"store_mass__{layer}"], on_store, row)
                on_old.append(update(old, on_window[..., :-1], row))
                on_new.append(update(torch.zeros_like(on_window[..., -1:]), on_window[..., -1:], row))
            result["new_window_mass"], result["new_mass"] = torch.stack(on_old), torch.stack(on_new)
        return result


def _kinds(tensors: dict[str, Tensor], region: str) -> Tensor:
    """Kinds of the tokens in store or window, int32; all TEXT where no stage needs them and the state has none."""
    name = f"{region}_kinds"
    return tensors[name].int() if name in tensors else torch.full_like(tensors[f"{region}_positions"], TEXT)


class Compact(_Stateful):
    """A full window and the store -> a new store, and a window with only its last `recent` tokens."""

    kind = "compact"

    def __init__(self, state: State, statistics: list[KeyStatistics] | None):
        super().__init__(state, statistics)
        self._takes(*state.specs().values())
        self.outputs = [NEW + name for name in state.specs()]

    def compute(self, **state: Tensor) -> dict[str, Tensor]:
        window, kept = self.state.window, self.state.recent
        old, heads = window - kept, (-1, self.state.decoder.num_kv_heads, -1)
        result: dict[str, Tensor] = {}
        for layer in range(self.state.decoder.num_layers):
            store, compress = self.state_of(state, layer), self.layer(layer)
            key, value = compress.restore(store)
            center = self.center_of(layer)
            slots = Tokens(
                key=key,
                value=value,
                positions=store["store_positions"],
                kinds=_kinds(store, "store"),
                bias=store["store_bias"].float(),
                mass=store["store_mass"],
                center=center,
            )
            rows = Tokens(
                key=state["key_window"][layer, :, :, :old].float(),
                value=state["value_window"][layer, :, :, :old].float(),
                positions=state["window_positions"][:, None, :old].expand(heads),
                kinds=_kinds(state, "window")[:, None, :old].expand(heads),
                bias=state["window_bias"][:, None, :old].expand(heads),
                mass=state["window_mass"][layer, :, :, :old],
                center=center,
            )
            result |= {f"{name}.{layer}": t for name, t in compress(slots + rows).items()}
        for name in ("key_window", "value_window"):
            result[name] = pad(state[name][:, :, :, old:], (0, 0, 0, old))
        result["window_mass"] = pad(state["window_mass"][..., old:], (0, old))
        result["window_bias"] = pad(state["window_bias"][:, old:], (0, old), value=-torch.inf)
        result["window_positions"] = pad(state["window_positions"][:, old:], (0, old), value=-1)
        if "window_kinds" in state:
            moved = state["window_kinds"].int()[:, old:]  # TensorRT takes an int8 constant for a quantized number
            result["window_kinds"] = pad(moved, (0, old), value=PADDING).to(torch.int8)
        return {NEW + name: tensor for name, tensor in result.items()}
