"""What a bundle says of itself: model, levels, graphs, plans and files. Saved as JSON, checked when loaded.

numpy and the standard library only: export writes it, the runtime reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np

from engines.artifacts import Graph, Library, Plan
from engines.gate import Adaptive
from engines.guard import Guarded
from engines.layout import Layout, VideoStyle
from engines.mrope import MRope
from engines.tokens import NO_TOKEN
from engines.weights import Embedding, StoredWeights

FORMAT = "unicache-edge"
VERSION = 7
WITHOUT_VIDEOS = 6  # the version before them: what shows none is written as one of it, and older programs read it
WEIGHTS = "weights.bin"


@dataclass(frozen=True)
class Shortened:
    """How long a prompt is behind the decoder layer that shortens it.

    Attributes:
        tokens: rows of the later layers, S'. A prompt of no more tokens loses none.
        text: text tokens of a longer prompt, at most: they are never dropped, and the rest must make room for them.
    """

    tokens: int
    text: int

    def fits(self, tokens: int, text: int) -> bool:
        """Whether a prompt of `tokens`, `text` of them text, can be shortened so far."""
        return tokens <= self.tokens or text <= self.text


@dataclass(frozen=True)
class Bucket:
    """Graphs and sizes for prompts of up to `length` tokens (after visual-token pruning).

    Attributes:
        length: S, prompts are left-padded to it.
        capacities: slots per KV head of each layer's store, C_l.
        window: W, tokens kept in full precision.
        recent: r, tokens that stay in the window when it is compacted.
        prefill, decode, compact: names of the graphs; `compact` is empty when nothing is ever compacted.
        shortened: None where every layer sees the whole prompt.
        extend: name of the graph that reads `chunk` tokens at once, T; empty: they are decoded one by one.
        batched: name of the graph that decodes one token of each of `batch` requests, B; empty: one request at a time.
    """

    length: int
    capacities: list[int]
    window: int
    recent: int
    prefill: str
    decode: str
    compact: str
    shortened: Shortened | None = None
    extend: str = ""
    chunk: int = 1
    batched: str = ""
    batch: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= self.window or self.length < 1:
            raise ValueError(f"needs a length and 0 <= recent <= window, got {self}")
        if self.compact and self.recent == self.window:
            raise ValueError(f"compacting must free slots: recent and window are both {self.window}")
        if not 1 <= self.chunk <= max(self.window - self.recent, 1):
            raise ValueError(f"a chunk of {self.chunk} does not fit a window of {self.window}, {self.recent} recent")
        if self.batch < 1 or (self.batch > 1) != bool(self.batched):
            raise ValueError(f"a batched graph and a batch of 2 rows or more belong together, got {self}")
        if (short := self.shortened) and not (0 <= short.text <= short.tokens <= self.length and short.tokens >= 1):
            raise ValueError(f"shortened prompts need 0 <= text <= tokens <= {self.length} and a token, got {short}")


@dataclass(frozen=True)
class View:
    """How a level sees a picture of one layout.

    Attributes:
        vision: name of the vision graph.
        tokens: visual tokens that it returns.
        adaptive: how many of them a request takes; None: all.
    """

    vision: str
    tokens: int
    adaptive: Adaptive | None = None

    @property
    def least(self) -> int:
        """Tokens that a prompt must have room for."""
        return self.adaptive.floor if self.adaptive and self.adaptive.quota is not None else self.tokens


@dataclass(frozen=True)
class Level:
    """One compression level: a recipe made static.

    Attributes:
        recipe: the recipe's settings, as read from its TOML file.
        kv_heads: KV heads that each layer caches; the model's, or fewer where heads were merged.
        max_positions: tokens of prompt and answer together, at most.
        views: of each layout, by its name.
        buckets: shortest first.
        unknown: name of the level that takes this one's place while the question is not known; None is this one.
        guard: what it costs on held-out samples.
    """

    recipe: dict[str, Any]
    kv_heads: list[int]
    max_positions: int
    views: dict[str, View]
    buckets: list[Bucket]
    unknown: str | None = None
    guard: Guarded = field(default_factory=lambda: Guarded(note="not guarded"))

    def seen(self, layouts: Sequence[Layout]) -> list[View]:
        """How it sees pictures of these layouts."""
        return [self.views[layout.name] for layout in layouts]


@dataclass(frozen=True)
class Model:
    """What the runtime must know of the model, as it was before anything was compressed.

    Attributes:
        kv_heads: KV heads of each layer.
        placeholder: what a chat template writes for a picture, and the text of its layout takes the place of.
        layouts: what pictures are brought to, the first where nothing tells which; none: the model takes no pictures.
        sentence_ends: ids of the tokens that end a sentence, as `engines.tokens` finds them in the vocabulary.
        block: within what tokens look both ways, each image or the whole prompt: prefill must read it at once.
        mrope: how position ids are counted, three a token; None: a token has one, its position.
        deepstack: taps of the vision encoder that the first layers add to visual tokens.
        video: how it sees a video; None: it does not, or not by its layouts.
    """

    model_type: str
    num_heads: int
    kv_heads: list[int]
    head_dim: int
    hidden_size: int
    vocab_size: int
    image_token_id: int
    placeholder: str
    layouts: list[Layout]
    bos_token_id: int | None
    eos_token_ids: list[int]
    embedding: Embedding
    sentence_ends: list[int] = field(default_factory=list)
    block: Literal["image", "prompt"] | None = None
    mrope: MRope | None = None
    deepstack: int = 0
    video: VideoStyle | None = None

    def __post_init__(self) -> None:
        sizes = ("num_heads", "head_dim", "hidden_size", "vocab_size")
        if wrong := [name for name in sizes if getattr(self, name) < 1]:
            raise ValueError(f"{wrong[0]} must be at least 1, got {getattr(self, wrong[0])}")
        _check_heads(self.kv_heads)
        if not (0 if self.layouts else NO_TOKEN) <= self.image_token_id < self.vocab_size:
            raise ValueError(f"image token {self.image_token_id} is outside the vocabulary of {self.vocab_size}")
        if len({layout.name for layout in self.layouts}) < len(self.layouts):
            raise ValueError(f"two layouts have one name: {', '.join(layout.name for layout in self.layouts)}")
        if self.layouts and not self.placeholder:
            raise ValueError("placeholder is empty: no text would stand for a picture")
        for layout in self.layouts:
            if self.mrope and (not layout.grid or self.mrope.tokens(layout.grid) != layout.tokens):
                raise ValueError(f"layout {layout.name} of {layout.tokens} tokens has no grid {layout.grid} of patches")
        if self.video and not (self.layouts and self.mrope and 0 <= self.video.token_id < self.vocab_size):
            raise ValueError(f"a style of videos needs layouts, M-RoPE and a token of the vocabulary, got {self.video}")
        if self.embedding.shape != [self.vocab_size, self.hidden_size]:
            raise ValueError(f"embedding {self.embedding.shape} is not [{self.vocab_size}, {self.hidden_size}]")

    @property
    def num_layers(self) -> int:
        return len(self.kv_heads)

    @property
    def visual_ids(self) -> list[int]:
        """Ids of the tokens that stand for parts of images and videos."""
        return sorted({self.image_token_id, self.video.token_id if self.video else self.image_token_id})

    def kv_bytes(self, tokens: int, dtype: str = "float16") -> int:
        """Bytes of an uncompressed KV cache of `tokens` tokens."""
        per_token = 2 * sum(self.kv_heads) * self.head_dim * np.dtype(dtype).itemsize
        return tokens * per_token


@dataclass(frozen=True)
class File:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The whole description of a bundle.

    Attributes:
        levels: name -> level, lightest first.
        default_level: used when the caller names none.
        graphs: name -> graph.
        plans: TensorRT plans, one a graph and backend.
        backends: backend -> note of the build (version, what was built, why not).
        tools: versions of the packages that built it.
        libraries: kernels of the operators.
        weights: how they are stored, those of all levels alike.
        files: every file but the manifest, with its hash; filled in when the bundle is sealed.
    """

    model: Model
    levels: dict[str, Level]
    default_level: str
    graphs: dict[str, Graph]
    plans: list[Plan] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    libraries: list[Library] = field(default_factory=list)
    weights: StoredWeights = field(default_factory=StoredWeights)
    files: dict[str, File] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    @property
    def needs(self) -> int:
        """The version of the first program that can read it."""
        return VERSION if self.model.video else WITHOUT_VIDEOS

    def as_data(self) -> dict[str, Any]:
        """What is written: without what a program of the version that it needs does not know."""
        data = asdict(self)
        if self.model.video is None:
            del data["model"]["video"]
        return data

    @property
    def batch(self) -> int:
        """Requests that its graphs decode at once, at most."""
        return max(bucket.batch for level in self.levels.values() for bucket in level.buckets)

    def state_bytes(self, bucket: Bucket) -> int:
        """Of a request's KV state."""
        return sum(spec.nbytes for spec in self.graphs[bucket.prefill].outputs if spec.name != "logits")

    def batch_bytes(self, bucket: Bucket) -> int:
        """What the runtime allocates for a batch of the bucket; with `batch` 1, for one request."""
        return bucket.batch * self.state_bytes(bucket)

    def check(self) -> None:
        """Every name must lead somewhere, and every file that is opened must have its hash.

        Raises:
            ValueError: one does not.
        """
        if self.default_level not in self.levels:
            raise ValueError(f"default level {self.default_level!r} is none of {', '.join(self.levels)}")
        for name, level in self.levels.items():
            if not level.buckets:
                raise ValueError(f"level {name!r} has no buckets")
            if level.unknown is not None and level.unknown not in self.levels:
                raise ValueError(f"level {name!r} names {level.unknown!r} for unknown questions, which is no level")
            self._check_views(name, level.views)
            _check_heads(level.kv_heads)
            if level.max_positions < 1:
                raise ValueError(f"level {name!r} has no positions")
            if len(level.kv_heads) != self.model.num_layers:
                raise ValueError(
                    f"level {name!r} has KV heads of {len(level.kv_heads)} layers, not of {self.model.num_layers}"
                )
            for bucket in level.buckets:
                self._check_bucket(bucket, sum(level.kv_heads))
        for plan in self.plans:
            if plan.graph not in self.graphs:
                raise ValueError(f"plan {plan.file!r} is of an unknown graph {plan.graph!r}")
        for name in self.files:
            if not _is_inside(name):
                raise ValueError(f"file name {name!r} leads out of the bundle")
        parts: list[Graph | Plan | Library] = [*self.graphs.values(), *self.plans, *self.libraries]
        for name in (*(part.file for part in parts), WEIGHTS):
            if name not in self.files:
                raise ValueError(f"file {name!r} has no hash")
        if self.model.embedding.end > self.files[WEIGHTS].bytes:
            raise ValueError(f"the embedding table ends at {self.model.embedding.end}, behind the end of {WEIGHTS}")

    def _check_views(self, level: str, views: dict[str, View]) -> None:
        """Every layout is seen, and what is asked about one image is asked about all."""
        layouts = {layout.name: layout for layout in self.model.layouts}
        if views.keys() != layouts.keys():
            raise ValueError(f"level {level!r} sees {', '.join(views) or 'nothing'}, not {', '.join(layouts)}")
        for name, view in views.items():
            kept, vision, adaptive = view.tokens, self._graph(view.vision, "vision"), view.adaptive
            if not 1 <= kept <= layouts[name].tokens:
                raise ValueError(f"level {level!r} keeps {kept} of the {layouts[name].tokens} tokens of {name}")
            vision.expect(pixel_values=layouts[name].pixel_values)
            size, taps = self.model.hidden_size, self.model.deepstack
            vision.expect(visual_tokens=[1, kept, size], kept=[1, kept])
            if taps:
                vision.expect(deepstack=[taps, kept, size])
            if adaptive:
                vision.expect(order=[1, kept], coverage=[1, kept], entropy=[1])
                if adaptive.counts[-1] != kept:
                    raise ValueError(f"counts {adaptive.counts} of level {level!r} do not end at {kept}")
        if len({view.adaptive and view.adaptive.rule for view in views.values()}) > 1:
            raise ValueError(f"level {level!r} decides by other rules for one layout than for another")

    def _check_bucket(self, bucket: Bucket, heads: int) -> None:
        """The graphs fit the model and each other: what prefill returns is what the others take."""
        m, length = self.model, bucket.length
        if len(bucket.capacities) != m.num_layers or min(bucket.capacities) < 0:
            raise ValueError(f"capacities {bucket.capacities} are not those of {m.num_layers} layers")
        window = [1, heads, bucket.window, m.head_dim]
        prefill, decode = self._graph(bucket.prefill, "prefill"), self._graph(bucket.decode, "decode")
        prefill.expect(embeddings=[1, length, m.hidden_size], positions=[1, length], kinds=[1, length])
        if any(spec.name == "segments" for spec in prefill.inputs):
            prefill.expect(segments=[1, length])
        prefill.expect(logits=[1, m.vocab_size], key_window=window, value_window=window)
        decode.expect(embedding=[1, 1, m.hidden_size], position=[1, 1], logits=[1, m.vocab_size])
        state = {spec.name: spec for spec in prefill.outputs}
        tokens = ("embedding", "position", "embeddings", "positions", "kinds", "position_ids", "deepstack")
        takers = [decode]
        if bucket.compact:
            takers.append(self._graph(bucket.compact, "compact"))
        if bucket.extend:
            takers.append(extend := self._graph(bucket.extend, "extend"))
            chunk, rows = [1, bucket.chunk], [1, heads, bucket.chunk, m.head_dim]
            extend.expect(embeddings=[*chunk, m.hidden_size], kinds=chunk, logits=[1, m.vocab_size])
            extend.expect(new_key=rows, new_value=rows, **({} if m.mrope else {"positions": chunk}))
        turned = [(prefill, length), (self._graph(bucket.extend, "extend"), bucket.chunk)] if m.mrope else []
        for graph, count in turned:
            taps = {"deepstack": [m.deepstack, 1, count, m.hidden_size]} if m.deepstack else {}
            graph.expect(position_ids=[3, 1, count], **taps)
        for graph in takers:
            if strange := [s.name for s in graph.inputs if s.name not in tokens and state.get(s.name) != s]:
                raise ValueError(f"{graph.file} takes {strange[0]}, which {prefill.file} does not return in that form")
        if bucket.batched:
            many, count = self._graph(bucket.batched, "decode"), bucket.batch
            for own, single in ((many.inputs, decode.inputs), (many.outputs, decode.outputs)):
                if own != [replace(spec, shape=[count, *spec.shape[1:]]) for spec in single]:
                    raise ValueError(f"{many.file} is not {decode.file} for {count} rows")

    def _graph(self, name: str, kind: str) -> Graph:
        if name not in self.graphs or self.graphs[name].kind != kind:
            raise ValueError(f"no {kind} graph of the name {name!r}")
        return self.graphs[name]


def _check_heads(kv_heads: list[int]) -> None:
    if not kv_heads or min(kv_heads) < 1:
        raise ValueError(f"every layer needs at least one KV head, got {kv_heads}")


def _is_inside(name: str) -> bool:
    """Whether a manifest's file name is a relative path that stays in the folder, on every system."""
    path = PurePosixPath(name)
    strange = any(c in name for c in "\\:\0")  # separators and drives of other systems
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not strange
