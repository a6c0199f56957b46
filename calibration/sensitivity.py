"""How much the answer suffers when one layer keeps less, and the budgets that follow: `budget.method = "measured"`.

A prompt is read once. Then its answer is read again, teacher-forced, from caches of which one layer keeps a share of
its tokens and the others all: the loss is the KL divergence of the answer's logits from those by the whole cache.
Losses of layers are taken as independent, and the shares with the least sum of them are found exactly. If the question
comes `later`, what is compressed is the images and what stands before them; question and answer are read from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calibration.evaluate import Prompt, prompt_of
from calibration.samples import Sample, model_inputs
from engines.errors import UserError
from export.attention import LOWEST, attention_by, attention_logits, mix_values, near, visible
from export.checkpoint import Checkpoint
from export.compress import Compress
from export.graphs import Decoder, Prefill, State
from export.recipe import Recipe, Window
from export.stages.budget import Uniform
from export.stages.quantize import Float32
from export.stages.shorten import Whole
from export.stages.tokens import VISUAL, Tokens

RATIOS = (1 / 256, 1 / 64, 1 / 48, 1 / 32, 1 / 24, 1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 2, 3 / 4, 1.0)
UNIT = 1024  # shares are found in steps of 1 / UNIT
MAX_NEW_TOKENS = 16


def measure(
    checkpoint: Checkpoint,
    recipe: Recipe,
    samples: Sequence[Sample],
    later: bool = False,
    ratios: Sequence[float] = RATIOS,
    progress: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Read the samples' answers from caches of which one layer keeps less than the others.

    Args:
        recipe: its stages choose what is kept; neither its budget nor its quantization is applied.
        later: whether the question follows the compression; samples without image are left out then.
        ratios: shares of the tokens that a layer keeps, at least one token.
        progress: called once a sample.

    Returns:
        Loss of a layer at a ratio, nats an answer, mean over the samples, [layers, ratios].

    Raises:
        UserError: no sample is left.
    """
    losses = []
    for sample in samples:
        if sample.images or not later:
            known = read(checkpoint, recipe, prompt_of(checkpoint, model_inputs(checkpoint, sample)), later)
            losses.append(losses_of(checkpoint.decoder, recipe, known, ratios))
        progress()
    if not losses:
        raise UserError("no sample has an image: there is nothing to compress before the question")
    return np.mean(losses, axis=0)


def allocate(
    losses: NDArray[np.float64], ratios: Sequence[float], keep: float, least: float = 0.0, reserve: float = 0.1
) -> list[float]:
    """The share of its tokens that each layer keeps, `keep` on average, with the least sum of losses.

    Args:
        losses: [layers, ratios]; ratios ascend and end with 1.
        least: share of every layer, at least.
        reserve: part of the tokens that is spread over the layers in proportion to the rest. Other prompts need a
            little more than the samples did, in every layer.

    Raises:
        UserError: `keep` leaves less than `least`.
    """
    check(keep, least, reserve)
    layers = len(losses)
    units, first = int(keep * (1 - reserve) * UNIT * layers), max(1, int(least * UNIT))
    spent = spend(losses, ratios, units, first)
    shares, left, rest = [0.0] * layers, keep * layers, sum(spent)
    for layer in sorted(range(layers), key=lambda layer: -spent[layer]):  # what one cannot take, the others share
        shares[layer] = min(1.0, spent[layer] * left / rest)
        left, rest = left - shares[layer], rest - spent[layer]
    return shares


def check(keep: float, least: float, reserve: float = 0.1) -> None:
    """As `allocate`, before anything is measured."""
    first = max(1, int(least * UNIT))
    if keep * (1 - reserve) * UNIT < first:
        raise UserError(f"keep = {keep} leaves less than {first}/{UNIT} of the tokens to a layer: raise it")


def spend(
    losses: NDArray[np.float64], ratios: Sequence[float], units: int, first: int = 1, unit: int = UNIT
) -> list[int]:
    """At most `units` split over the layers, `first` to `unit` each (1 / `unit` of the tokens), at the least loss.

    Exact, by dynamic programming. Losses between measured ratios are interpolated; more is never taken for worse.
    """
    sizes = np.arange(first, unit + 1)
    lowest = np.full(units + 1, np.inf)  # sum of losses of the layers so far, by units spent
    lowest[0] = 0.0
    choices = []
    for row in losses:
        loss = np.interp(sizes / unit, ratios, np.minimum.accumulate(row))
        sums, choice = np.full(units + 1, np.inf), np.zeros(units + 1, dtype=int)
        for size, more in zip(sizes, loss, strict=True):
            if size <= units:
                with_it = lowest[: units + 1 - size] + more
                better = with_it < sums[size:]
                sums[size:][better], choice[size:][better] = with_it[better], size
        choices.append(choice)
        lowest = sums
    left, spent = int(lowest.argmin()), []  # of equal losses the cheapest: what brings nothing is not spent
    for choice in reversed(choices):
        spent.append(int(choice[left]))
        left -= spent[-1]
    return spent[::-1]


@dataclass
class Read:
    """A prompt that was read, and how its answer goes on from the whole cache.

    Attributes:
        cache: what every layer holds of it, unquantized.
        rest: embeddings of the tokens after it, [1, rest, hidden_size]: what is asked later, the answer but its end.
        log_probs: by the last rows of the rest, what the answer's tokens are, [rows, vocab_size].
        start: position id of the first of the rest.
    """

    cache: list[Tokens]
    rest: Tensor
    log_probs: Tensor
    start: int


