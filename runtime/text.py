"""Tokens in, text out: as soon as it is certain, and never a half character or a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"  # what a tokenizer makes of bytes that are no character, or not yet
HELD = 8  # tokens that may wait for a character's last byte: it has four at most, so longer garbage is given as it is


class Detokenizer:
    """Text of tokens that come one by one; joined, what the tokenizer makes of all of them at once.

    A tokenizer's decoder looks at neighbours (spaces, bytes of one character), so that the tokens of the piece before
    are decoded again with the new ones. `tokenizers.decoders.DecodeStream` works alike, but after bytes that are no
    UTF-8 it only raises, and it keeps an unfinished character to itself at the end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._silent = {token for token, its in added.items() if its.special}
        self._tokens: list[int] = []  # of the last piece, then the new ones
        self._before, self._given = "", 0  # text of the last piece, and its tokens

    def add(self, token: int) -> str:
        """The text that is certain now, "" if there is none."""
        if token in self._silent or self._tokenizer.id_to_token(token) is None:
            return ""
        self._tokens.append(token)
        text = self._decode()
        waits = text.endswith(BROKEN) and len(self._tokens) - self._given < HELD
        return "" if waits or len(text) <= len(self._before) else self._give(text)

    def end(self) -> str:
        """What still waited for its rest."""
        return self._give(self._decode())

    def _give(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._tokens = self._tokens[self._given :]
        self._before, self._given = self._decode(), len(self._tokens)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)


class StopStrings:
    """Lets text through up to the stop string that is complete first; of those that end together, the longest.

    Attributes:
        found: whether there was one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self.found = stop, "", False

    def add(self, piece: str) -> str:
        """What of the text so far belongs to the answer for certain and was not returned yet."""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        longest = max(map(len, self._stop), default=1) - 1
        starts = range(max(len(text) - longest, 0), len(text))
        edge = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self._stop)), len(text))
        self._held = text[edge:]
        return text[:edge]

    def end(self) -> str:
        """The beginning of a stop string that did not become one."""
        held, self._held = self._held, ""
        return held
