"""The attention map: what was measured on sample prompts, by layer, KV head and query head, in one checked file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from calibration.memory import write
from engines.config import parse, parse_json
from engines.errors import UserError, one_line

FORMAT = 1
KINDS = ("text", "visual")  # of tokens, in the order of every axis `kinds`
QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
SPECIALISED = 0.7  # share of its attention from which a head is one of images, or of text
FEW = 32  # samples below which a range or a share is hardly known

Array = NDArray[np.float32]


def _axes(*axes: str, unit: str = "share") -> dict[str, Any]:
    return {"axes": axes, "unit": unit}


QUERY, KV = ("layers", "heads"), ("layers", "kv_heads")
CHANNELS = (*KV, "kinds", "head_dim")


@dataclass(frozen=True)
class Sizes:
    """Lengths of the axes that differ from model to model. Query head h reads KV head h // (heads // kv_heads)."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise ValueError("sizes are at least 1, and KV heads divide the query heads")

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        others = {"kinds": len(KINDS), "quantiles": len(QUANTILES), "layer_pairs": self.layers - 1}
        known = dataclasses.asdict(self) | others
        return tuple(known[axis] for axis in axes)


@dataclass(frozen=True)
class Facts:
    """What was measured, and how.

    Attributes:
        model: name of the checkpoint's folder; `weights` is a hash of its configuration and weights.
        samples, with_images: prompts, and those of them with an image.
        tokens: of all prompts and answers; `steps` of them decode, or would: each prompt's last and its answer's.
        seed: chose the rows that the percentiles are of.
        kind: of model, as `statistics.kind` tells it by the signals.
        signals: means over all layers and heads; None: not to be measured on these samples.
        warnings: why the figures may not hold elsewhere.
    """

    model: str
    weights: str
    sizes: Sizes
    samples: int
    with_images: int
    tokens: int
    steps: int
    seed: int
    kind: Literal["understanding", "generation"]
    signals: dict[str, float | None]
    warnings: list[str]
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Means over the queries or tokens of all samples, float32; NaN where the samples had none to measure.

    A query counts in a share of modalities only if it sees tokens of both. *Steps* are the queries that decode: the
    prompt's last token and the answer's, read teacher-forced. *Score* is attention received in these steps; *frequency*
    the share of the observations (query heads of the KV head, steps) in which a token is in the top k, k a tenth of the
    tokens seen. `statistics` defines each figure.

    Attributes:
        sink_strength: attention on the first tokens, as many as a recipe protects.
        locality_radius, coverage: tokens that hold 80 % of a query's attention: nearest ones; of a step, the fewest.
        entropy: of a query's attention; `answer_entropy`: of a step's, over the log of the tokens it sees.
        modality_share: attention by a query's kind and the token's: text to text, text to image and so on.
        top_patch_share: of the attention that text pays to visual tokens, what the 10 best get.
        step_similarity: cosine of a step's attention with the next step's.
        head_layer_similarity: of each head with each head of the next layer, by the same step; `layer_similarity`: of
            the layers' mean heads.
        frequency, score: of a token, by its kind.
        anchors, transients: share of the tokens that are.
        frequency_score_correlation: Pearson's r of the tokens of a prompt.
        alignment: share of the tokens that align text and image, as `[protect] alignment` has it.
        key_redundancy, value_redundancy: mean cosine of two tokens of a kind; 1 - it is the information density.
        key_similarity, value_similarity: cosine of what two KV heads hold of a token.
        key_outlier, key_outlier_centred: widest channel over the median one, as it is and around the channels' means.
        key_bias_norm: of k_proj's bias; `key_bias_spike`: its largest number over the keys' standard deviation.
        value_norm, value_norm_spread: mean length of a value, and its standard deviation over this mean.
        key_min ... value_percentiles: of every channel, keys after RoPE; percentiles at QUANTILES, of a sample of rows.
        model_frequency ... model_frequency_score_correlation: the same with all layers and heads as observations.
    """

    facts: Facts
    sink_strength: Array = field(metadata=_axes(*QUERY))
    locality_radius: Array = field(metadata=_axes(*QUERY, unit="tokens"))
    coverage: Array = field(metadata=_axes(*QUERY, unit="tokens"))
    entropy: Array = field(metadata=_axes(*QUERY, unit="nats"))
    answer_entropy: Array = field(metadata=_axes(*QUERY))
    modality_share: Array = field(metadata=_axes(*QUERY, "kinds", "kinds"))
    top_patch_share: Array = field(metadata=_axes(*QUERY))
    step_similarity: Array = field(metadata=_axes(*QUERY, unit="cosine"))
    head_layer_similarity: Array = field(metadata=_axes("layer_pairs", "heads", "heads", unit="cosine"))
    layer_similarity: Array = field(metadata=_axes("layer_pairs", unit="cosine"))
    frequency: Array = field(metadata=_axes(*KV, "kinds"))
    score: Array = field(metadata=_axes(*KV, "kinds"))
    anchors: Array = field(metadata=_axes(*KV, "kinds"))
    transients: Array = field(metadata=_axes(*KV, "kinds"))
    frequency_score_correlation: Array = field(metadata=_axes(*KV, unit="Pearson's r"))
    alignment: Array = field(metadata=_axes(*KV, "kinds"))
    key_redundancy: Array = field(metadata=_axes(*KV, "kinds", unit="cosine"))
    value_redundancy: Array = field(metadata=_axes(*KV, "kinds", unit="cosine"))
    key_similarity: Array = field(metadata=_axes(*KV, "kv_heads", unit="cosine"))
    value_similarity: Array = field(metadata=_axes(*KV, "kv_heads", unit="cosine"))
    key_outlier: Array = field(metadata=_axes(*KV, unit="ratio"))
    key_outlier_centred: Array = field(metadata=_axes(*KV, unit="ratio"))
    key_bias_norm: Array = field(metadata=_axes(*KV, unit="key"))
    key_bias_spike: Array = field(metadata=_axes(*KV, unit="ratio"))
    value_norm: Array = field(metadata=_axes(*KV, "kinds", unit="value"))
    value_norm_spread: Array = field(metadata=_axes(*KV, "kinds", unit="ratio"))
    key_min: Array = field(metadata=_axes(*CHANNELS, unit="key"))
    key_max: Array = field(metadata=_axes(*CHANNELS, unit="key"))
    key_mean: Array = field(metadata=_axes(*CHANNELS, unit="key"))
    key_std: Array = field(metadata=_axes(*CHANNELS, unit="key"))
    key_percentiles: Array = field(metadata=_axes(*KV, "kinds", "quantiles", "head_dim", unit="key"))
    value_min: Array = field(metadata=_axes(*CHANNELS, unit="value"))
    value_max: Array = field(metadata=_axes(*CHANNELS, unit="value"))
    value_mean: Array = field(metadata=_axes(*CHANNELS, unit="value"))
    value_std: Array = field(metadata=_axes(*CHANNELS, unit="value"))
    value_percentiles: Array = field(metadata=_axes(*KV, "kinds", "quantiles", "head_dim", unit="value"))
    model_frequency: Array = field(metadata=_axes("kinds"))
    model_score: Array = field(metadata=_axes("kinds"))
    model_anchors: Array = field(metadata=_axes("kinds"))
    model_transients: Array = field(metadata=_axes("kinds"))
    model_frequency_score_correlation: Array = field(metadata=_axes(unit="Pearson's r"))

    def __post_init__(self) -> None:
        if self.facts.format != FORMAT:
            raise ValueError(f"format {self.facts.format} is not {FORMAT}, the one that is read here")
        for statistic in statistics():
            array, shape = getattr(self, statistic.name), self.facts.sizes.shape(statistic.metadata["axes"])
            if (array.dtype, array.shape) != (np.float32, shape):
                raise ValueError(f"{statistic.name} is {array.dtype} {array.shape}, not float32 {shape}")
            if np.isinf(array).any():
                raise ValueError(f"{statistic.name} is not finite")

    @property
    def specialisation(self) -> NDArray[np.str_]:
        """`image`, `text` or `cross-modal`: what text tokens look at by a head, [layers, heads]; `` if not measured."""
        seen = self.modality_share[:, :, 0, 1]
        classes = [np.isnan(seen), seen >= SPECIALISED, seen <= 1 - SPECIALISED]
        return np.select(classes, ["", "image", "text"], "cross-modal")

    def by_group(self, statistic: str) -> Array:
        """Mean over the query heads of each KV head, [layers, kv_heads, ...]."""
        array, sizes = getattr(self, statistic), self.facts.sizes
        return array.reshape(sizes.layers, sizes.kv_heads, -1, *array.shape[2:]).mean(axis=2)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        arrays = {statistic.name: np.asarray(getattr(self, statistic.name), order="C") for statistic in statistics()}
        write(path, save(arrays, {"facts": json.dumps(dataclasses.asdict(self.facts))}))

    def plain(self) -> dict[str, Any]:
        """All but what is by channel, as JSON takes it; null is NaN."""
        values = {s.name: s.metadata for s in statistics() if "head_dim" not in s.metadata["axes"]}
        return {
            "facts": dataclasses.asdict(self.facts),
            "kinds": KINDS,
            "specialisation": self.specialisation.tolist(),
            "statistics": {name: {**known, "values": _plain(getattr(self, name))} for name, known in values.items()},
        }


def _plain(array: Array) -> Any:
    values = array.astype(object)
    values[np.isnan(array)] = None
    return values.tolist()


def statistics() -> list[dataclasses.Field]:
    """The fields of `AttentionMap` that are arrays."""
    return [f for f in dataclasses.fields(AttentionMap) if f.metadata]


def default_path(checkpoint: Path) -> Path:
    """Where the map of a checkpoint lies if nothing else is said."""
    return Path("build") / f"{checkpoint.resolve().name}.map.safetensors"


def load(path: Path) -> AttentionMap:
    """Read a file that `AttentionMap.save` wrote.

    Raises:
        UserError: it is missing, damaged, or something else.
    """
    try:
        with safe_open(path, "np") as file:
            data = parse_json((file.metadata() or {}).get("facts", "").encode(), "facts")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it has no iterator
        return AttentionMap(facts=parse(Facts, data, "facts"), **arrays)
    except (OSError, SafetensorError, UserError, ValueError, TypeError) as error:
        why = f"{path} is no attention map that can be read here ({one_line(error)})"
        raise UserError(f"{why}: measure it with  python -m calibration map CHECKPOINT --out {path}") from error
