"""The compressed vision-language model: images and a question in, text out.

    template, tokens -> vision (per image) -> prefill -> [extend ...] -> [decode, decode, ... compact, decode, ...]

All of a request's memory is its `State`; nothing is kept between requests but the loaded graphs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engines import bundle as bundles
from engines import ort, trt
from engines.backend import Session
from engines.bundle import Bucket, Bundle, Level
from engines.cuda import Array
from engines.errors import UserError
from engines.tokens import FIRST, TEXT, VISUAL, marked
from runtime import admit, backends
from runtime.gate import VisualGate
from runtime.generate import MAX_NEW_TOKENS, Request, Result, Stats, TextStream, check_options
from runtime.memory import Memory, parse_size
from runtime.monitor import Monitor
from runtime.pictures import Pictures
from runtime.prompt import (
    PromptReader,
    Rows,
    check_blocks,
    choose_bucket,
    embed,
    first_part,
    image_positions,
    lay_out,
    left_pad,
    question_inputs,
)
from runtime.sampling import GREEDY, Sampling, check_number
from runtime.state import Context, Read, State
from runtime.video import Clip

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from runtime.messages import Prompt
    from runtime.preprocess import ImageSource
    from runtime.video import Video


class VLM:
    """An opened bundle at one compression level. Graphs are loaded when first needed and kept.

    Attributes:
        backend, why: what runs it, and why that.
        pictures: what it makes of images.
        monitor: watches all answers and counts; set another one to change what follows an alarm.
        admission: keeps the memory budget, if there is one.
    """

    def __init__(
        self,
        bundle: Bundle,
        level: str | None = None,
        backend: str = "ort",
        threads: int | None = None,
        kernels: bool = True,
        memory: Memory | int | None = None,
    ):
        """
        Args:
            memory: budget in bytes, or that of another opened level, to share it.
        """
        manifest = bundle.manifest
        self.bundle, self.model = bundle, manifest.model
        self.level = manifest.default_level if level is None else level
        self.backend, self.threads, self.why = backend, threads, ""
        self._device = backends.device(backend)
        self._library = backends.library(backend, bundle) if kernels or backend != "ort" else None
        if not isinstance(self.level, str) or self.level not in manifest.levels:
            raise UserError(f"no level {self.level!r} in {bundle.path}: choose {', '.join(manifest.levels)}")
        self._table, self._sentence_ends = bundle.embedding(), frozenset(manifest.model.sentence_ends)
        self.prompts = PromptReader(bundle.path, self.model)
        self.pictures = Pictures(bundle)
        self._lines = {later: admit.line(manifest, self.level, later) for later in (False, True)}
        self.monitor = Monitor()
        if isinstance(memory, int):
            memory = admit.opened(bundle, memory, backend, threads, self._library)
        self.memory = memory
        self.admission = admit.Admission(bundle, memory, self._lines, self.level_for) if memory else None
        self._sessions: dict[str, Session] = memory.loaded if memory else {}
        self._loading = memory.loading if memory else threading.Lock()
        self._gates = {name: VisualGate(own, memory) for name, own in manifest.levels.items()}

    @classmethod
    def open(
        cls,
        path: str | Path,
        backend: str = trt.AUTO,
        level: str | None = None,
        threads: int | None = None,
        kernels: bool = True,
        memory_budget: str | int | None = None,
    ) -> VLM:
        """See `runtime.open`."""
        budget = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
        if budget is not None:
            check_number("memory_budget", budget, 1)
        if threads is not None:
            check_number("threads", threads, 1, ort.MAX_THREADS)
        bundle = bundles.read(path)
        choice = backends.choose(backend, bundle)
        vlm = cls(bundle, level, choice.name, threads, kernels, budget)
        vlm.why = choice.reason
        return vlm

    def generate(
        self,
        prompt: Prompt,
        images: Sequence[ImageSource | Video] = (),
        max_new_tokens: int = MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        question_later: bool = False,
        sampling: Sampling = GREEDY,
    ) -> Result:
        """The whole answer; see `stream`."""
        asked = prompt, images, max_new_tokens, ignore_eos, question_later, sampling
        for _ in (text := self.stream(*asked, on_restart=lambda: None)):
            pass
        return text.result

    def stream(
        self,
        prompt: Prompt,
        images: Sequence[ImageSource | Video] = (),
        max_new_tokens: int = MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        question_later: bool = False,
        sampling: Sampling = GREEDY,
        on_restart: Callable[[], object] | None = None,
    ) -> TextStream:
        """Answer piece by piece: an iterator of texts, whose `.result` is there at its end.

        Args:
            prompt: a question, or messages with one `{"type": "image"}` for every image and one `{"type": "video"}` for
                every video.
            images: paths, bytes of image files, PIL images or uint8 arrays [H, W, 3], and `runtime.Video`s, in the
                order of the placeholders.
            max_new_tokens: stop after so many.
            ignore_eos: go on after the end token.
            question_later: compress the images before the model has seen what follows them, as when an image is
                cached and asked about later, by the level that the opened one names for it.
            sampling: how tokens are chosen; by default the likeliest.
            on_restart: called when the monitor has the question answered anew, and all pieces so far are void. Without
                it, nothing that was given is taken back.

        Raises:
            UserError: at once, before anything is generated, whatever is wrong with the request.
        """
        check_options(images, max_new_tokens, sampling)
        if question_later and not images:
            raise UserError("question_later needs an image to compress before the question")
        own = self.level_for(question_later)
        stats = self.stats(own)
        shown = self.pictures.shown(images)
        ids = self.prompts.ids(prompt, shown)
        rest = max_new_tokens, ignore_eos, question_later, sampling
        request = Request(ids, shown, own, *rest, on_restart=on_restart)
        self._check_length(request, self.bundle.manifest.levels[own])
        request = self.lighter(request, self.monitor.lighter) or request
        if self.admission:
            others = [name for name in self._lines[question_later] if self._at(request, name)]
            request, stats.reason = self.admission.admit(request, self.pictures.decoding(images, shown), others)
        with stats.time("images"):
            request = replace(request, pixels=self.pictures.pixels(images, shown))
        return TextStream(self, request, stats)

    def level_for(self, question_later: bool) -> str:
        """The opened level, or what takes its place where the question comes later."""
        return (self.bundle.manifest.levels[self.level].unknown if question_later else None) or self.level

    def stats(self, level: str) -> Stats:
        """Of a new request."""
        return Stats(level, self.backend, kernels=self._library is not None)

    def lighter(self, request: Request, steps: int = 1) -> Request | None:
        """The same request up to so many levels lighter; None if none of them takes it, or might end it early."""
        if request.keep:  # a session stays at its level
            return None
        line, own = self._lines[request.question_later], self.level_for(request.question_later)
        above = line.index(request.level) + 1
        for name in reversed(line[above : above + steps]):
            if at := self._at(request, name):
                return replace(at, lightened=line.index(name) - line.index(own))
        return None

    def _at(self, request: Request, name: str) -> Request | None:
        """The request at another level; None if that does not take it, or might end it early."""
        with contextlib.suppress(UserError):
            level = self.bundle.manifest.levels[name]
            self._check_length(request, level)
            asked = self._after_images(request.ids) if request.question_later else []
            tokens = request.text + sum(view.tokens for view in level.seen(request.layouts))
            behind = max(len(asked), tokens - max(bucket.length for bucket in level.buckets))
            decoded = behind + request.max_new_tokens - 1
            if all(bucket.compact or decoded <= bucket.window - bucket.recent for bucket in level.buckets):
                return replace(request, level=name)
        return None

    def _check_length(self, request: Request, level: Level) -> None:
        """Refuse a prompt that is too long for the level."""
        if len(request.ids) >= level.max_positions:
            most = f"this level has only {level.max_positions} positions: give fewer images or words"
            raise UserError(f"the prompt has {len(request.ids)} tokens, and {most}")
        tokens = request.text + sum(view.least for view in level.seen(request.layouts))
        bucket = choose_bucket(tokens, request.text, level)
        check_blocks([TEXT] * (tokens - bucket.length), self.model.block)

    def read(self, request: Request, stats: Stats) -> Generator[None, None, Context]:
        """Read the whole prompt: by prefill what its bucket holds, or (`question_later`) the images; then the rest.

        What comes in a session later is all read behind what it has read. Where it yields, others may have a turn.
        """
        rows, visual = yield from self._look(request, stats)
        stats.prompt_tokens = rows.total
        context, split = (request.context, 0) if request.context else self._begin(request, rows, visual, stats)
        stats.bucket, state = context.bucket.length, context.state
        check_blocks(rows.kinds[split:], self.model.block)
        if not context.bucket.compact and (behind := len(rows) - split) > state.free:
            advice = "begin a new session" if request.keep else "ask with the image (without question_later)"
            free = f"{state.free} of them free, which this level never compacts"
            what = f"{behind} more tokens do not fit into the window of {state.window} tokens, {free}"
            raise UserError(f"{what}: {advice}, or choose a level that compacts")
        context.whole = False
        yield from self._extend(context, rows, visual, split, request, stats)
        context.whole, context.position, context.begins, context.shift = True, rows.total, True, rows.shift
        if request.pixels and not request.context and (held := state.holders(rows.positions, rows.total)) is not None:
            tokens = [layout.tokens for layout in request.layouts]
            places = image_positions(request.ids, tokens, self.model.visual_ids)
            stats.patches = [held[own].round(4).tolist() for own in places]
        return context

    def _begin(self, request: Request, rows: Rows, visual: np.ndarray, stats: Stats) -> tuple[Context, int]:
        """Prefill the first rows, and how many they are."""
        level, text = self.bundle.manifest.levels[request.level], int(np.count_nonzero(rows.kinds == TEXT))
        bucket = choose_bucket(len(rows), text, level, request.room)
        first = first_part(rows, bucket)
        split = min(rows.after_images, first) if request.question_later else first
        state, logits = self._prefill(rows[:split], visual, bucket, stats)
        return Context(state, bucket, logits, rows.total), split

    def advance(self, context: Context, token: int, request: Request, stats: Stats) -> Generator[Read, None, str]:
        """Let a batch or else the model read a token -> why it cannot, or "" and its logits are in the context."""
        if context.position == self.bundle.manifest.levels[request.level].max_positions:
            return "max_positions"
        if not self._room(context.state, context.bucket, stats):
            return "window_full"
        ends = token in self._sentence_ends
        kind, alone = TEXT + FIRST * (context.begins and not ends), request.keep is not None
        yield (read := Read(context, self._table[token], context.position, kind, stats, alone))
        if request.cancelled.is_set():
            return "cancelled"
        if not read.done:
            with stats.time("decode"):
                self._decode(context, read.embedding, read.position, kind, read.position + context.shift)
            stats.provider = self._sessions[context.bucket.decode].provider  # it may be a CUDA graph by now
        context.position, context.begins = context.position + 1, ends
        return ""

    def place(self, arrays: dict[str, np.ndarray]) -> Mapping[str, Array]:
        """A state's arrays where the graphs take them without a copy in each call."""
        return self._device.place(arrays) if self._device else arrays

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer

    def _look(self, request: Request, stats: Stats) -> Generator[None, None, tuple[Rows, np.ndarray]]:
        """The prompt's rows, and of the visual ones embeddings and deepstack, [1 + taps, V, d]."""
        seen, visual, kept, layouts = list[dict[str, np.ndarray]](), [], [], request.layouts
        for pixels, view in zip(request.pixels, self.bundle.manifest.levels[request.level].seen(layouts), strict=True):
            if seen:
                yield
            vision = self.session(view.vision, stats)
            with stats.time("vision"):
                seen.append(vision.run({"pixel_values": pixels} | self._question(request, vision)))
        counts = self._gates[request.level].counts(seen, layouts, request.text)
        for out, count in zip(seen, counts, strict=True):
            first = out["order"][0] < count if "order" in out else slice(None)
            taps: list[np.ndarray] = [*out["deepstack"][:, first]] if self.model.deepstack else []
            visual.append(np.stack([out["visual_tokens"][0, first], *taps]))
            kept.append(out["kept"][0, first])
        m, begun = self.model, (request.start, request.context.shift if request.context else 0)
        tokens, grids = [layout.tokens for layout in layouts], [each.grid for each in request.shown]
        seconds = [each.seconds if isinstance(each, Clip) else 1.0 for each in request.shown]
        rows = lay_out(request.ids, kept, tokens, m.visual_ids, m.sentence_ends, *begun, m.mrope, grids, seconds)
        stats.images, stats.visual_tokens, stats.visual_tokens_by_image = len(visual), sum(counts), counts
        stats.layouts = [layout.name for layout in layouts]
        none = np.empty((1 + m.deepstack, 0, m.hidden_size), np.float32)
        return rows, np.concatenate([none, *visual], axis=1)

    def _after_images(self, ids: list[int]) -> list[int]:
        return ids[max(index for index, token in enumerate(ids, 1) if token in self.model.visual_ids) :]

    def _question(self, request: Request, vision: Session) -> dict[str, np.ndarray]:
        """The text after the last image, for a vision graph that chooses by it; no text if it is to come later."""
        if "question" not in vision.inputs:
            return {}
        ids = [] if request.question_later else self._after_images(request.ids)
        return question_inputs(ids, self._table, vision.inputs["question"][1][1])

    def _prefill(self, rows: Rows, visual: np.ndarray, bucket: Bucket, stats: Stats) -> tuple[State, np.ndarray]:
        """Run the prompt at once -> the compressed state and the last token's logits [1, V]."""
        prefill = self.session(bucket.prefill, stats)
        self.session(bucket.decode, stats)  # loaded here, so that its time is not the first token's
        stats.provider = prefill.provider
        with stats.time("prefill"):
            feeds = left_pad(embed(rows, self._table, visual), rows, bucket.length)
            outputs = prefill.run({name: feeds[name] for name in prefill.inputs})
        return State(outputs, bucket), outputs["logits"]

    def _extend(
        self, context: Context, rows: Rows, visual: np.ndarray, start: int, request: Request, stats: Stats
    ) -> Generator[None, None, None]:
        """Read the rows from `start` on; the window is compacted whenever it is full, as it is between two tokens.

        Several at once cost what a whole chunk costs. It pays from a quarter of one on (demo model, one thread: chunks
        of 3, 9 and 64 tokens take as long as 1, 2 and 17 decoded ones).
        """
        state, bucket, kinds = context.state, context.bucket, marked(rows.kinds, rows.segments)
        self.session(bucket.decode, stats)
        if start == 0 and len(rows) and kinds[0] != VISUAL:  # not the first of a prompt
            kinds[0] = TEXT + FIRST * (context.begins and rows.ids[0] not in self._sentence_ends)
        while start < len(rows) and (request.keep or not request.cancelled.is_set()):  # a session is left whole
            yield
            self._room(state, bucket, stats)
            count = min(bucket.chunk, state.free, len(rows) - start)
            few = not bucket.extend or count == 1 or 4 * count < bucket.chunk
            if few := few and not (self.model.mrope and rows.kinds[start] == VISUAL):  # decode takes one position id
                count = 1
            part = slice(start, start + count)
            embeddings = embed(rows[part], self._table, visual)
            with stats.time("extend"):
                if few:
                    at, position_id = rows.positions[start], rows.position_ids[0, start]
                    self._decode(context, embeddings[0, 0], at, kinds[start], position_id)
                else:
                    feeds = left_pad(embeddings, rows[part], bucket.chunk)
                    self._step(context, self.session(bucket.extend, stats), feeds, rows.positions[part], kinds[part])
            start += count

    def _decode(self, context: Context, embedding: np.ndarray, position: int, kind: int, position_id: int) -> None:
        """Read one token; its embedding is [d]."""
        token = {
            "embedding": np.asarray(embedding, np.float32).reshape(1, 1, -1),
            "position": np.array([[position_id]], np.int32),
        }
        self._step(context, self._sessions[context.bucket.decode], token, np.array([position]), np.array([kind]))

    def _step(
        self, context: Context, graph: Session, tokens: dict[str, np.ndarray], positions: np.ndarray, kinds: np.ndarray
    ) -> None:
        """Run decode or extend: what follows is in the context's logits, the tokens' keys and values in its window."""
        state = context.state
        outputs = graph.run({name: tokens[name] if name in tokens else state.arrays[name] for name in graph.inputs})
        state.write(outputs, positions, kinds)
        context.logits = outputs["logits"]

    def _room(self, state: State, bucket: Bucket, stats: Stats) -> bool:
        """Whether the window has a free slot, after it was compacted if it had none."""
        if state.full and bucket.compact:
            compact = self.session(bucket.compact, stats)
            with stats.time("compact"):
                state.compacted(compact.run(state.feeds(list(compact.inputs))))
        return not state.full

    def session(self, graph: str, stats: Stats) -> Session:
        """A graph, loaded now if it was not yet."""
        if graph not in self._sessions:
            with self._loading, stats.time("load"):
                if graph not in self._sessions:  # no other thread was quicker
                    # A budget needs what a run has allocated given back; ONNX Runtime's arena would keep it.
                    options = self.threads, self._library, self.backend, self.memory is None
                    self._sessions[graph] = backends.load(self.bundle, graph, *options)
        if self.memory:
            self.memory.use(graph)
        return self._sessions[graph]
