"""The attention map for a person to read: tables by layer, with the lowest and the highest head beside every mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibration.attention_map import KINDS, Array, AttentionMap

TEXT, VISUAL = range(2)  # of an axis `kinds`


def tables(found: AttentionMap) -> list[str]:
    """The lines of what the map's command prints."""
    facts, sizes = found.facts, found.facts.sizes
    looks = [
        ("sink", found.sink_strength),
        ("80 % within", found.locality_radius),
        ("80 % in tokens", found.coverage),
        ("entropy", found.entropy),
        ("text to text", found.modality_share[:, :, TEXT, TEXT]),
        ("text to image", found.modality_share[:, :, TEXT, VISUAL]),
        ("image to image", found.modality_share[:, :, VISUAL, VISUAL]),
        ("top 10 patches", found.top_patch_share),
        ("next step", found.step_similarity),
    ]
    holds = [
        ("anchors text", found.anchors[:, :, TEXT]),
        ("image", found.anchors[:, :, VISUAL]),
        ("transients text", found.transients[:, :, TEXT]),
        ("image", found.transients[:, :, VISUAL]),
        ("freq·score r", found.frequency_score_correlation),
        ("aligned text", found.alignment[:, :, TEXT]),
        ("image", found.alignment[:, :, VISUAL]),
    ]
    cached = [
        ("K alike text", found.key_redundancy[:, :, TEXT]),
        ("image", found.key_redundancy[:, :, VISUAL]),
        ("V alike text", found.value_redundancy[:, :, TEXT]),
        ("image", found.value_redundancy[:, :, VISUAL]),
        ("K outlier", found.key_outlier),
        ("centred", found.key_outlier_centred),
        ("K bias", found.key_bias_spike),
        ("V norm text", found.value_norm[:, :, TEXT]),
        ("image", found.value_norm[:, :, VISUAL]),
        ("V spread text", found.value_norm_spread[:, :, TEXT]),
        ("image", found.value_norm_spread[:, :, VISUAL]),
    ]
    between = [f"{alike:.2f}" for alike in found.layer_similarity] + [""]
    classes = [" ".join(_count(row, name) for name in ("image", "text", "cross-modal")) for row in found.specialisation]
    closest = [_closest(*layer) for layer in zip(found.key_similarity, found.value_similarity, strict=True)]
    anchors = ", ".join(
        f"{share:.1%} of the {kind} tokens"
        for kind, share in zip(KINDS, found.model_anchors, strict=True)
        if share >= 0
    )
    signals = ", ".join(
        f"{name.replace('_', ' ')} {'not measured' if figure is None else f'{figure:.2f}'}"
        for name, figure in facts.signals.items()
    )
    return [
        f"{facts.model}: {sizes.layers} layers, {sizes.heads} query and {sizes.kv_heads} KV heads of {sizes.head_dim}",
        f"{facts.samples} samples, {facts.with_images} with images; {facts.tokens} tokens, {facts.steps} steps",
        f"kind: {facts.kind} ({signals})",
        f"looked at by more than half of all layers, heads and steps: {anchors}",
        "",
        "what a layer's query heads look at: mean (lowest to highest head)",
        *_markdown(looks, ("next layer", between), ("heads image/text/both", classes)),
        "",
        "tokens of a KV head: mean (lowest to highest head)",
        *_markdown(holds),
        "",
        "keys and values of a KV head: mean (lowest to highest head)",
        *_markdown(cached, ("most alike KV heads", closest)),
    ]


def _count(row: Sequence[str], name: str) -> str:
    return str(int((np.asarray(row) == name).sum()))


def _closest(keys: Array, values: Array) -> str:
    """The two KV heads that are most alike, by keys' and values' cosine, the lower of both."""
    alike = np.minimum(keys, values)
    pairs = [(float(alike[i, j]), i, j) for j in range(len(alike)) for i in range(j)]
    if not pairs:
        return ""
    cosine, i, j = max(pairs)
    return f"{i}, {j}: {cosine:.2f}"


def _markdown(columns: Sequence[tuple[str, Array]], *texts: tuple[str, list[str]]) -> list[str]:
    """A row a layer: of arrays [layers, heads] mean, lowest and highest; of texts as they are."""
    titles, cells = zip(*[(title, [_spread(row) for row in array]) for title, array in columns], *texts, strict=True)
    rows = [["layer", *titles], *([str(layer), *row] for layer, row in enumerate(zip(*cells, strict=True)))]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines, the first row its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def _spread(row: Array) -> str:
    if np.isnan(row).all():
        return "-"
    low, mean, high = np.nanmin(row), np.nanmean(row), np.nanmax(row)
    places = 2 if abs(high) < 10 else 1 if abs(high) < 100 else 0
    if low == high:
        return f"{mean:.{places}f}"
    return f"{mean:.{places}f} ({low:.{places}f} to {high:.{places}f})"
