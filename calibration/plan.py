"""What of a model fits a device, and how fast it can be at best.

No weight is loaded: a checkpoint's configuration makes its modules on PyTorch's `meta` device, and the graphs that a
build would export run there on shapes alone. Sizes are those of `State`, from which the graphs are made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import export.operators  # noqa: F401  registers torch.ops.unicache
from calibration.devices import Device
from engines.errors import UserError
from export.buckets import bucket_length, check_sizes, text_tokens
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import NEW, Compact, Decode, Graph, Prefill, State, Vision
from export.recipe import Recipe

Weights = Literal["fp32", "fp16", "int8", "int4"]
GROUP = 128  # inputs of a linear layer that share an int4 scale, as most int4 checkpoints have it
PAYS = 0.1  # share of a decode step's time that compression must save to be worth a word


@dataclass(frozen=True)
class Chat:
    """What is asked for: the prompt of the last turn holds all turns before it.

    Attributes:
        images: all of the first turn.
        text, answer: tokens of each turn's question and answer.
    """

    images: int = 1
    text: int = 24
    turns: int = 1
    answer: int = 64


@dataclass(frozen=True)
class Work:
    """What a graph does once: FLOPs (a multiply-add is two), and bytes read from and written to memory."""

    flops: int
    bytes: int

    def seconds(self, device: Device, weights: Weights) -> float:
        """The least time by the roofline model (Williams et al., 2009): max(FLOPs / rate, bytes / bandwidth).

        FLOPs are those of matrix products and convolutions, as the graph does them: prefill computes S x S attention
        and masks half of it. Bytes are the weights once, and the KV state; activations are taken to stay in caches. The
        rate is the tensor cores' for fp16; for int8 weights theirs for int8; int4 weights are multiplied as fp16, and
        fp32 as TF32, at half the rate of fp16. So: prefill = images x vision + prompt; decode = one step, which reads
        the decoder's weights but its embedding table and the state that it attends to, plus its share of a compaction,
        which reads and writes the whole state every W - r tokens. Nothing is added for launches: a device is slower.
        """
        rate = {"fp32": device.fp16.value / 2, "int8": device.int8.value}.get(weights, device.fp16.value)
        return max(self.flops / rate, self.bytes / device.bandwidth.value)


@dataclass(frozen=True)
class Most:
    """The most that fits, and what forbids one more: the device's memory, the model's positions, or the recipe."""

    count: int
    limit: Literal["memory", "positions", "recipe"]


@dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        bucket: rows of the prompt, pruned and padded.
        prompt_tokens: of the prompt before pruning.
        kv_bytes: as the runtime allocates them, `kv_bytes_fp16` those of an fp16 cache of prompt and answer.
        kv_bytes_per_token: of prompt and answer.
        tokens, images, turns: the most that fit: tokens as rows of a bucket, of the others with the rest as asked.
        prefill_seconds, decode_seconds: of the whole prompt with its images; of one token.
        decode_seconds_fp16: of one token by an fp16 cache.
        kv_share: of the bytes that a decode step reads; `kv_share_fp16` by an fp16 cache.
        missing_bytes: by which it does not fit, or 0.
        activation_bytes: the largest tensor that prefill makes, unless the backend fuses it away; in fp16 but for fp32.
        verdict: where compression pays.
    """

    recipe: str
    bucket: int
    prompt_tokens: int
    kv_bytes: int
    kv_bytes_fp16: int
    kv_bytes_per_token: float
    tokens: Most
    images: Most
    turns: Most
    prefill_seconds: float
    decode_seconds: float
    decode_seconds_fp16: float
    kv_share: float
    kv_share_fp16: float
    missing_bytes: int
    activation_bytes: int
    verdict: str = ""


