"""What a token of a prompt is: its kind, and the image or sentence that it belongs to. numpy only.

One statement for the runtime, for calibration and for the graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PADDING, TEXT, VISUAL = 0, 1, 2  # kinds of tokens
NO_TOKEN = -1  # id of the image token of a model that takes no images: no prompt has it
# Added to a kind where the KV state holds it: a text token begins a sentence; a token aligns text and image.
FIRST, ALIGNED = 4, 8

# The marks of Latin, CJK, Arabic, Indic, Armenian, Ethiopic, Khmer and Burmese script that end a sentence.
SENTENCE_ENDS = ".!?\u2026\u3002\uff0e\uff61\uff01\uff1f\u061f\u06d4\u0964\u0965\u0589\u1362\u17d4\u104a\u104b"
CLOSING = " \t\"')]\u201d\u2019\u00bb\uff09\u300d\u300f"  # what may stand between such a mark and the sentence's end


def sentence_ends(vocabulary: Iterable[str]) -> list[int]:
    """Ids of the tokens that end a sentence: with a newline in them, or a full stop, question or exclamation mark last.

    A rule for every script that needs no model: the point of "3.5" ends a sentence too, where it is a token of its own.

    Args:
        vocabulary: the text of every token, by id.
    """
    return [i for i, text in enumerate(vocabulary) if "\n" in text or text.rstrip(CLOSING).endswith((*SENTENCE_ENDS,))]


def segments(ids: Sequence[int] | np.ndarray, images: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Of a visual token the number of its image, of a text token the number of its sentence, both from 1; int32 [T].

    A sentence ends with a token of `ends`, and before an image. Several such tokens in a row (say "?" and a newline)
    end it once.

    Args:
        ids: of the T tokens.
        images: the number of a visual token's image, 0 for text, [T].
        ends: ids that end a sentence.
    """
    text, ending = images == 0, np.isin(ids, ends)
    after_text, after_end = (np.pad(which, (1, 0))[:-1] for which in (text, ending))
    begins = text & (~after_text | (after_end & ~ending))
    return np.where(text, np.cumsum(begins), images).astype(np.int32)


def marked(kinds: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """The kinds, `FIRST` added to the first token of every sentence, [T]."""
    text = kinds == TEXT
    same = np.pad(text, (1, 0))[:-1] & (segments == np.pad(segments, (1, 0))[:-1])
    return kinds + FIRST * (text & ~same)
