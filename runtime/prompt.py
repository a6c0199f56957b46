"""Messages -> token ids -> the rows of a prefill: template, images expanded, tokenizer, padded on the left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engines.bundle import Bucket, Level, Model, rebuild
from engines.config import read_json
from engines.errors import UserError, one_line
from engines.mrope import MRope
from engines.tokens import PADDING, TEXT, VISUAL, segments
from engines.weights import Table
from runtime.messages import kinds_of, messages_of, plain
from runtime.template import Template
from runtime.video import Clip, Shown, flat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from runtime.messages import Prompt


@dataclass(frozen=True)
class Rows:
    """A prompt of T rows, one a token that the model sees; an image has as many as were kept of it.

    Attributes:
        ids: token ids, int64 [T]; the image token's id in a visual row.
        positions: int32 [T], counted in the prompt before pruning.
        kinds: TEXT or VISUAL, int32 [T].
        segments: number of the row's image or sentence, int32 [T].
        visual: number of a visual row among those of the prompt, int64 [T]; what it is of text is for nobody.
        position_ids: what RoPE takes: three of M-RoPE, else the position three times, int32 [3, T].
        total: P, tokens of the prompt before pruning.
        shift: what the position id of the token after the prompt is more than P.
    """

    ids: np.ndarray
    positions: np.ndarray
    kinds: np.ndarray
    segments: np.ndarray
    visual: np.ndarray
    position_ids: np.ndarray
    total: int
    shift: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Rows:
        ids, positions, kinds, segments = self.ids[part], self.positions[part], self.kinds[part], self.segments[part]
        visual, position_ids = self.visual[part], self.position_ids[:, part]
        return Rows(ids, positions, kinds, segments, visual, position_ids, self.total, self.shift)

    @property
    def after_images(self) -> int:
        """Index of the first row after the last image."""
        return int(np.flatnonzero(self.kinds == VISUAL)[-1]) + 1


def lay_out(
    ids: Sequence[int],
    kept: Sequence[np.ndarray],
    tokens: Sequence[int],
    visual_ids: int | Sequence[int],
    sentence_ends: Sequence[int] = (),
    start: int = 0,
    shift: int = 0,
    mrope: MRope | None = None,
    grids: Sequence[Sequence[int]] = (),
    seconds: Sequence[float] | None = None,
) -> Rows:
    """The prompt's rows, without the visual tokens that were dropped.

    Args:
        ids: token ids with one image token for every visual one; an image's need not lie side by side.
        kept: of each image, or picture of a video, the ascending indices of its kept tokens, [K].
        tokens: of each of them, N, how many it has.
        visual_ids: ids of their tokens.
        sentence_ends: ids of text that end a sentence.
        start: position of the first token.
        shift: what the position id of the first token is more than its position.
        mrope: how position ids are counted; None: a token has one, its position.
        grids: of each image's and each video's patches, [t, h, w], for M-RoPE.
        seconds: that each of them shows by one of its t, 1 unless given.
    """
    table = np.asarray(ids, np.int64)
    visual = np.isin(table, visual_ids)
    stays = ~visual
    numbers = np.zeros(len(table), np.int64)
    numbers[visual] = np.repeat(np.arange(1, len(tokens) + 1), tokens)
    for places, own in zip(image_positions(ids, tokens, visual_ids), kept, strict=True):
        stays[places[own]] = True
    total, first = start + len(table), start + shift
    whole = np.tile(np.arange(start, total, dtype=np.int32), (3, 1))
    if mrope:
        whole = mrope.position_ids(visual, grids, first, seconds)
    rows, numbers = table[stays], numbers[stays]
    kinds = np.where(numbers > 0, VISUAL, TEXT).astype(np.int32)
    positions = (start + np.flatnonzero(stays)).astype(np.int32)
    own, after = segments(rows, numbers, sentence_ends), int(whole.max(initial=first - 1)) + 1
    return Rows(rows, positions, kinds, own, np.cumsum(numbers > 0) - 1, whole[:, stays], total, after - total)


def image_positions(ids: Sequence[int], tokens: Sequence[int], visual_ids: int | Sequence[int]) -> list[np.ndarray]:
    """Of each image, with so many tokens, where they are in the prompt before pruning, [N]."""
    return np.split(np.flatnonzero(np.isin(np.asarray(ids, np.int64), visual_ids)), np.cumsum(tokens))[: len(tokens)]


def choose_bucket(tokens: int, text: int, level: Level, room: int = 0) -> Bucket:
    """The shortest bucket that holds a prompt of `tokens` rows, `text` of them text; else the longest, which goes on.

    What does not fit into it is read behind it, through its window: however much, if that is compacted.

    Args:
        room: no bucket is taken that is shorter, but the longest.

    Raises:
        UserError: it is not, and the prompt is longer than bucket and window, or has more text than can be kept of it.
    """
    buckets = sorted(level.buckets, key=lambda bucket: bucket.length)
    for bucket in buckets:
        holds = max(tokens, min(room, buckets[-1].length)) <= bucket.length
        if holds and (bucket.shortened is None or bucket.shortened.fits(tokens, text)):
            return bucket
    longest = buckets[-1]
    short, free = longest.shortened, longest.window - longest.recent
    if longest.compact or tokens <= (short.tokens if short else longest.length) + free:
        return longest
    if short and tokens <= longest.length:
        raise UserError(
            f"the prompt has {text} text tokens, and this level, which shortens prompts inside the model, has room for "
            f"{short.text}: give fewer words, choose a level that does not shorten, or rebuild with more of  --buckets"
        )
    raise UserError(
        f"the prompt has {tokens} tokens ({tokens - text} of images), more than the longest bucket's {longest.length} "
        f"and the {free} that a window takes which is never compacted: give fewer images or words, choose a level that "
        f"compacts, or rebuild with  --buckets {tokens}"
    )


def least_room(level: Level) -> int:
    """Tokens that a session leaves room for, unless told: where nothing is ever compacted, as many as there are."""
    return 0 if all(bucket.compact for bucket in level.buckets) else max(bucket.length for bucket in level.buckets)


def first_part(rows: Rows, bucket: Bucket) -> int:
    """How many of a prompt's rows the bucket's prefill reads: all, or as many of the first as fit."""
    most = min(len(rows), bucket.length)
    if (short := bucket.shortened) is None:
        return most
    text = np.cumsum(rows.kinds == TEXT)
    return max(n for n in range(1, most + 1) if short.fits(n, int(text[n - 1])))


def check_blocks(behind: Sequence[int] | np.ndarray, block: str | None) -> None:
    """Refuse what the model looks at in both directions, where not all of it is read by one prefill.

    Args:
        behind: kinds of the tokens that are read later.
        block: as in the manifest's model.
    """
    if block == "prompt" and len(behind):
        raise UserError(
            f"this model looks at a prompt in both directions, and {len(behind)} of its tokens would be read after the "
            "others: ask all in one prompt, not in a session's later turn or with question_later, and in no more "
            "tokens than the longest bucket has (rebuild with  --buckets)"
        )
    if block == "image" and VISUAL in behind:
        raise UserError(
            "this model looks at an image in both directions, and a part of one would be read after the rest of the "
            "prompt: give images in the first turn of a session only, and fewer of them or fewer words before them "
            "(or rebuild with longer  --buckets)"
        )


def embed(rows: Rows, table: np.ndarray | Table, visual: np.ndarray) -> np.ndarray:
    """Embeddings of the rows, and what is added to visual ones behind the first layers, [1 + taps, T, d].

    Args:
        table: of text, [vocab_size, d].
        visual: the same of the prompt's visual rows, [1 + taps, V, d].
    """
    embeddings, text = np.zeros((len(visual), len(rows), visual.shape[2]), np.float32), rows.kinds == TEXT
    embeddings[0, text], embeddings[:, ~text] = table[rows.ids[text]], visual[:, rows.visual[~text]]
    return embeddings


def left_pad(embeddings: np.ndarray, rows: Rows, length: int) -> dict[str, np.ndarray]:
    """What a prefill graph may take, S rows of each.

    Args:
        embeddings: [1 + taps, T, d], the rows' embeddings, and what is added behind the first layers.
        rows: the T rows.
        length: S; the first S - T rows are padding.
    """
    padding = length - len(rows)
    return {
        "embeddings": np.pad(embeddings[:1], [(0, 0), (padding, 0), (0, 0)]),
        "deepstack": np.pad(embeddings[1:], [(0, 0), (padding, 0), (0, 0)])[:, None],
        "position_ids": np.pad(rows.position_ids, [(0, 0), (padding, 0)])[:, None],
        "positions": np.pad(rows.positions, (padding, 0))[None],
        "kinds": np.pad(rows.kinds, (padding, 0), constant_values=PADDING)[None],
        "segments": np.pad(rows.segments, (padding, 0))[None],
    }


def question_inputs(ids: Sequence[int], table: np.ndarray | Table, length: int) -> dict[str, np.ndarray]:
    """What a vision graph takes that chooses by the question: `question` [1, Q, d] and `asked` [1, Q].

    Args:
        ids: token ids of the question, of which the last Q count; none if it is not known yet.
        table: embedding table, [vocab_size, d].
        length: Q; a shorter question is padded on the left, where `asked` is 0.
    """
    rows = table[np.asarray(ids[-length:], np.int64)].astype(np.float32)
    padding = length - len(rows)
    asked = np.pad(np.ones(len(rows), np.float32), (padding, 0))
    return {"question": np.pad(rows, [(padding, 0), (0, 0)])[None], "asked": asked[None]}


class PromptReader:
    """Chat template and tokenizer of a bundle."""

    def __init__(self, folder: Path, model: Model) -> None:
        """Read `chat_template.jinja`, `tokenizer.json` and `prompt.json`.

        Raises:
            UserError: one of them is missing or not what it should be.
        """
        from tokenizers import Tokenizer

        self._model = model
        settings = read_json(folder / "prompt.json")
        if not isinstance(settings, dict) or not isinstance(settings.get("add_special_tokens"), bool):
            raise UserError(f"{folder / 'prompt.json'}: needs add_special_tokens (true or false)")
        self._add_special_tokens: bool = settings.pop("add_special_tokens")
        self._variables = {name: value for name, value in settings.items() if value is not None}
        try:
            self._template = Template((template := folder / "chat_template.jinja").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{template}: not a chat template: {one_line(error)}") from error
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises a bare Exception
            raise UserError(f"{folder / 'tokenizer.json'}: not a tokenizer: {one_line(error)}") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        for layout in model.layouts:
            ids = self.tokenizer.encode(layout.text, add_special_tokens=False).ids
            if (found := ids.count(model.image_token_id)) != layout.tokens:
                raise UserError(
                    f"{folder}: the text of layout {layout.name} has {found} image tokens, not {layout.tokens}: its "
                    "tokenizer and its manifest are not of one build: " + rebuild(folder)
                )

    def text(self, prompt: Prompt, shown: Sequence[Shown]) -> str:
        """Render the chat template; a plain string is one user message, what it shows first, then the text.

        Raises:
            UserError: the question is empty, the messages have no known form, or the template refuses them.
        """
        messages = messages_of(prompt, shown)
        if not self._model.layouts and (shown or any(kinds_of(message) - {"text"} for message in messages)):
            raise UserError(f"{self._model.model_type} takes no images: ask it without")
        if not self._model.video and any("video" in kinds_of(message) for message in messages):
            raise UserError("the messages have a video, but none was given")
        try:
            if not self._model.layouts:
                messages = [{**message, "content": plain(message["content"])} for message in messages]
            absent = {"tools": None, "documents": None}  # Hugging Face defines them, and templates ask whether it did
            return self._template.render(messages=messages, add_generation_prompt=True, **absent, **self._variables)
        except Exception as error:  # a template is a program of the checkpoint's: it can fail in any way
            raise UserError(f"the model's chat template refuses these messages: {one_line(error)}") from error

    def ids(self, prompt: Prompt, shown: Sequence[Shown]) -> list[int]:
        """Token ids of the whole prompt, with every token of its images and videos.

        Raises:
            UserError: what `text` and `encode` raise.
        """
        return self.encode(self.text(prompt, shown), shown)

    def encode(self, text: str, shown: Sequence[Shown], first: bool = True) -> list[int]:
        """Token ids of a text that the template has rendered, where the texts of what is shown take its placeholders.

        Args:
            shown: its images and videos, in their order.
            first: whether it begins a prompt: there the tokenizer may add tokens of its own.

        Raises:
            UserError: it has not one placeholder for each of them, or visual tokens besides.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 arrive as lone surrogates
            raise UserError(f"the question is not valid Unicode text: {one_line(error)}") from error
        model, video = self._model, self._model.video
        shown = flat(shown)
        known = {"image": model.placeholder, "video": video.placeholder if video else ""}
        marks = "|".join(f"(?P<{kind}>{re.escape(mark)})" for kind, mark in known.items() if mark)
        found = [*re.finditer(marks, text)] if marks else []
        places = [str(match.lastgroup) for match in found]
        given = ["video" if isinstance(each, Clip) else "image" for each in shown]
        for kind in known:
            if (there := places.count(kind)) != (count := given.count(kind)):
                raise UserError(
                    f"the messages have {there} {kind} placeholder{'s' * (there != 1)}, but {count} "
                    f"{kind}{'s were' if count != 1 else ' was'} given"
                    + f": {known[kind]!r}, the model's own, counts in a text, too"
                    * (there > count)
                )
        if places != given:
            raise UserError(f"the messages have {', '.join(places)}, and given were {', '.join(given)}: reorder them")
        ends = [0, *(end for match in found for end in match.span()), len(text)]
        between = [text[begin:end] for begin, end in zip(ends[::2], ends[1::2], strict=True)]
        whole = between[0] + "".join(each.text + part for each, part in zip(shown, between[1:], strict=True))
        ids: list[int] = self.tokenizer.encode(whole, add_special_tokens=first and self._add_special_tokens).ids
        if sum(map(ids.count, model.visual_ids)) != sum(each.tokens for each in shown):
            tokens = " or ".join(repr(self.tokenizer.id_to_token(token)) for token in model.visual_ids)
            raise UserError(f"the messages have {tokens} in a text, which stands for a part of an image only")
        if ids and max(ids) >= model.vocab_size:
            raise UserError(f"token {max(ids)} is outside the model's vocabulary of {model.vocab_size}")
        return ids