@dataclass(frozen=True)
class Planner:
    """A checkpoint without weights, on a device, with bytes in reserve: system, libraries, activations."""

    checkpoint: Checkpoint
    device: Device
    weights: Weights
    reserve: int
    chat: Chat

    @cached_property
    def weight_bytes(self) -> int:
        return stored_bytes(self.weights, self.checkpoint.model)

    @cached_property
    def step_weight_bytes(self) -> int:
        """What a decode step reads: of the embedding table it needs one row, unless the head is that table."""
        decoder = self.checkpoint.decoder
        tables = [m for m in decoder.language_model.modules() if isinstance(m, nn.Embedding)]
        unread = [m for m in tables if m.weight is not decoder.head.weight]
        return stored_bytes(self.weights, decoder.language_model, decoder.head) - stored_bytes(self.weights, *unread)

    @cached_property
    def vision_weight_bytes(self) -> int:
        decoder = self.checkpoint.decoder
        return self.weight_bytes - stored_bytes(self.weights, decoder.language_model, decoder.head)

    @property
    def free(self) -> int:
        """Bytes left for KV; below 0 if the weights do not fit."""
        return int(self.device.memory.value) - self.reserve - self.weight_bytes

    @property
    def pays_from(self) -> int:
        """Tokens from which an fp16 cache is more than `PAYS` of what a decode step reads."""
        return int(PAYS / (1 - PAYS) * self.step_weight_bytes / self.checkpoint.decoder.fp16_token_bytes)

    def prompt(self, chat: Chat) -> tuple[int, int]:
        """Tokens of its prompt before pruning, and the text among them."""
        text = text_tokens(self.checkpoint, chat.images, chat.text, chat.turns, chat.answer)
        return text + chat.images * self.checkpoint.image_tokens, text

    def state(self, recipe: Recipe, chat: Chat) -> State:
        """The KV state of the bucket that a chat needs.

        Raises:
            UserError: the model has not so many positions, or the recipe does not bear such a prompt.
        """
        tokens, text = self.prompt(chat)
        if tokens + chat.answer > (reach := self.checkpoint.max_positions(recipe.positions.scale)):
            raise UserError(
                f"a prompt of {tokens} tokens and an answer of {chat.answer} pass the {reach} positions of the model"
            )
        length = bucket_length(self.checkpoint, recipe, chat.images, text)
        check_sizes(recipe, self.checkpoint, [length])
        return State(self.checkpoint.decoder, recipe, length)

    def row(self, recipe: Recipe) -> Row:
        """Plan a recipe. KV heads are taken as unmerged, and a budget by entropy as a line: both need weights.

        Raises:
            UserError: as `state`.
        """
        chat, decoder = self.chat, self.checkpoint.decoder
        state, prompt_tokens = self.state(recipe, chat), self.prompt(chat)[0]
        fp16 = (prompt_tokens + chat.answer) * self.checkpoint.decoder.fp16_token_bytes
        with torch.device("meta"):
            shapes = [(heads, decoder.head_dim) for heads in decoder.kv_heads]
            known = [KeyStatistics(*[torch.zeros(s)] * 5, *[torch.zeros(s)[:, None]] * 2) for s in shapes]
            vision = run(Vision(self.checkpoint.encoder, recipe, self.checkpoint.layouts[0], decoder))
            prefill, decode = run(Prefill(state, known)), Decode(state, known)
            compact = run(Compact(state, known)).flops if state.compacts else 0
            kv_read = moved(state, decode)
            step = Work(run(decode).flops, self.step_weight_bytes + kv_read)
        seen = Work(vision.flops, self.vision_weight_bytes)
        read = Work(prefill.flops, self.step_weight_bytes + state.nbytes)
        compaction = Work(compact, 2 * state.nbytes if state.compacts else 0)
        fp16_step = dataclasses.replace(step, bytes=self.step_weight_bytes + fp16)
        tokens, images, turns = self._most(recipe, state)
        row = Row(
            recipe=recipe.name,
            bucket=state.length,
            prompt_tokens=prompt_tokens,
            kv_bytes=state.nbytes,
            kv_bytes_fp16=fp16,
            kv_bytes_per_token=state.nbytes / (prompt_tokens + chat.answer),
            tokens=tokens,
            images=images,
            turns=turns,
            prefill_seconds=chat.images * self._seconds(seen) + self._seconds(read),
            decode_seconds=self._seconds(step) + self._seconds(compaction) / (state.window - state.recent),
            decode_seconds_fp16=self._seconds(fp16_step),
            kv_share=kv_read / step.bytes,
            kv_share_fp16=fp16 / fp16_step.bytes,
            missing_bytes=max(0, state.nbytes - self.free),
            activation_bytes=prefill.largest // (1 if self.weights == "fp32" else 2),
        )
        return dataclasses.replace(row, verdict=verdict(row, self.free, self.reserve))

    def _seconds(self, work: Work) -> float:
        return work.seconds(self.device, self.weights)

    def _most(self, recipe: Recipe, asked: State) -> tuple[Most, Most, Most]:
        """Of tokens, images and turns."""
        chat, reach = self.chat, self.checkpoint.max_positions(recipe.positions.scale)

        def of(what: str) -> Callable[[int], str]:
            def limit(count: int) -> str:
                other = dataclasses.replace(chat, **{what: count})
                if self.prompt(other)[0] + other.answer > reach:
                    return "positions"
                return self._limit(lambda: self.state(recipe, other))

            return limit

        def tokens(count: int) -> str:
            if count + chat.answer > reach:
                return "positions"
            return self._limit(lambda: State(self.checkpoint.decoder, recipe, count))

        return (
            most(tokens, asked.length, reach),
            most(of("images"), chat.images, reach // self.checkpoint.image_tokens + 1),
            most(of("turns"), chat.turns, reach // (chat.text + chat.answer) + 1),
        )

    def _limit(self, make: Callable[[], State]) -> str:
        try:
            return "memory" if make().nbytes > self.free else ""
        except UserError:
            return "recipe"


def most(limit: Callable[[int], str], asked: int, end: int) -> Most:
    """The largest count below `end` that has no limit, by bisection from what is asked; 0 if there is none."""
    low, high = (0, asked) if limit(asked) else (asked, max(asked, end))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if limit(middle) else (middle, high)
    return Most(low, limit(low + 1) or "positions")  # type: ignore[arg-type]


def stored_bytes(weights: Weights, *modules: nn.Module) -> int:
    """Bytes of the modules' parameters, each once.

    int8 and int4 are for the matrices of linear layers, with an fp16 scale an output or `GROUP` inputs of one. All else
    is fp16, and an embedding table stays so where the head shares it.
    """
    layers = [layer for module in modules for layer in module.modules()]
    tables = {id(layer.weight) for layer in layers if isinstance(layer, nn.Embedding)}
    sizes = {}
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            linear = isinstance(layer, nn.Linear) and parameter.ndim == 2 and id(parameter) not in tables
            size = parameter.numel() * (4 if weights == "fp32" else 2)
            if linear and weights in ("int8", "int4"):
                rows, columns = parameter.shape
                scales, bits = (1, 8) if weights == "int8" else (-(-columns // GROUP), 4)
                size = -(-parameter.numel() * bits // 8) + rows * scales * 2
            sizes[id(parameter)] = size
    return sum(sizes.values())


@dataclass(frozen=True)
class Run:
    """What a graph did: FLOPs of its matrix products and convolutions, and bytes of the largest tensor that it made."""

    flops: int
    largest: int


class _Largest(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.bytes = max(self.bytes, *(t.untyped_storage().nbytes() for t in made), 0)
        return result


def run(graph: Graph) -> Run:
    """Run a graph on shapes alone."""
    feeds = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in graph.inputs.values()]
    ours: Any = {torch.ops.unicache.quant_kv_attention: _attention_flops}
    with FlopCounterMode(display=False, custom_mapping=ours) as counter, _Largest() as tensors, torch.no_grad():
        graph.eval()(*feeds)
    return Run(counter.get_total_flops(), tensors.bytes)


def _attention_flops(query, key_store, key_scale, value_store, value_scale, store_bias, key_window, *_, **__) -> int:
    """Logits and mix of every query head over store and window; shapes as `operators.quant_kv_attention`."""
    batch, heads, queries, head_dim = query
    return 4 * batch * heads * queries * (key_store[2] + key_window[2]) * head_dim


def moved(state: State, decode: Decode) -> int:
    """Bytes of the KV state that a decode step reads, and of the masses that it writes back."""
    specs = state.specs()
    read = sum(spec.nbytes for spec in decode.inputs.values() if spec.name in specs)
    return read + sum(specs[n.removeprefix(NEW)].nbytes for n in decode.outputs if n.removeprefix(NEW) in specs)


def verdict(row: Row, free: int, reserve: int) -> str:
    """A sentence: does it fit, and what does it save?"""
    saved = 1 - row.decode_seconds / row.decode_seconds_fp16
    if free < 0:
        return "the weights alone do not fit"
    if row.missing_bytes:
        return f"does not fit: {size(row.missing_bytes)} too much"
    if row.kv_bytes >= row.kv_bytes_fp16:
        told = "allocates more than an fp16 cache: it saves nothing"
    elif row.kv_bytes_fp16 > free:
        told = "fits only because it is compressed: an fp16 cache would not"
    else:
        told = (
            f"KV is {row.kv_share:.1%} of what a step reads, {row.kv_share_fp16:.1%} in fp16: compression saves memory"
        )
        told += f" and {saved:.0%} of a step's time" if saved >= PAYS else ", not time"
    if row.activation_bytes > reserve:
        told += f"; prefill makes a tensor of {size(row.activation_bytes)}, more than the reserve, "
        told += "unless the backend fuses it"
    return told


def size(count: float) -> str:
    """Bytes as a person reads them."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(int(math.log2(max(abs(count), 1)) // 10), len(units) - 1)
    return f"{count / 1024**power:,.{min(power, 1)}f} {units[power]}"
