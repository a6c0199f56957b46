"""Needles found by NVIDIA's kvpress at the bytes of our levels: the prompts of scripts/bench_quality.py.

kvpress 0.5.5 wants transformers < 5.3, older than this project's, hence an environment of its own:

    python3 -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install kvpress==0.5.5 "transformers<5.3"
    /tmp/kvpress/bin/python scripts/kvpress_needles.py build/smollm2 --ours build/quality.json --json build/peers.json
    python scripts/bench_quality.py build/smollm2 --json build/quality.json --peers build/peers.json

The Hugging Face model itself: prefill, question included, then its cache is compressed, and the answer is right if each
of its tokens is the likeliest. kvpress drops tokens and keeps the others in full: a level that takes a share of the
bytes of an fp16 cache is compared with that share of the tokens. A haystack is read once, its questions one by one
behind it; every press is given what its hooks would have seen of the whole prompt.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import english
from engines.config import read_json
from engines.errors import Parser, UserError, command
from needles import Needle, haystack, places
from reporting import choice, json_option, write

NOTHING = "none"  # the method that drops nothing, as `off`
WINDOW = (
    8  # queries that score the tokens in `balanced` and `extreme`; kvpress's own default is 64, longer than a question
)


def presses() -> dict[str, Callable[[float], Any]]:
    """Name -> press of a share of tokens that is dropped, by kvpress's defaults; SnapKV with our window too."""
    try:
        import kvpress as k  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise UserError("kvpress is not here: it needs an environment of its own, see --help") from None
    made = {
        "SnapKV": k.SnapKVPress,
        f"SnapKV of {WINDOW}": partial(k.SnapKVPress, window_size=WINDOW),
        "ExpectedAttention": k.ExpectedAttentionPress,
        "KeyDiff": k.KeyDiffPress,
    }
    return {name: scoring_once(press) for name, press in made.items()}


def scoring_once(make: Callable[[float], Any]) -> Callable[[float], Any]:
    """The same presses; of several that are given the same, the first one scores it, which takes longest."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def made(dropped: float) -> Any:
        press = make(dropped)
        score = press.score

        def once(module: Any, hidden: Tensor, *rest: Any) -> Tensor:
            before = known.get(module.layer_idx)
            if before is None or before[0] is not hidden:
                known[module.layer_idx] = before = hidden, score(module, hidden, *rest)
            return before[1]

        press.score = once
        return press

    return made


@dataclass(eq=False)
class Seen:
    """What kvpress's hooks see of each layer.

    Attributes:
        hidden: what goes into attention, [1, tokens, hidden_size]; rotary: cos and sin of all tokens.
        cache: keys and values of all tokens.
    """

    hidden: list[Tensor] = field(default_factory=list)
    rotary: tuple[Tensor, Tensor] | None = None
    cache: Any = None


class Reader:
    """The Hugging Face model, and whether it finds a needle with a cache that a press has compressed."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        load: dict[str, Any] = {"local_files_only": True}
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **load).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, **load)
        self.layers = self.model.model.layers

    def read(self, ids: Sequence[int], before: Seen | None = None) -> tuple[Seen, int]:
        """Prefill of a text, or of what follows one; and the likeliest next token."""
        from transformers import DynamicCache

        seen = Seen(cache=copy.deepcopy(before.cache) if before else DynamicCache())

        def hook(_module: Any, _: Any, arguments: dict[str, Any]) -> None:
            seen.hidden.append(arguments["hidden_states"])
            seen.rotary = arguments["position_embeddings"]

        hooks = [layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True) for layer in self.layers]
        logits = self.model(input_ids=torch.tensor([ids]), past_key_values=seen.cache, logits_to_keep=1).logits
        for registered in hooks:
            registered.remove()
        if before:
            seen.hidden = [torch.cat(pair, dim=1) for pair in zip(before.hidden, seen.hidden, strict=True)]
            pairs = zip(before.rotary or (), seen.rotary or (), strict=True)
            seen.rotary = tuple(torch.cat(pair, dim=1) for pair in pairs)  # type: ignore[assignment]
        return seen, int(logits[0, -1].argmax())

    def finds(self, needle: Needle, seen: Seen, first: int, press: Any) -> bool:
        """Whether the greedy answer is the right one after compression by `press`; None keeps all."""
        from transformers import DynamicCache

        if first != needle.answer[0]:
            return False
        cache, tokens = DynamicCache(), seen.hidden[0].shape[1]
        if press is not None:
            press.post_init_from_model(self.model)
        for layer, hidden in zip(self.layers, seen.hidden, strict=True):
            module, rows = layer.self_attn, seen.cache.layers[layer.self_attn.layer_idx]
            keys, values = rows.keys, rows.values
            if press is not None:
                module.rotary_emb = self.model.model.rotary_emb  # where kvpress looks for it
                arguments = {"position_embeddings": seen.rotary}
                keys, values = press.compress(module, hidden, keys, values, None, arguments)
            cache.update(keys, values, module.layer_idx)
        rest = torch.tensor([needle.answer[:-1]])
        more = torch.arange(rest.shape[1])
        # Masks go by the places in the cache, RoPE by the positions in the text.
        logits = self.model(input_ids=rest, past_key_values=cache, position_ids=(tokens + more)[None]).logits
        return logits[0].argmax(dim=-1).tolist() == needle.answer[1:]


