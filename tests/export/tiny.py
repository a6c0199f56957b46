"""A random LLaVA with grouped-query heads, small enough to export in seconds, and a driver of the graph modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from calibration import evaluate
from calibration.samples import FILE, processed
from demo_vlm.saving import build_processor
from demo_vlm.vocabulary import TOKEN_IDS
from engines.bundle import TensorSpec
from engines.config import parse
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import NEW, Compact, Decoder, Prefill, Stateful
from export.recipe import Recipe

IMAGE_SIZE, PATCH = 64, 16
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2
POSITIONS = 256


def llava(
    heads: int = 8, kv_heads: int = 2, head_dim: int = 16, layers: int = 3, bias: bool = False
) -> LlavaForConditionalGeneration:
    """A model with random weights, large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=len(TOKEN_IDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        attention_bias=bias,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        projection_dim=32,
        initializer_range=0.2,
    )
    config = LlavaConfig(  # type: ignore[call-arg]  # image_token_id is an alias
        vision_config=vision,
        text_config=text,
        image_token_id=4,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
    )
    return LlavaForConditionalGeneration(config).eval().requires_grad_(False)


def save(folder: Path, model: LlavaForConditionalGeneration | None = None, count: int = 2) -> Path:
    """A model, the tiny one if none is given, as a checkpoint folder, with some calibration samples."""
    build_processor(IMAGE_SIZE, PATCH).save_pretrained(folder)
    (model or llava()).save_pretrained(folder)
    samples(folder / "samples", count)
    return folder


def samples(folder: Path, count: int = 2) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for i in range(count):
        Image.fromarray(picture(i)).save(folder / f"{i}.png")
        lines.append(json.dumps({"images": [f"{i}.png"], "prompt": "what color is the shape ?", "answer": "red"}))
    (folder / FILE).write_text("\n".join(lines) + "\n")
    return folder


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


def recipe(**tables: Any) -> Recipe:
    """A recipe as a TOML file would give it: full precision, no eviction, unless told otherwise."""
    defaults: dict[str, Any] = {
        "name": "test",
        "quantize": {"method": "float32"},
        "budget": {"keep": 1.0, "shallow_rate": 0.0, "deep_rate": 0.0},
        "window": {"least": 8, "most": 8, "recent": 0.25, "dtype": "float32"},
    }
    for name, value in tables.items():
        defaults[name] = {**defaults.get(name, {}), **value} if isinstance(value, dict) else value
    return parse(Recipe, defaults, "test")


def statistics(decoder: Decoder) -> list[KeyStatistics]:
    """As calibration might have found them: all that any method of quantization asks for."""
    generator = torch.Generator().manual_seed(0)
    return [
        KeyStatistics(
            torch.randn(heads, decoder.head_dim, generator=generator),
            *[torch.full((heads, decoder.head_dim), 4.0)] * 4,
            *(torch.randn(heads, 50, decoder.head_dim, generator=generator) for _ in range(2)),
        )
        for heads in decoder.kv_heads
    ]


class Prompt(evaluate.Prompt):
    """A prompt as the graphs and as Hugging Face take it: also with token ids and pixels."""

    def __init__(self, checkpoint: Checkpoint, question: str, images: Sequence[np.ndarray] = ()):
        self.inputs = processed(checkpoint.processor, question, [Image.fromarray(image) for image in images])
        self.inputs.pop("mm_token_type_ids", None)
        self.ids: Tensor = self.inputs["input_ids"][0]
        self._take(evaluate.prompt_of(checkpoint, self.inputs))

    def _take(self, rows: evaluate.Prompt) -> None:
        super().__init__(rows.embeddings, rows.kinds, rows.positions, rows.segments)

    @classmethod
    def of_ids(cls, checkpoint: Checkpoint, ids: list[int]) -> Prompt:
        """Text tokens only, as they are."""
        prompt = object.__new__(cls)
        prompt.ids = torch.tensor(ids)
        prompt.inputs = {"input_ids": prompt.ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        prompt._take(evaluate.prompt_of(checkpoint, prompt.inputs))
        return prompt

    def only(self, rows: Tensor) -> Prompt:
        """The prompt with some of its rows, at their original positions."""
        fewer = object.__new__(Prompt)
        fewer.inputs, fewer.ids = self.inputs, self.ids
        fewer._take(evaluate.Prompt(self.embeddings[rows], self.kinds[rows], self.positions[rows], self.segments[rows]))
        return fewer


class Driver(evaluate.Eager):
    """The evaluator of recipes, checking that all that goes in and comes out is as the graphs promise."""

    def run(self, kind: type[Stateful], feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        for spec in self.graphs[kind].inputs.values():
            _check(feeds[spec.name], spec)
        out = super().run(kind, feeds)
        for name, spec in self.state.specs().items() if kind in (Prefill, Compact) else ():
            _check(out[name if kind is Prefill else NEW + name], spec)
        return out

    def visible(self, layer: int, item: int = 0) -> list[set[int]]:
        """Original positions in store and window, one set a KV head: what the next decode step attends to."""
        window = set(self.tensors["window_positions"][item].tolist())
        found = []
        for positions, bias in zip(
            self.tensors[f"store_positions.{layer}"][item], self.tensors[f"store_bias.{layer}"][item], strict=True
        ):
            assert torch.equal(positions >= 0, torch.isfinite(bias))  # validity is stated twice: it must agree
            store = positions[positions >= 0].tolist()
            assert len(store) == len(set(store))
            assert not window & set(store)
            found.append(window - {-1} | set(store))
        return found


def _check(tensor: Tensor, spec: TensorSpec) -> None:
    assert (list(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}"), spec.name


def greedy(
    driver: Driver,
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    steps: int,
    forced: Tensor | None = None,
    before_decode: Callable[[int], None] = lambda step: None,
) -> tuple[Tensor, Tensor]:
    """`steps` greedy tokens [batch, steps] and their logits [batch, steps, vocab_size].

    Args:
        forced: tokens to feed in place of the greedy ones, [batch, steps].
        before_decode: called before every decode step, the window compacted if it was full.
    """
    logits = [driver.prefill(prompts)]
    tokens = [logits[0].argmax(-1)]
    for step in range(steps - 1):
        fed = tokens[-1] if forced is None else forced[:, step]
        if driver.full:
            driver.compact()
        before_decode(step)
        # The next token's position continues the prompt as it was before any of its tokens was pruned.
        positions = [int(prompt.positions[-1]) + 1 + step for prompt in prompts]
        logits.append(driver.decode(checkpoint.embedding[fed], positions))
        tokens.append(logits[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def hugging_face(model: Any, prompt: Prompt, steps: int) -> tuple[Tensor, Tensor]:
    """The same by Hugging Face's generate, ignoring the end token: [steps] and [steps, vocab_size]."""
    with torch.no_grad():
        out = model.generate(
            **prompt.inputs,
            generation_config=GenerationConfig(
                max_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
    return out.sequences[0, prompt.inputs["input_ids"].shape[1] :], torch.cat(out.logits)
