"""Accuracy against dropped tokens for the methods of NVIDIA's kvpress: same model, questions and ratios as our curve.

kvpress 0.5.5 wants transformers < 5.3, older than this project's, hence an environment of its own:

    python3 -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install kvpress==0.5.5 "transformers<5.3" pillow easy-vqa
    /tmp/kvpress/bin/python scripts/kvpress_curve.py --json peers.json
    python scripts/accuracy_curve.py --peers peers.json

The Hugging Face model itself, prompt by prompt: its cache is compressed when prefill, question included, is done, and
the answer is greedy. kvpress's hooks run once a layer after attention and change the cache only, which prefill does not
read again: a prompt is read once, and every press is given what its hooks would have seen.

Where a method observes by a window, it is 8 queries wide, as ours; SnapKV is measured with kvpress's default of 64 too.
(Wider than half of a prompt, PyramidKV would fall back to SnapKV.)

Not measured, since they ask for what this model or these prompts have not: QFilter, DuoAttention, KVzap, FastKVzip,
DMS, LU-KV and ExpectedAttentionStats (trained or published per model), Finch (a delimiter in a text), KVzip, KVgrad,
KVCompose and RestoreKV (read the prompt's text again; here it has images), ThinK (drops channels), SimLayerKV (layers,
by no ratio), CAM and Decoding (the answer's tokens).
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import curve
from calibration.samples import processed
from curve import DEMO, MAX_NEW_TOKENS, NOTHING, QUESTIONS, RATIOS, SUITES, Cell
from demo_vlm import suites as held_out
from demo_vlm.suites import Item
from engines.errors import Parser, UserError, command, positive
from reporting import choice, json_option, write

ATTENTIONS = "observed-attention"  # the one press that wants the attention weights of the prompt
VISION = {"vision_tower": "model.vision_tower.vision_model", "multi_modal_projector": "model.multi_modal_projector"}
TEXT = {"language_model.model": "model.language_model", "language_model.lm_head": "lm_head"}


def presses() -> dict[str, Callable[[float], Any]]:
    """Name -> press of a ratio."""
    try:
        import kvpress as k  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise UserError("kvpress is not here: it needs an environment of its own, see --help") from None

    def snapkv(ratio: float) -> Any:
        return k.SnapKVPress(ratio, window_size=8)

    return {
        "random": lambda r: k.RandomPress(r, seed=0),
        "snapkv": snapkv,
        "snapkv-64": k.SnapKVPress,
        "tova": k.TOVAPress,
        "observed-attention": k.ObservedAttentionPress,
        "keydiff": k.KeyDiffPress,
        "knorm": k.KnormPress,
        "expected-attention": k.ExpectedAttentionPress,
        "streaming-llm": k.StreamingLLMPress,
        "pyramidkv": lambda r: k.PyramidKVPress(r, window_size=8),
        "adakv": lambda r: k.AdaKVPress(snapkv(r)),
        "adakv-expected": lambda r: k.AdaKVPress(k.ExpectedAttentionPress(r)),
        "criticalkv": lambda r: k.CriticalKVPress(snapkv(r)),
        "critical-adakv": lambda r: k.CriticalAdaKVPress(snapkv(r)),
        "cur": k.CURPress,
        "lagkv": k.LagKVPress,
        "leverage": k.LeverageScorePress,
        "non-causal": k.NonCausalAttnPress,
        "compactor": k.CompactorPress,
        "chunkkv": lambda r: k.ChunkKVPress(snapkv(r)),
        "block": lambda r: k.BlockPress(snapkv(r)),
        "cap": k.CapPress,
        "merging": lambda r: k.MergingPress(snapkv(r)),
        "entropy-gated": lambda r: k.EntropyGatedChunkKVPress(snapkv(r)),
    }


@dataclass
class Layer:
    """What kvpress's hook sees of a layer when the prompt has been read."""

    module: Any
    arguments: dict[str, Any]
    output: Any