@torch.no_grad()
def measure(
    reader: Reader, found: dict[str, Any], texts: dict[str, str], methods: Sequence[str], keep: Callable[[], None]
) -> None:
    """Add to `found` what it lacks; kept after every haystack."""
    known, sizes = presses(), found["sizes"]
    wanted = [(method, level, share) for method in methods for level, share in found["levels"].items() if share < 1]
    rows = {(row["method"], row["level"]): row for row in found["rows"]}
    for method, level, share in [(NOTHING, "off", 1.0), *wanted]:
        if (method, level) not in rows:
            row = {"method": method, "level": level, "share": share, "found": []}
            rows[method, level] = row
            found["rows"].append(row)
    total = sizes["haystacks"] * sizes["needles"]
    with tqdm(total=total, unit="needle", disable=not sys.stderr.isatty()) as bar:
        for seed, place in enumerate(places(texts, sizes["haystacks"])):
            if all(len(row["found"]) >= (seed + 1) * sizes["needles"] for row in rows.values()):
                bar.update(sizes["needles"])
                continue
            hay = haystack(reader.tokenizer, place, sizes["needle_context"], sizes["needles"], seed)
            once, _ = reader.read(hay.ids)
            results: dict[tuple[str, str], list[bool]] = {key: [] for key in rows}
            for needle in hay.needles:
                seen, first = reader.read(needle.tail, once)
                for (method, level), row in rows.items():
                    press = None if method == NOTHING else known[method](1 - row["share"])
                    results[method, level].append(reader.finds(needle, seen, first, press))
                bar.update()
            for key, row in rows.items():
                row["found"] = row["found"][: seed * sizes["needles"]] + results[key]
            keep()


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="scripts/kvpress_needles.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a language model")
    parser.add_argument("--ours", type=Path, required=True, metavar="FILE", help="figures of scripts/bench_quality.py")
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="as bench_quality.py was given")
    parser.add_argument("--methods", help="comma-separated (default: all that are known)")
    json_option(parser, ", and go on from there", required=True)
    args = parser.parse_args(argv)
    ours = read_json(args.ours)
    settings = {
        "sizes": ours["sizes"],
        "levels": {name: told["needle_context"] for name, told in ours["levels"].items()},
    }
    found = settings | {"rows": []}
    if args.json.exists():
        found = read_json(args.json)
        if any(found.get(name) != value for name, value in settings.items()):
            raise UserError(f"{args.json} is of other prompts or bytes: give another --json, or remove it")
    known = list(presses())
    methods = choice(args.methods or ",".join(known), known, "press")
    texts = {file.stem: file.read_text(encoding="utf-8") for file in args.text or ()} or english.novels()
    reader = Reader(args.checkpoint)
    measure(reader, found, texts, methods, lambda: write(args.json, json.dumps(found, indent=1) + "\n"))
    for row in found["rows"]:
        print(f"{row['method']} at {row['share']:.3f} ({row['level']}): {sum(row['found'])} of {len(row['found'])}")


if __name__ == "__main__":
    sys.exit(main())
