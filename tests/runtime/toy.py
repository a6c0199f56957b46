"""A bundle small enough to compute by hand: its words, levels and pictures, and the graphs of `toy_graphs`.

`reference.py` computes the same with lists and numpy, without anything of the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from engines import bundle
from engines.bundle import Adaptive, Bucket, Embedding, Layout, Level, Manifest, Model, View
from engines.gate import Fallback, Gate
from engines.preprocessor import ImagePreprocessor, Plain
from tests.layouts import plain
from tests.runtime import toy_graphs
from tests.runtime.toy_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, POSITIONS, VOCABULARY, WEIGHTS

IMAGE_TOKENS = 4
# fmt: off
WORDS = [
    "<pad>", "<s>", "</s>", "<unk>", "<image>", "user", "assistant", "image", ":", "1", "2", "3", "4", "5", "6", "7",
    "8", "what", "is", "it", "red", "blue", "one", "two", "yes", "no", "left", "right", "how", "many", "big", "small",
]
# fmt: on
assert len(WORDS) == VOCABULARY
SENTENCE_ENDS = [WORDS.index(word) for word in ("it", "red", "two", "yes", "small")]
END, IMAGE = WORDS.index("</s>"), WORDS.index("<image>")
EMBEDDING_OFFSET = 4096
TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(k=0) %}{% for m in messages %}{{ m['role'] }} :"
    "{% if m['content'] is string %} {{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{% set ns.k = ns.k + 1 %} image {{ ns.k }} : <image>"
    "{% elif c['type'] == 'text' %} {{ c['text'] }}{% endif %}{% endfor %}{% endif %} "
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
# Brought to a layout, whichever is nearest: a rule of its own would bring pictures to one of them.
PREPROCESSOR = ImagePreprocessor(Plain(None, None), 3, 1 / 255, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
CHUNKS = {8: {16: 4, 40: 3}}  # window: bucket: T; without one, tokens are decoded one by one
LEVELS = {  # level: kept of an image, whether it compacts, [(S, C of each layer, W, r)]
    "loose": (4, False, [(16, [12, 12], 24, 4), (40, [36, 36], 24, 4)]),
    "tight": (2, True, [(16, [8, 6], 8, 4), (40, [10, 12], 8, 4)]),
}
SQUARE = plain(8, 8, IMAGE_TOKENS)
WIDE = plain(8, 16, 8, text="left <image><image><image> right <image><image><image><image><image> big")
ADAPTIVE = {  # levels with the graphs of "tight", which decide how many of an image's 4 tokens they keep
    "thrifty": Adaptive([1, 2, 4], coverage=0.7),
    "shared": Adaptive([4], floor=1, quota=0.625),
    "frugal": Adaptive([2, 3, 4], coverage=0.8, floor=2, quota=0.75),
    "gated": Adaptive([1, 2, 3, 4], gate=Gate(base=0.5)),
    "fallen": Adaptive([1, 2, 3, 4], gate=Gate(base=1.0), fallback=Fallback(simple=1.0, complex=5.0)),
}


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:5])
    return tokenizer


def scaled(adaptive: Adaptive, layout: Layout) -> Adaptive:
    """The same for pictures of another size: twice the counts for twice the tokens."""
    times = layout.tokens // IMAGE_TOKENS
    return replace(adaptive, counts=[n * times for n in adaptive.counts], floor=adaptive.floor * times)


def build(out: Path, unknown: str | None = None, batch: int = 1, layouts: Sequence[Layout] = (SQUARE,)) -> Path:
    """Write the toy bundle; level tight names `unknown` for questions that come later."""
    with bundle.writing(out) as folder:
        graphs: dict[str, bundle.Graph] = {}
        levels: dict[str, Level] = {}
        for level, (kept, compacts, sizes) in LEVELS.items():
            views = {}
            for layout in layouts:
                vision, count = f"vision_{level}" + f"_{layout.name}" * (layout != SQUARE), kept * layout.tokens // 4
                graphs[vision] = toy_graphs.vision(layout, count).save(folder / f"{vision}.onnx", "vision")
                views[layout.name] = View(vision, count)
            buckets = []
            for length, capacities, window, recent in sizes:
                names: dict[str, Any] = {kind: f"{kind}_{level}_{length}" for kind in ("prefill", "decode", "compact")}
                if not compacts:
                    names["compact"] = ""
                if chunk := CHUNKS.get(window, {}).get(length, 0):
                    names |= {"extend": f"extend_{level}_{length}", "chunk": chunk}
                if batch > 1:
                    names |= {"batched": f"decode_{level}_{length}x{batch}", "batch": batch}
                bucket = Bucket(length, capacities, window, recent, **names)
                makers = {
                    "prefill": toy_graphs.prefill,
                    "decode": toy_graphs.decode,
                    "extend": toy_graphs.extend,
                    "compact": toy_graphs.compact,
                }
                for kind in (kind for kind in makers if names.get(kind)):
                    graphs[names[kind]] = makers[kind](bucket).save(folder / f"{names[kind]}.onnx", kind)
                if name := bucket.batched:
                    graphs[name] = toy_graphs.decode(bucket, batch).save(folder / f"{name}.onnx", "decode")
                buckets.append(bucket)
            later = unknown if level == "tight" else None
            levels[level] = Level({"name": level}, KV_HEADS, POSITIONS, views, buckets, unknown=later)
        every = {layout.name: "vision_all" + f"_{layout.name}" * (layout != SQUARE) for layout in layouts}
        for layout in layouts:
            vision = every[layout.name]
            graphs[vision] = toy_graphs.vision(layout, layout.tokens, adaptive=True).save(
                folder / f"{vision}.onnx", "vision"
            )
        for level, adaptive in ADAPTIVE.items():
            views = {each.name: View(every[each.name], each.tokens, scaled(adaptive, each)) for each in layouts}
            levels[level] = Level({"name": level}, KV_HEADS, POSITIONS, views, levels["tight"].buckets)
        table = WEIGHTS["embedding"]
        (folder / bundle.WEIGHTS).write_bytes(bytes(EMBEDDING_OFFSET) + table.tobytes())
        _tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "prompt.json").write_text(
            '{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>", '
            '"add_special_tokens": false}'
        )
        PREPROCESSOR.write(folder)
        model = Model(
            model_type="toy",
            num_heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            image_token_id=IMAGE,
            placeholder="<image>",
            layouts=[*layouts],
            bos_token_id=1,
            eos_token_ids=[END],
            embedding=Embedding(EMBEDDING_OFFSET, "float32", list(table.shape)),
            sentence_ends=SENTENCE_ENDS,
        )
        bundle.seal(folder, Manifest(model, levels, "loose", graphs, backends={"ort": "toy"}))
    return out