class Reader:
    """The Hugging Face model, and what it answers with a cache that a press has compressed."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoProcessor, LlavaForConditionalGeneration

        # These transformers call the vision tower's weights by another name than those that saved them.
        names = {rf"^{name}\.": f"{here}." for name, here in (VISION | TEXT).items()}
        loaded: Any = LlavaForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32, key_mapping=names, output_loading_info=True, local_files_only=True
        )
        self.model, info = loaded
        if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
            raise UserError(f"{checkpoint}: {len(wrong)} weights do not fit these transformers, for example {wrong[0]}")
        self.processor = AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
        self.layers = self.model.model.language_model.layers
        self.end = self.model.generation_config.eos_token_id

    def read(self, item: Item, attention: str) -> tuple[int, int, list[Layer]]:
        """Prefill: how many tokens the prompt has, the answer's first one, and what hooks see."""
        from transformers import DynamicCache

        inputs = processed(self.processor, item.question, [Image.fromarray(pixels) for pixels in item.images])
        self.model.set_attn_implementation(attention)
        seen: list[Layer] = []

        def hook(module: Any, _: Any, arguments: dict[str, Any], output: Any) -> None:
            seen.append(Layer(module, arguments, output))

        hooks = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in self.layers]
        logits = self.model(**inputs, past_key_values=DynamicCache()).logits
        for registered in hooks:
            registered.remove()
        return inputs["input_ids"].shape[1], int(logits[0, -1].argmax()), seen

    def answer(self, tokens: int, first: int, seen: list[Layer], press: Any) -> tuple[str, float]:
        """Greedy answer after compression by `press` (None: all is kept), and the tokens kept, a layer's mean."""
        cache = copy.deepcopy(seen[0].arguments["past_key_values"])
        for layer in seen:
            layer.module.masked_key_indices = None  # what AdaKV dropped of another prompt
        if press is not None:
            press.post_init_from_model(self.model)
        for layer in seen if press is not None else []:
            layer.module.rotary_emb = self.model.model.language_model.rotary_emb  # where kvpress looks for it
            press.forward_hook(layer.module, (), layer.arguments | {"past_key_values": cache}, layer.output)
        kept = sum(self._kept(layer.module, rows.keys) for layer, rows in zip(seen, cache.layers, strict=True))
        self.model.set_attn_implementation("sdpa")
        said = [first]
        while len(said) < MAX_NEW_TOKENS and said[-1] != self.end:
            at = torch.tensor([tokens + len(said) - 1])
            logits = self.model(
                input_ids=torch.tensor([said[-1:]]), past_key_values=cache, position_ids=at[None]
            ).logits
            said.append(int(logits[0, -1].argmax()))
        return self.processor.tokenizer.decode(said, skip_special_tokens=True), kept / len(seen)

    def _kept(self, module: Any, keys: Tensor) -> float:
        masked = getattr(module, "masked_key_indices", None)  # AdaKV hides keys instead of dropping them
        return keys.shape[2] - (0 if masked is None else len(masked[0]) / keys.shape[1])


@torch.no_grad()
def measure(
    reader: Reader, suites: dict[str, list[Item]], methods: Sequence[str], drops: Sequence[float]
) -> Iterator[Cell]:
    """Every suite with nothing dropped, then by every press at every ratio."""
    known = presses()
    wanted: list[tuple[str, float]] = [(NOTHING, 0.0), *((method, ratio) for method in methods for ratio in drops)]
    with tqdm(total=sum(map(len, suites.values())), unit="question", disable=not sys.stderr.isatty()) as bar:
        for suite, items in suites.items():
            texts: list[list[str]] = [[] for _ in wanted]
            kept, tokens = [0.0] * len(wanted), 0
            for item in items:
                length, first, seen = reader.read(item, "sdpa")
                weighed = reader.read(item, "eager")[2] if ATTENTIONS in methods else []
                tokens += length
                for number, (method, ratio) in enumerate(wanted):
                    layers = weighed if method == ATTENTIONS else seen
                    press = None if method == NOTHING else known[method](ratio)
                    text, mean = reader.answer(length, first, layers, press)
                    texts[number].append(text)
                    kept[number] += mean
                bar.update()
            for (method, ratio), said, total in zip(wanted, texts, kept, strict=True):
                correct, answers = curve.judged(said, [item.answer for item in items])
                mean = tokens / len(items)
                yield Cell(suite, method, ratio, total / len(items), mean, len(items), correct, answers)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEMO, help="default: the demo VLM's")
    parser.add_argument("--suites", default=SUITES, help="comma-separated; default: %(default)s")
    parser.add_argument("--methods", help="comma-separated; default: all that run here")
    parser.add_argument("--ratios", type=curve.numbers, default=RATIOS, help="of tokens dropped; default: %(default)s")
    parser.add_argument(
        "--limit", type=positive, default=QUESTIONS, metavar="N", help="questions a suite; default: 100"
    )
    json_option(parser, ", for accuracy_curve.py")
    return parser.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    known = list(presses())
    methods = choice(arguments.methods or ",".join(known), known, "press")
    names = choice(arguments.suites, held_out.NAMES, "suite")
    started = time.perf_counter()
    reader = Reader(arguments.checkpoint)
    cells = list(measure(reader, held_out.suites(names, arguments.limit), methods, arguments.ratios))
    seconds = time.perf_counter() - started
    print(curve.table(cells))
    print(f"{sum(cell.questions for cell in cells)} questions, {seconds:.0f} s, {torch.get_num_threads()} threads")
    if arguments.json is not None:
        packages = ("kvpress", "numpy", "torch", "transformers")
        write(arguments.json, json.dumps(curve.report(cells, arguments.checkpoint, seconds, packages), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
