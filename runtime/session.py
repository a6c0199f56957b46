"""A chat: what was read stays in the compressed cache, and a turn reads only what is new.

>>> chat = Session(vlm)
>>> chat.ask("what color is the shape?", images=["shape.png"]).text
>>> chat.ask("and what shape is it?").text
>>> chat.save("chat.safetensors")

Sessions of one model share its weights; each has a state of its own, of one size however long the chat.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.config import parse, parse_json
from engines.errors import UserError
from runtime import tensors
from runtime.generate import MAX_NEW_TOKENS, Request, Result, Stats, TextStream, check_options, whole
from runtime.memory import Need, Reservation
from runtime.messages import messages_of
from runtime.model import VLM
from runtime.prompt import least_room
from runtime.sampling import GREEDY, Sampling, check_number
from runtime.state import Context, State

if TYPE_CHECKING:
    from runtime.messages import Prompt
    from runtime.preprocess import ImageSource
    from runtime.video import Shown, Video

FORMAT = "unicache-edge session 1"
MARK = "\ue000{}\ue001"  # with a number that makes it unique: stands around what a turn adds to a rendered chat
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Saved:
    """What a session's file holds beside the state's tensors.

    Attributes:
        bundle: the fingerprint of its bundle.
        bucket: S, of the state's shapes.
        count, compactions: of the state.
        position, begins, shift: of the context.
        messages: of the chat; the last one was read as far as the mark would stand, answers as they were given.
        unread: ids of the last answer that nobody has read yet.
        space: what stood before the mark and is read with what follows it.
    """

    bundle: str
    level: str
    bucket: int
    count: int
    compactions: int
    position: int
    begins: bool
    messages: list[Any]
    unread: list[int]
    space: str
    shift: int = 0


class Session:
    """One chat with an opened bundle, at the level that the opened one names for questions that come later.

    Not for several threads at once; different sessions are.

    Attributes:
        messages: said so far, as far as they were read; the answers as they were given. The model has read all of an
            answer's tokens: those of a stop string too, or end tokens with `ignore_eos`, which no text shows.
        context: what the model has read; None before the first turn.
    """

    def __init__(self, vlm: VLM, room: int | None = None) -> None:
        """
        Args:
            room: tokens of the chat that its memory should suit: it is that of the shortest bucket for so many. By
                default for the first turn, and the chat may be longer; at a level that never compacts, of the longest.
        """
        if room is not None:
            check_number("room", room, 1)
        self.vlm, self.level, self.reason = vlm, vlm.level_for(question_later=True), ""
        self._reserved: Reservation | None = None  # what of its state is not allocated yet
        self._forked = -1  # compactions of the state that it may share with another session
        if vlm.admission:
            self.level, self.reason, self._reserved = vlm.admission.session(room or 0)
        self.room = room or least_room(vlm.bundle.manifest.levels[self.level])
        self.messages: list[dict[str, Any]] = []
        self.context: Context | None = None
        self._unread: list[int] = []
        self._space = ""
        self._turn: TextStream | None = None
        self._answer: tuple[Result, int] | None = None  # of the turn, once its question was read: the result so far

    def ask(
        self,
        question: Prompt,
        images: Sequence[ImageSource | Video] = (),
        max_new_tokens: int = MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        sampling: Sampling = GREEDY,
    ) -> Result:
        """The whole answer; see `stream`."""
        text = self.stream(question, images, max_new_tokens, ignore_eos, sampling)
        for _ in text:
            pass
        return text.result

    def stream(
        self,
        question: Prompt,
        images: Sequence[ImageSource | Video] = (),
        max_new_tokens: int = MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        sampling: Sampling = GREEDY,
    ) -> TextStream:
        """Answer a turn piece by piece; an answer before it that was not read to its end ends where it is.

        Args:
            question: a text, or the turn's messages, with one `{"type": "image"}` for every image.

        The rest is as in `VLM.stream`. A repetition penalty counts the tokens of the turn.
        """
        check_options(images, max_new_tokens, sampling)
        self._settle()
        new, shown, stats = *self._new(question, images), self._stats()

        def keep(context: Context) -> None:
            self._keep(context, new)
            self._answer = answer, context.position

        request = self._request(self._text(new), images, shown, max_new_tokens, ignore_eos, sampling, stats, keep)
        self._turn = TextStream(self.vlm, request, stats)
        answer = self._turn.answer
        return self._turn

    def read(self, prompt: Prompt, images: Sequence[ImageSource | Video] = ()) -> Stats:
        """Read the beginning of a turn, say a system prompt and an image: `fork` the session and ask what follows."""
        check_options(images, 1, GREEDY)
        self._settle()
        new, shown, stats = *self._new(prompt, images), self._stats()
        text = self._text(new, begun=True)
        request = self._request(text.rstrip(), images, shown, 1, False, GREEDY, stats, lambda context: None)
        try:
            self._keep(whole(self.vlm.read(request, stats)), new, text[len(text.rstrip()) :])
        finally:
            request.release()
        return stats

    def fork(self) -> Session:
        """Another session that has read the same, and goes its own way."""
        self._settle()
        if self.context is None:
            return Session(self.vlm, self.room or None)
        twin, state = copy.copy(self), self.context.state
        if self.vlm.admission:  # also of the stores: they are shared until one of the two compacts
            twin._reserved = self.vlm.admission.hold(Need(frozenset(), state.nbytes))
        twin.messages, twin._unread = [*self.messages], [*self._unread]
        twin.context, twin._forked = self.context.copy(), state.compactions
        if twin._reserved:
            twin._reserved.allocated(state.own_bytes if self.context.bucket.compact else state.nbytes)
        return twin

    def save(self, path: str | Path) -> None:
        """Write the session to a file, whole or not at all.

        Raises:
            UserError: it has read nothing yet, or the file cannot be written.
        """
        self._settle()
        if (context := self.context) is None:
            raise UserError("the session has read nothing yet: there is nothing to save")
        saved = Saved(
            self.vlm.bundle.fingerprint, self.level, context.bucket.length, context.state.count,
            context.state.compactions, context.position, context.begins, self.messages, self._unread, self._space,
            context.shift,
        )  # fmt: skip
        metadata = {"format": FORMAT, "session": json.dumps(dataclasses.asdict(saved))}
        arrays = {name: np.asarray(array) for name, array in context.state.arrays.items()}
        tensors.write(Path(path), arrays | {"logits": context.logits}, metadata)

    @classmethod
    def load(cls, vlm: VLM, path: str | Path) -> Session:
        """The session that `save` wrote.

        Raises:
            UserError: the file is none, damaged, or of another bundle.
        """
        path = Path(path)
        session = cls(vlm)
        held = vlm.admission.file(path) if vlm.admission else None
        buckets = [bucket for level in vlm.bundle.manifest.levels.values() for bucket in level.buckets]
        most = max(sum(spec.nbytes for spec in vlm.bundle.manifest.graphs[b.prefill].outputs) for b in buckets)
        arrays, metadata = tensors.read(path, "session", most)
        if metadata.get("format") != FORMAT:
            raise UserError(f"{path}: no session of this version")
        saved = parse(Saved, parse_json(metadata.get("session", "").encode(), str(path)), str(path))
        if saved.bundle != vlm.bundle.fingerprint:
            raise UserError(f"{path}: made with another bundle than {vlm.bundle.path}: open that one")
        level = vlm.bundle.manifest.levels.get(saved.level)
        bucket = next((b for b in level.buckets if b.length == saved.bucket), None) if level else None
        if level is None or bucket is None:
            raise UserError(f"{path}: the bundle has no level {saved.level!r} with a bucket of {saved.bucket}")
        specs = vlm.bundle.manifest.graphs[bucket.prefill].outputs
        expected = {spec.name: (np.dtype(spec.dtype), tuple(spec.shape)) for spec in specs}
        if expected != {name: (array.dtype, array.shape) for name, array in arrays.items()}:
            raise UserError(f"{path}: its tensors are not those of level {saved.level}, bucket {bucket.length}")
        in_range = {
            "count": bucket.recent <= saved.count <= bucket.window,
            "compactions": saved.compactions >= 0,
            "position": 1 <= saved.position <= level.max_positions,
            "shift": -saved.position < saved.shift <= 0,
            "unread": all(isinstance(i, int) and 0 <= i < vlm.model.vocab_size for i in saved.unread),
            "messages": all(isinstance(message, Mapping) for message in saved.messages),
        }
        if wrong := [name for name, right in in_range.items() if not right]:
            raise UserError(f"{path}: {wrong[0]} is out of range")
        session.level, session._unread, session._space = saved.level, saved.unread, saved.space
        session.messages = messages_of(saved.messages, ())
        logits = arrays.pop("logits")
        state = State(vlm.place(arrays), bucket)
        state.count, state.compactions = saved.count, saved.compactions
        session.context = Context(state, bucket, logits, saved.position, saved.begins, saved.shift)
        if session._reserved and held:
            session._reserved.release()
            held.release()
        return session

    def _stats(self) -> Stats:
        stats = self.vlm.stats(self.level)
        stats.reason = self.reason
        return stats

    def _keep(self, context: Context, new: list[dict[str, Any]], space: str = "") -> None:
        """New messages were read."""
        self.context, self.messages, self._unread, self._space = context, self._joined(new), [], space
        if self._reserved and context.state.compactions != self._forked:  # all of its state is its own now
            self._reserved.release()

    def _new(self, question: Prompt, images: Sequence[ImageSource | Video]) -> tuple[list[dict[str, Any]], list[Shown]]:
        """A turn's messages, and what they show."""
        shown = self.vlm.pictures.shown(images)
        return messages_of(question, shown), shown

    def _request(
        self, text: str, images: Sequence[ImageSource | Video], shown: list[Shown], max_new_tokens: int,
        ignore_eos: bool, sampling: Sampling, stats: Stats, keep: Any,
    ) -> Request:  # fmt: skip
        """Find every mistake of the user's before the first graph runs."""
        vlm, context = self.vlm, self.context
        start, visual = context.position if context else 0, vlm.model.visual_ids
        said = [token for token in self._unread if token not in visual]  # no image would belong to it
        ids = [*said, *vlm.prompts.encode(text, shown, first=context is None)]
        if (positions := start + len(ids)) >= (most := vlm.bundle.manifest.levels[self.level].max_positions):
            raise UserError(f"with this turn the session has {positions} tokens, and the level only {most}: begin anew")
        request = Request(
            ids, shown, self.level, max_new_tokens, ignore_eos, False, sampling,
            keep=keep, context=context, start=start, room=self.room,
        )  # fmt: skip
        if vlm.admission:
            request = vlm.admission.turn(request, vlm.pictures.decoding(images, shown), self._reserved)
        with stats.time("images"):
            return dataclasses.replace(request, pixels=vlm.pictures.pixels(images, shown))

    def _settle(self) -> None:
        """Let the last answer end where it is, and put it into the chat."""
        if self._turn:
            self._turn.close()
            if not self._turn.answer.stats.stop_reason:
                raise UserError("another thread reads the last answer: let it end first")
        if self._answer and self.context:
            answer, start = self._answer
            self._unread = answer.tokens[self.context.position - start :]
            self.messages = [*self.messages, {"role": ASSISTANT, "content": answer.text}]
        self._turn = self._answer = None
        if self.context and not self.context.whole:
            raise UserError("reading the last turn broke off, and the session is lost: load a saved one, or begin anew")

    def _text(self, new: list[dict[str, Any]], begun: bool = False) -> str:
        """What the chat template makes of new messages, and of what stands around them, behind all that was read.

        Args:
            begun: without what follows the last of them: it may go on.
        """
        said = "".join(part.get("text", "") for each in [*self.messages, *new] for part in _parts(each))
        mark = next(mark for mark in map(MARK.format, itertools.count()) if mark not in said)
        messages = self._joined(new, mark) if self.context else new
        if begun:
            messages = [*messages[:-1], _longer(messages[-1], [_text(mark)])]
        parts = self.vlm.prompts.text(messages, ()).split(mark)
        behind = int(self.context is not None)
        if len(parts) != 1 + behind + begun:
            raise UserError("the model's chat template leaves out or repeats what it is given: ask all in one prompt")
        return self._space + parts[behind]

    def _joined(self, new: list[dict[str, Any]], mark: str = "") -> list[dict[str, Any]]:
        """The chat with new messages, the first of which may go on with the last; the mark where they begin."""
        if not self.messages:
            return new
        *before, last = self.messages
        first, *rest = new
        if last["role"] == ASSISTANT:
            return [*before, {**last, "content": mark} if mark else last, *new]
        if last["role"] != first["role"]:
            return [*before, _longer(last, [_text(mark)]) if mark else last, *new]
        parts = _parts(first)
        if mark and parts[0]["type"] == "text":
            parts = [_text(mark + parts[0]["text"]), *parts[1:]]
        elif mark:
            parts = [_text(mark), *parts]
        return [*before, _longer(last, parts), *rest]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return [_text(content)] if isinstance(content, str) else list(content)


def _longer(message: Mapping[str, Any], parts: list[Any]) -> dict[str, Any]:
    """The message with more parts; text stays text where it can, since templates differ in what they take."""
    content = message["content"]
    if isinstance(content, str) and len(parts) == 1 and parts[0]["type"] == "text":
        return {**message, "content": content + parts[0]["text"]}
    return {**message, "content": [*_parts(message), *parts]}
