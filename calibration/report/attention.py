"""The attention map drawn: what layers and heads look at, which tokens it falls on, what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibration.attention_map import KINDS, SPECIALISED, AttentionMap
from calibration.map_table import TEXT, VISUAL
from calibration.report import plots
from calibration.report.page import Plot, Section
from calibration.statistics.persistence import ANCHOR

Drawing = tuple[str, dict[str, NDArray], str, str]  # title, lines, unit, caption

BAND = "The line is the mean of a layer's heads, the band reaches from the lowest head to the highest."


def by_depth(found: AttentionMap) -> Section:
    share = found.modality_share
    drawn: list[Drawing] = [
        ("Sinks", {"": found.sink_strength}, "share of attention", "Attention on the first tokens of the prompt."),
        (
            "Locality",
            {"nearest tokens": found.locality_radius, "fewest tokens, of a step": found.coverage},
            "tokens",
            "How many tokens hold 80 % of a query's attention: the nearest ones, and the fewest of any.",
        ),
        ("Entropy", {"": found.entropy}, "nats", "How evenly a query's attention is spread over what it sees."),
        (
            "Entropy while answering",
            {"": found.answer_entropy},
            "share of the most",
            "The same of the steps that answer, over the logarithm of the tokens they see.",
        ),
        (
            "From kind to kind",
            {
                "text to text": share[:, :, TEXT, TEXT],
                "text to image": share[:, :, TEXT, VISUAL],
                "image to image": share[:, :, VISUAL, VISUAL],
            },
            "share of attention",
            "Where the attention of text and of visual tokens goes.",
        ),
        (
            "Ten best patches",
            {"": found.top_patch_share},
            "share of attention",
            "Of what text pays to visual tokens, the part that the ten best of them get.",
        ),
        (
            "Similarity",
            {"with the next step": found.step_similarity, "with the next layer": found.layer_similarity},
            "cosine",
            "How alike a step's attention is to the next step's in the same head; and, with no band, the mean of a "
            "layer's heads to the mean of the next layer's.",
        ),
        (
            "Aligned tokens",
            _by_kind(found.alignment),
            "share of tokens",
            "Tokens that align text and image, as a recipe's protect.alignment counts them, by their kind.",
        ),
    ]
    return Section(
        "Attention by depth",
        f"Read with the answers behind the prompts, uncompressed. {BAND}",
        plots=_lines(drawn),
    )


def by_head(found: AttentionMap) -> Section:
    classes, counts = np.unique(found.specialisation[found.specialisation != ""], return_counts=True)
    told = ", ".join(f"{count} {name}" for name, count in zip(classes, counts, strict=True)) or "none measured"
    drawn = [
        ("Sinks", found.sink_strength, "share of attention", "Attention on the first tokens of the prompt."),
        ("Locality radius", found.locality_radius, "tokens", "How many of the nearest tokens hold 80 % of it."),
        ("Entropy", found.entropy, "nats", "How evenly attention is spread."),
        (
            "Specialisation",
            found.modality_share[:, :, TEXT, VISUAL],
            "text to image, share",
            f"A head is one of images from {SPECIALISED:g} on, of text up to {1 - SPECIALISED:g}, else cross-modal: "
            f"{told}.",
        ),
        ("Ten best patches", found.top_patch_share, "share of attention", "What the ten best of the patches get."),
        ("Next step", found.step_similarity, "cosine", "How alike a step's attention is to the next step's."),
    ]
    figures = [
        Plot(title, text, plots.by_head(values, unit, f"head {title}"))
        for title, values, unit, text in drawn
        if not np.isnan(values).all()
    ]
    if found.facts.sizes.layers > 1:
        alike = found.head_layer_similarity.max(axis=2)
        text = (
            "How alike a head's attention is to that of the closest head in the next layer; the line by depth compares "
            "the layers' mean heads."
        )
        figures.append(Plot("Next layer", text, plots.by_head(alike, "cosine", "head next layer")))
    return Section(
        "Attention by head", "A cell a layer and query head; averages hide what single heads do.", plots=figures
    )


def by_token(found: AttentionMap) -> Section:
    score, frequency = (_by_kind(figures) for figures in (found.score, found.frequency))
    points = {kind: (score[kind], frequency[kind]) for kind in score}
    together = Plot(
        "Frequency beside score",
        "A dot a KV head of a layer: how often its tokens are in the top tenth (share of heads and steps) and how much "
        "attention they get (share), mean over the tokens of a kind.",
        plots.dots(points, "attention received, share a token", "share of observations", "frequency"),
    )
    drawn: list[Drawing] = [
        (
            "Do both agree?",
            {"": found.frequency_score_correlation},
            "Pearson's r",
            "Correlation of frequency and score over the tokens of a prompt (Pearson's r): far below 1 they choose "
            "different tokens.",
        ),
        (
            "Anchors and transients",
            _by_kind(found.anchors, "anchors, ") | _by_kind(found.transients, "transients, "),
            "share of tokens",
            f"Share of the tokens that are in the top tenth in more than {ANCHOR:.0%} of the observations (anchors), "
            "and of those that are in it in fewer, but in some (transients).",
        ),
    ]
    return Section(
        "Which tokens get it",
        "Two ways to say that a token matters while the model answers: how much attention it gets, and how often it is "
        f"among the top tenth. {BAND}",
        plots=[together, *_lines(drawn)],
    )


def by_cache(found: AttentionMap) -> Section:
    drawn: list[Drawing] = [
        (
            "Redundancy",
            _by_kind(found.key_redundancy, "keys, ") | _by_kind(found.value_redundancy, "values, "),
            "cosine",
            "Mean cosine of two tokens of a kind: the higher, the less a further token adds.",
        ),
        (
            "Key outliers",
            {"as they are": found.key_outlier, "centred": found.key_outlier_centred},
            "ratio",
            "Widest channel of the keys over the median one (ratio): what is far above 1 spoils int4, unless centring "
            "takes it away.",
        ),
        ("Length of values", _by_kind(found.value_norm), "value", "Mean length of a value by the token's kind."),
        (
            "Spread of that length",
            _by_kind(found.value_norm_spread),
            "ratio",
            "Standard deviation of a value's length over its mean (ratio), over the tokens of a kind.",
        ),
    ]
    if np.nanmax(found.key_bias_spike) > 0:
        text = "Largest number in k_proj's bias over the keys' standard deviation (ratio)."
        drawn.append(("Bias spikes", {"": found.key_bias_spike}, "ratio", text))
    figures = _lines(drawn)
    if found.facts.sizes.kv_heads > 1:
        text = (
            "Cosine of what a KV head holds of a token with its closest twin in the layer, keys or values, the lower."
        )
        twins = plots.by_head(closest(found), "cosine", "twins", xlabel="KV head")
        figures.append(Plot("Heads that are alike", text, twins))
    return Section("What the cache holds", f"Keys and values of the KV heads. {BAND}", plots=figures)


def closest(found: AttentionMap) -> NDArray[np.float32]:
    """Of every KV head, the likeness to the most alike other one of its layer, [layers, kv_heads]."""
    alike = np.minimum(found.key_similarity, found.value_similarity)
    itself = np.eye(alike.shape[1], dtype=bool)
    return np.where(itself, -np.inf, alike).max(axis=2)


def _by_kind(figures: NDArray, what: str = "") -> dict[str, NDArray]:
    """A line a kind of tokens, of [layers, heads, kinds]."""
    return {f"{what}{kind}": figures[:, :, number] for number, kind in enumerate(KINDS)}


def _lines(drawn: Sequence[Drawing]) -> list[Plot]:
    """Plots over the layers of what was measured at all."""
    figures = []
    for title, series, unit, text in drawn:
        known = {label: values for label, values in series.items() if not np.isnan(values).all()}
        if known:
            figures.append(Plot(title, text, plots.by_layer(known, unit, f"by layer {title}")))
    return figures
