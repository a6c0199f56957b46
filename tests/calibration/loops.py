"""Statistics of attention by loops, written from their definitions: what the attention map must say."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from calibration.attention_map import QUANTILES

TEXT, VISUAL = 0, 1


@dataclass
class Seen:
    """A prompt and its answer by Hugging Face: attention [layers, heads, T, T], keys and values [layers, H, T, D]."""

    attention: np.ndarray
    key: np.ndarray
    value: np.ndarray
    kinds: list[int]
    steps: int


class Means:
    """Figures gathered by name and place, and their means as arrays; NaN where there were none."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, name: str, place: tuple, figure: float) -> None:
        self.figures[name][place].append(figure)

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = np.full(shape, np.nan)
        for place, figures in self.figures[name].items():
            array[place] = np.mean(figures)
        return array


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """0 where one of them is nothing but zeros, as the value of an embedding of zeros is."""
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / norms) if norms else 0.0


def gather_queries(means: Means, seen: Seen) -> None:
    """Statistics of query heads."""
    layers, heads, tokens, _ = seen.attention.shape
    kinds = np.array(seen.kinds)
    for layer, h, q in np.ndindex(layers, heads, tokens):
        row, place = seen.attention[layer, h, q], (layer, h)
        if q >= 4:
            means.add("sink_strength", place, row[:4].sum())
        near = np.cumsum(row[q::-1])
        means.add("locality_radius", place, 1 + int(np.argmax(near >= 0.8)))
        entropy = -sum(a * math.log(a) for a in row if a > 0)
        means.add("entropy", place, entropy)
        if q >= tokens - seen.steps:
            means.add("answer_entropy", place, entropy / math.log(q + 1))
            means.add("coverage", place, 1 + int(np.argmax(np.cumsum(sorted(row, reverse=True)) >= 0.8)))
        if {TEXT, VISUAL} <= set(seen.kinds[: q + 1]):
            for kind in (TEXT, VISUAL):
                means.add("modality_share", (*place, kinds[q], kind), row[kinds == kind].sum())
        if kinds[q] == TEXT and VISUAL in seen.kinds[:q]:
            visual = sorted(row[kinds == VISUAL], reverse=True)
            means.add("of the best", place, sum(visual[:10]))
            means.add("of all", place, sum(visual))
    for layer, s in np.ndindex(layers, seen.steps):
        rows = seen.attention[layer, :, tokens - seen.steps + s]
        for h in range(heads):
            if s + 1 < seen.steps:
                means.add(
                    "step_similarity",
                    (layer, h),
                    cosine(rows[h], seen.attention[layer, h, tokens - seen.steps + s + 1]),
                )
        if layer + 1 < layers:
            later = seen.attention[layer + 1, :, tokens - seen.steps + s]
            means.add("layer_similarity", (layer,), cosine(rows.mean(axis=0), later.mean(axis=0)))
            for h, g in np.ndindex(heads, heads):
                means.add("head_layer_similarity", (layer, h, g), cosine(rows[h], later[g]))


def gather_tokens(means: Means, seen: Seen, kv_heads: int) -> None:
    """What tokens receive, by KV head and over the whole model."""
    layers, heads, tokens, _ = seen.attention.shape
    active = np.zeros((layers, heads, seen.steps, tokens))
    for layer, h, s in np.ndindex(layers, heads, seen.steps):
        row = seen.attention[layer, h, tokens - seen.steps + s]
        k = math.ceil(0.1 * (row > 0).sum() - 1e-9)
        active[layer, h, s] = (row >= sorted(row)[-k]) & (row > 0)
    scores = seen.attention[:, :, -seen.steps :]
    group = heads // kv_heads
    views = {(layer, g): (layer, slice(g * group, g * group + group)) for layer, g in np.ndindex(layers, kv_heads)}
    for prefix, places in (("", views), ("model_", {(): (slice(None), slice(None))})):
        for place, part in places.items():
            frequency = active[part].reshape(-1, tokens).mean(axis=0)
            score = scores[part].reshape(-1, tokens).mean(axis=0)
            if frequency.std() > 0 and score.std() > 0:
                means.add(f"{prefix}frequency_score_correlation", place, np.corrcoef(frequency, score)[0, 1])
            for t, kind in enumerate(seen.kinds):
                means.add(f"{prefix}frequency", (*place, kind), frequency[t])
                means.add(f"{prefix}score", (*place, kind), score[t])
                means.add(f"{prefix}anchors", (*place, kind), frequency[t] > 0.5)
                means.add(f"{prefix}transients", (*place, kind), 0 < frequency[t] <= 0.5)
    if {TEXT, VISUAL} <= set(seen.kinds):
        kinds = np.array(seen.kinds)
        for (layer, g), part in views.items():
            mean = seen.attention[part].mean(axis=0)
            for t, kind in enumerate(seen.kinds):
                pays, gets = mean[t, kinds == VISUAL].sum(), mean[kinds == TEXT, t].sum() / mean[:, t].sum()
                means.add("alignment", (layer, g, kind), (pays if kind == TEXT else gets) > 0.3)


def gather_cache(means: Means, seen: Seen) -> None:
    """What keys and values have in common."""
    layers, kv_heads, tokens, _ = seen.key.shape
    for layer, h in np.ndindex(layers, kv_heads):
        for t, kind in enumerate(seen.kinds):
            means.add("value_norm", (layer, h, kind), math.sqrt(sum(x**2 for x in seen.value[layer, h, t])))
        for name, rows in (("key", seen.key[layer]), ("value", seen.value[layer])):
            for other, t in np.ndindex(kv_heads, tokens):
                means.add(f"{name}_similarity", (layer, h, other), cosine(rows[h, t], rows[other, t]))
            for kind in (TEXT, VISUAL):
                own = [rows[h, t] for t in range(tokens) if seen.kinds[t] == kind]
                if len(own) > 1:
                    pairs = [cosine(x, y) for i, x in enumerate(own) for y in own[:i]]
                    means.add(f"{name}_redundancy", (layer, h, kind), float(np.mean(pairs)))


def channels(seen: list[Seen], biases: np.ndarray) -> dict[str, np.ndarray]:
    """Ranges of keys and values, from all rows of all samples at once."""
    found = {}
    kinds = np.array([kind for one in seen for kind in one.kinds])
    for name in ("key", "value"):
        rows = np.concatenate([getattr(one, name) for one in seen], axis=2)  # [layers, kv_heads, all tokens, head_dim]
        parts = [rows[:, :, kinds == kind] for kind in (TEXT, VISUAL)]
        for figure in ("min", "max", "mean", "std"):
            found[f"{name}_{figure}"] = np.stack([getattr(part, figure)(axis=2) for part in parts], axis=2)
        quantiles = [np.stack([np.quantile(part, q, axis=2) for q in QUANTILES], axis=2) for part in parts]
        found[f"{name}_percentiles"] = np.stack(quantiles, axis=2)
        if name == "value":
            norms = [np.sqrt((part**2).sum(axis=-1)) for part in parts]
            found["value_norm_spread"] = np.stack([norm.std(axis=2) / norm.mean(axis=2) for norm in norms], axis=2)
        else:
            for suffix, centre in (("", 0.0), ("_centred", rows.mean(axis=2, keepdims=True))):
                largest = abs(rows - centre).max(axis=2)
                found[f"key_outlier{suffix}"] = largest.max(axis=-1) / np.median(largest, axis=-1)
            found["key_bias_norm"] = np.sqrt((biases**2).sum(axis=-1))
            found["key_bias_spike"] = abs(biases).max(axis=-1) / np.median(rows.std(axis=2), axis=-1)
    return found
