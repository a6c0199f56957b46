"""Decoders of every kind with random weights, Hugging Face's answers, and a full cache whose masks are stated anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from calibration.evaluate import Prompt
from export.attention import attention_by, full_attention, use_hook
from export.compress import KeyStatistics
from export.decoder import decoder_of
from export.graphs import Decoder
from export.stages.tokens import TEXT, VISUAL
from tests.export import zoo
from tests.export.tiny import Driver

WINDOW = 12
# [text, image, text, image, text]: one image as long as a sliding window, one longer
PARTS = [(TEXT, 3), (VISUAL, WINDOW), (TEXT, 4), (VISUAL, WINDOW + 5), (TEXT, 6)]
BLOCKS = {"gemma3": "image", "paligemma": "prompt", "paligemma2": "prompt"}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
MIXED = ["sliding_attention", "full_attention"] * 2
OF_TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "cohere2": {"sliding_window": WINDOW, "logit_scale": 0.5, "layer_types": MIXED},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 9, **CAPPED},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 9, "layer_types": MIXED},
}
NAMES = [*OF_TEXT, "aya_vision", *BLOCKS]


@dataclass(frozen=True)
class Known:
    """A model, with Hugging Face's attention and with ours, and a prompt for it.

    Attributes:
        model: Hugging Face's.
        embedding: [vocab_size, hidden_size].
        softcap: of the logits of attention.
        windows: sliding window of each layer, None without.
    """

    name: str
    model: Any
    decoder: Decoder
    embedding: Tensor
    prompt: Prompt
    windows: list[int | None]
    softcap: float | None


def make(name: str, **other: Any) -> Known:
    """One of `NAMES`; its prompt has random visual tokens.

    Args:
        other: of the text configuration, what is to differ.
    """

    def model() -> Any:
        if name not in OF_TEXT:
            return zoo.model(name, **(CAPPED if name == "paligemma2" else {}), **other)
        config = hf.AutoConfig.for_model(name, **{**zoo.TEXT, **OF_TEXT[name], **other})
        made = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        zoo.strengthen(made)
        return made.eval().requires_grad_(False)

    reference, ours = model(), model()
    inner = ours.model.language_model if name not in OF_TEXT else ours.model
    decoder = decoder_of(ours, inner, block=BLOCKS.get(name), first_position=int(name.startswith("paligemma")))
    use_hook(inner)
    text = reference.config.get_text_config()
    kinds = torch.cat([torch.full([count], kind) for kind, count in PARTS])
    numbers = torch.cat([torch.full([count], 1 + part // 2) for part, (_, count) in enumerate(PARTS)])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        embedding = reference.get_input_embeddings()(torch.arange(text.vocab_size))
    rows = embedding[torch.randint(5, 290, kinds.shape, generator=generator)].clone()
    rows[kinds == VISUAL] = torch.randn(int((kinds == VISUAL).sum()), rows.shape[1], generator=generator)
    prompt = Prompt(rows, kinds, torch.arange(len(kinds)), numbers.int())
    windows = [
        text.sliding_window if kind == "sliding_attention" else None
        for kind in getattr(text, "layer_types", None) or ["sliding_attention" if name == "mistral" else ""] * 4
    ]
    return Known(name, reference, decoder, embedding, prompt, windows, getattr(text, "attn_logit_softcapping", None))


def hugging_face(known: Known, tokens: Tensor) -> Tensor:
    """Logits of the prompt's last token and of the tokens that follow it, in one pass without a cache."""
    rows = torch.cat([known.prompt.embeddings, known.embedding[tokens]])[None]
    own = {}
    if known.name in BLOCKS:  # the kinds of a processor: PaliGemma's 0 is the prompt, Gemma 3's 1 is an image
        image = known.name == "gemma3"
        its = (known.prompt.kinds == VISUAL).long() if image else torch.zeros(len(known.prompt), dtype=torch.long)
        own["token_type_ids"] = torch.cat([its, torch.full([len(tokens)], int(not image))])[None]
    with torch.no_grad():
        logits = known.model(inputs_embeds=rows, use_cache=False, **own).logits[0]
    return logits[len(known.prompt) - 1 :]


def may_look(known: Known, layer: int, positions: Tensor, prompt: Prompt) -> Tensor:
    """Which query may look at which key of a sequence that begins with the prompt, one pair after another."""
    window, block = known.windows[layer], BLOCKS.get(known.name)
    kinds, segments = prompt.kinds.tolist(), prompt.segments.tolist()
    count, told = len(positions), torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for query in range(count):
        for key in range(count):
            within = window is None or int(positions[query] - positions[key]) < window
            both = max(query, key) < len(prompt)
            same = both and kinds[query] == kinds[key] == VISUAL and segments[query] == segments[key]
            if block == "prompt":
                told[query, key] = both or (key <= query and within)
            else:
                told[query, key] = within and (key <= query or (block == "image" and same))
    return told


def oracle(
    decoder: Decoder, embeddings: Tensor, positions: Tensor, allowed: Tensor, softcap: float | None = None
) -> Tensor:
    """Logits of every token of a full cache, each layer and KV head masked by itself.

    Args:
        embeddings: [tokens, hidden_size]; positions: [tokens].
        allowed: whether a query may look at a key, [layers, kv_heads, queries, keys]; of layers with fewer heads than
            others the last ones are unused.
        softcap: of the logits of attention.
    """

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        mask = allowed[layer, :heads]
        key, value, mask = (x.repeat_interleave(group, dim=d) for x, d in ((key, 1), (value, 1), (mask, 0)))
        logits = query @ key.mT * float(scale)
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        return logits.masked_fill(~mask, -torch.inf).softmax(-1) @ value

    with torch.no_grad(), attention_by(attention):
        out = decoder.language_model(
            inputs_embeds=embeddings[None], position_ids=positions[None] + decoder.first_position, use_cache=False
        )
        return decoder.head(out[0])[0]


def statistics(known: Known) -> list[KeyStatistics]:
    """Calibrated on the prompt alone, every token seeing all: near enough."""
    found = []

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        center = key[0].mean(dim=1)
        found.append(KeyStatistics(center, (key[0] - center[:, None]).abs().amax(dim=1), value[0].abs().amax(dim=1)))
        return full_attention(query, key, value, torch.zeros(1, *[key.shape[2]] * 2), scale)

    with torch.no_grad(), attention_by(attention):
        rows = known.prompt.embeddings[None]
        known.decoder.language_model(inputs_embeds=rows, position_ids=known.prompt.positions[None], use_cache=False)
    return found


def answer(
    driver: Driver, known: Known, steps: int, before_decode: Callable[[int], None] = lambda step: None
) -> tuple[Tensor, Tensor]:
    """Random tokens that follow the prompt, [steps - 1], and the logits after it and after each of them.

    Random models say the same word over and over, which would tell little.
    """
    tokens = torch.randint(5, 290, (steps - 1,), generator=torch.Generator().manual_seed(2))
    logits = [driver.prefill([known.prompt])[0]]
    for step, token in enumerate(tokens):
        if driver.full:
            driver.compact()
        before_decode(step)
        logits.append(driver.decode(known.embedding[token][None], [len(known.prompt) + step])[0])
    return tokens, torch.stack(logits)
