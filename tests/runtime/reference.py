"""What the runtime must do with the toy bundle, told with lists: the judge, which shares no code with the runtime.

A slot is a token (or None: padding); a slot's masses are the attention it has received, per layer and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.runtime.toy import ADAPTIVE, END, IMAGE, LEVELS, PREPROCESSOR, WORDS
from tests.runtime.toy import SENTENCE_ENDS as ENDS
from tests.runtime.toy_graphs import HEAD_DIM, HEADS, KV_HEADS, LAYERS, WEIGHTS


@dataclass
class Slot:
    row: np.ndarray  # [d]
    position: int
    kind: int  # 1 text, 2 visual; as decoded 5 if it begins a sentence
    mass: list[np.ndarray] = field(default_factory=lambda: [np.zeros(heads) for heads in KV_HEADS])


@dataclass
class Answer:
    tokens: list[int]
    logits: list[np.ndarray]
    decoded: list[int]  # positions that went through decode
    kept: list[list[int]]
    stop: str = ""
    compacted_at: list[int] = field(default_factory=list)  # decode steps before which the window was compacted
    full: list[list[int]] = field(default_factory=list)  # kinds of the windows that were compacted
    window: list[Slot | None] = field(default_factory=list)
    stores: list[list[Slot | None]] = field(default_factory=list)


# What stands for an image in the prompt, by its width: a wide one's patches have words around them.
LEFT, RIGHT, BIG = (WORDS.index(word) for word in ("left", "right", "big"))
SPREAD = {8: [IMAGE] * 4, 16: [LEFT, *[IMAGE] * 3, RIGHT, *[IMAGE] * 5, BIG]}


def patches_of(image: np.ndarray) -> np.ndarray:
    """uint8 [8, 8, 3] -> [4, 3], or [8, 16, 3] -> [8, 3]."""
    x = (image / 255 - np.array(PREPROCESSOR.mean)) / np.array(PREPROCESSOR.std)
    return np.stack([x[r : r + 4, c : c + 4].mean((0, 1)) for r in (0, 4) for c in range(0, image.shape[1], 4)])


def look(image: np.ndarray, kept: int) -> tuple[np.ndarray, list[int]]:
    """The rows of the brightest patches, and their places."""
    patches = patches_of(image)
    best = sorted(np.argsort(-patches.sum(1))[:kept].tolist())
    return patches[best] @ WEIGHTS["vision"], best


def covers(image: np.ndarray, count: int) -> float:
    """What the vision graph says of the brightest `count` patches."""
    light = sorted(1 / (1 + np.exp(-patches_of(image).sum(1))), reverse=True)
    return sum(light[:count]) / sum(light)


def counts(level: str, images: list[np.ndarray], text: int, pressure: float) -> list[int]:
    """Patches that each image keeps."""
    sizes = [len(patches_of(image)) for image in images]
    if level not in ADAPTIVE:
        return [LEVELS[level][0] * size // 4 for size in sizes]
    a = ADAPTIVE[level]
    wanted = []
    for image, size in zip(images, sizes, strict=True):
        drop, offers = 1.0, [n * size // 4 for n in a.counts]
        if a.gate:
            entropy = 1 / (1 + np.exp(-patches_of(image).sum(1).mean()))
            drop = min(max(a.gate.base * (0.5 + pressure) * (1.5 - entropy), 0.2), 0.7)
        if a.fallback:
            hard = np.log(sum(sizes)) + np.log(text)  # of 1.0 to 5.0
            drop = min(drop, 0.75 - 0.35 * min(max((hard - 1) / 4, 0), 1))
        if a.gate or a.fallback:
            count = next(n for n in offers if n / size >= 1 - drop)
        else:
            count = next((n for n in offers if covers(image, n) >= a.coverage), size)
        wanted.append(count)
    if not a.quota:
        return wanted
    total = min(round(a.quota * sum(sizes)), 40 - text)
    got = [a.floor * size // 4 for size in sizes]
    while sum(got) + 1 <= total and got != wanted:
        poor = [i for i in range(len(images)) if got[i] < wanted[i]]
        got[min(poor, key=lambda i: (covers(images[i], got[i]), i))] += 1
    return got


def attend(query_row: np.ndarray, layer: int, slots: list[Slot | None]) -> np.ndarray:
    """One query over the slots; adds to their masses. Returns [d]."""
    filled = [slot for slot in slots if slot is not None]
    out = []
    for head in range(HEADS):
        part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        shared = head * KV_HEADS[layer] // HEADS  # the KV head of this query head
        its = slice(shared * HEAD_DIM, (shared + 1) * HEAD_DIM)
        query = query_row @ WEIGHTS["query"][layer][:, part]
        keys = np.stack([slot.row @ WEIGHTS["key"][layer][:, its] for slot in filled])
        values = np.stack([slot.row @ WEIGHTS["value"][layer][:, its] for slot in filled])
        weights = np.exp(keys @ query / np.sqrt(HEAD_DIM))
        weights /= weights.sum()
        for slot, weight in zip(filled, weights, strict=True):
            slot.mass[layer][shared] += weight * KV_HEADS[layer] / HEADS
        out.append(weights @ values)
    return np.concatenate(out)


def forward(row: np.ndarray, stores: list[list[Slot | None]], window: list[Slot | None]) -> np.ndarray:
    mixed = [attend(row, layer, stores[layer] + window) @ WEIGHTS["output"][layer] for layer in range(LAYERS)]
    return row @ WEIGHTS["skip"] + sum(mixed)


def answer(
    ids: list[int],
    images: list[np.ndarray],
    level: str,
    steps: int,
    ignore_eos: bool = False,
    question_later: bool = False,
    pressure: float = 0.0,
    answered: list[int] | None = None,
) -> Answer:
    """Generate from token ids with one placeholder an image; a session's hold answers, which begin at `answered`.

    Of these, the ids before the first answer are prefilled.
    """
    _, compacts, sizes = LEVELS["tight" if level in ADAPTIVE else level]
    words = len(ids) - len(images) + sum(token != IMAGE for image in images for token in SPREAD[image.shape[1]])
    keep = counts(level, images, words, pressure)

    def row(embedding: np.ndarray, position: int, kind: int, first: bool = False) -> Slot:
        return Slot(embedding + WEIGHTS["position"][position] + WEIGHTS["kind"][kind], position, kind + 4 * first)

    prompt: list[Slot] = []
    segments, position, last_visual, kept, remaining = [], 0, 0, [], list(images)
    sentence, before = 0, IMAGE
    begun = 0
    for i, placeholder in enumerate(ids):
        begun = len(prompt) if answered and i == answered[0] else begun
        spread, seen = [placeholder], dict[int, np.ndarray]()
        if placeholder == IMAGE:
            image = remaining.pop(0)
            rows, places = look(image, keep.pop(0))
            kept.append(places)
            spread, seen = SPREAD[image.shape[1]], dict(zip(places, rows, strict=True))
        patch = 0
        for token in spread:
            if token != IMAGE:
                first = before == IMAGE or ((before in ENDS or i in (answered or [])) and token not in ENDS)
                sentence += first
                prompt.append(row(WEIGHTS["embedding"][token], position, 1, first))
                segments.append(sentence)
                before = token
            elif patch in seen:
                prompt.append(row(seen[patch], position, 2))
                segments.append(len(kept))
                last_visual, before = len(prompt), IMAGE
            patch += token == IMAGE
            position += 1

    length, capacities, size, recent = next((s for s in sizes if len(prompt) <= s[0]), sizes[-1])
    split = min(last_visual if question_later else len(prompt), length)
    if answered:
        split = begun or len(prompt)
        length, capacities, size, recent = next((s for s in sizes if compacts and split <= s[0]), sizes[-1])
    early, later = prompt[:split], prompt[split:]
    for slot in later:  # the toy's decode and extend take every token for text
        slot.row = slot.row + WEIGHTS["kind"][1] - WEIGHTS["kind"][slot.kind % 4]
    for slot, segment in zip(early, segments, strict=False):
        slot.kind %= 4  # the toy's prefill marks nothing
        if compacts:
            slot.row = slot.row + WEIGHTS["segment"][segment]
    slots: list[Slot | None] = [None] * (length - len(early)) + list(early)
    logits = forward(early[-1].row, [slots] * LAYERS, [])
    # Masses belong to a layer, so the same slot objects can lie in every layer's store.
    old, window = slots[:-recent], slots[-recent:]
    stores = [old[len(old) - capacity :] for capacity in capacities]
    result = Answer([], [logits], [], kept)

    def decode(slot: Slot) -> bool:
        nonlocal logits, stores, window
        if len(window) == size:
            if not compacts:
                return False
            result.full.append([s.kind for s in window if s])
            leaving, window = window[: size - recent], window[size - recent :]
            stores = [(s + leaving)[-len(s) :] for s in stores]
            result.compacted_at.append(len(result.decoded))
        window.append(slot)
        logits = forward(slot.row, stores, window)
        result.logits.append(logits)
        result.decoded.append(slot.position)
        return True

    for slot in later:
        assert decode(slot)
    before = ENDS[0]  # an answer begins a sentence
    while True:
        token = int(logits.argmax())
        if token == END and not ignore_eos:
            result.stop = "end"
            break
        result.tokens.append(token)
        if len(result.tokens) == steps:
            result.stop = "max_new_tokens"
            break
        if position == len(WEIGHTS["position"]):
            result.stop = "max_positions"
            break
        first = before in ENDS and token not in ENDS
        if not decode(row(WEIGHTS["embedding"][token], position, 1, first)):
            result.stop = "window_full"
            break
        position, before = position + 1, token
    result.window, result.stores = window, stores
    return result