def read(checkpoint: Checkpoint, recipe: Recipe, prompt: Prompt, later: bool) -> Read:
    """Read a prompt (only its images and what stands before them, if `later`), and answer from the whole cache."""
    decoder = checkpoint.decoder
    split = int((prompt.kinds == VISUAL).nonzero().max()) + 1 if later else len(prompt)
    cache, logits = whole_cache(decoder, recipe, prompt, split)
    rest, start = prompt.embeddings[None, split:], int(prompt.position_ids[:split].max()) + 1
    if later:
        logits = continued(decoder, cache, rest, start)[:, -1]
    answer = 0
    while answer < MAX_NEW_TOKENS and (token := int(logits.argmax())) not in ends(checkpoint):
        rest = torch.cat([rest, checkpoint.embedding[token][None, None]], dim=1)
        logits = continued(decoder, cache, rest, start)[:, -1]
        answer += 1
    rows = answer + later  # what prefill says of the first token is the same whatever is kept
    told = continued(decoder, cache, rest, start)[0].log_softmax(-1) if rows else logits[:0]
    return Read(cache, rest, told[len(told) - rows :], start)


def losses_of(decoder: Decoder, recipe: Recipe, known: Read, ratios: Sequence[float]) -> list[list[float]]:
    """What `measure` averages, of one prompt."""
    layers, tokens = len(known.cache), known.cache[0].key.shape[2]
    losses = []
    modality = recipe.modality.by_layer(layers)
    for layer, whole in enumerate(known.cache):
        own = dataclasses.replace(recipe, modality=modality[layer])  # type: ignore[arg-type]  # a method
        stores = (kept(own, whole, max(1, round(ratio * tokens)), layer / layers) for ratio in ratios)
        caches = ([*known.cache[:layer], store, *known.cache[layer + 1 :]] for store in stores)
        losses.append([divergence(decoder, cache, known) for cache in caches])
    return losses


def divergence(decoder: Decoder, cache: Sequence[Tokens], known: Read) -> float:
    """KL divergence of the answer by a compressed cache from the answer by the whole one, summed over its tokens."""
    if not len(known.log_probs):
        return 0.0
    logits = continued(decoder, cache, known.rest, known.start)[0]
    told = logits[len(logits) - len(known.log_probs) :].log_softmax(-1)
    return float((known.log_probs.exp() * (known.log_probs - told)).sum())


class _Recorder(nn.Module):
    """In a `Compress`'s place: keeps what it is given."""

    def forward(self, tokens: Tokens) -> dict[str, Tensor]:
        self.tokens = tokens
        return {}


def whole_cache(decoder: Decoder, recipe: Recipe, prompt: Prompt, length: int) -> tuple[list[Tokens], Tensor]:
    """What each layer holds after the first `length` tokens of a prompt, and the logits of the last one."""
    window = Window(least=1, most=1, recent=0.0, compact=False, dtype="float32")
    plain = dataclasses.replace(recipe, shorten=Whole(), budget=Uniform(), quantize=Float32(), window=window)
    graph, layers = Prefill(State(decoder, plain, length), None), [_Recorder() for _ in range(decoder.num_layers)]
    graph.compress = nn.ModuleList(layers)
    rows = (prompt.embeddings, prompt.positions, prompt.kinds, prompt.segments)
    its = {"position_ids": prompt.position_ids.T[:, None], "deepstack": prompt.deepstack.movedim(1, 0)[:, None]}
    more = {spec.name: its[spec.name][:, :, :length] for spec in graph.more([1, length])}
    with torch.no_grad():
        result = graph.compute(*(part[None, :length] for part in rows), **more)
    return [layer.tokens for layer in layers], result["logits"]


def kept(recipe: Recipe, tokens: Tokens, slots: int, depth: float) -> Tokens:
    """What a store of so many slots holds of a layer's tokens: the recipe's stages but the quantization."""
    return Compress(dataclasses.replace(recipe, quantize=Float32()), slots, depth, None).select(tokens)[0]


def continued(decoder: Decoder, cache: Sequence[Tokens], embeddings: Tensor, start: int) -> Tensor:
    """Logits [batch, rest, vocab_size] of tokens that follow a cache, [batch, rest, hidden_size] from position `start`.

    What many decode steps would say, in one pass: every token sees the cache and those before it.
    """
    order = torch.arange(embeddings.shape[1])
    positions = (start + order).expand(embeddings.shape[0], -1)
    real = torch.ones(positions.shape, dtype=torch.bool)

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        store, slots = cache[layer], cache[layer].key.shape[2]
        window = decoder.sliding_window(layer)
        on_store = attention_logits(query, store.key, scale) + store.bias.clamp(min=LOWEST)[:, :, None, None]
        if window:
            hidden = ~near(positions[:, None], store.positions, window)
            on_store = on_store.masked_fill(hidden[:, :, None], LOWEST)
        among = torch.where(visible(real, positions, window), 0.0, LOWEST)[:, None, None]
        weights = torch.cat([on_store, attention_logits(query, key, scale) + among], dim=-1).softmax(dim=-1)
        return mix_values(weights[..., :slots], store.value) + mix_values(weights[..., slots:], value)

    turned = decoder.turned(positions)
    with torch.no_grad(), attention_by(attention):
        hidden = decoder.language_model(
            inputs_embeds=embeddings, position_ids=turned, attention_mask=None, use_cache=False
        )[0]
    return decoder.head(hidden)


def ends(checkpoint: Checkpoint) -> list[int]:
    """Ids that end an answer."""
    found = checkpoint.model.generation_config.eos_token_id
    return found if isinstance(found, list) else [found]
