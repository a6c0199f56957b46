"""Head merge: KV heads that cache nearly the same become one, folded into the projections, so that it costs nothing.

RoPE is linear and turns all heads of a token alike: the mean of some heads after RoPE is one head whose rows of k_proj
(and bias) are the mean of theirs, and so it is with v_proj. Mean-pooled heads are GQA's (arXiv 2305.13245); only heads
that are alike are pooled, in clusters, as CHAI does (arXiv 2403.08058); `align` turns them onto each other first
(arXiv 2412.20677), which by itself changes nothing the model says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engines.errors import UserError
from export.stages.heads.moments import HeadMoments
from export.stages.positions import turns_halves
from export.stages.stage import Stage, twin

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
KNOWN_PARTS = (*PROJECTIONS, "rotary_emb")


@dataclass(eq=False)
class Heads(Stage):
    """Merge the KV heads of a layer whose keys and values are alike: the plain mean of every cluster.

    A cluster's query heads share its KV head. Smaller clusters get query heads more, so that the layer stays plain
    grouped-query attention: copies of their own, whose output counts nothing. That costs time in prefill, hence `most`.
    Weighting the mean by attention would change nothing: a softmax row sums to one whatever the head.

    Attributes:
        merge: whether heads are merged at all.
        threshold: lowest mean cosine of any two heads of a cluster, of their keys after RoPE and of their values.
        thresholds: the same of each layer, as `python -m calibration heads` chooses them; empty: `threshold` in all.
        most: heads of a cluster, at most.
        align: turn heads onto each other before they are compared and averaged; folded into the projections too.
    """

    merge: bool = False
    threshold: float = 0.88
    thresholds: list[float] = field(default_factory=list)
    most: int = 4
    align: bool = False

    def __post_init__(self) -> None:
        if self.most < 2:
            raise ValueError(f"most must be at least 2, got {self.most}")

    def merges(self, similarity: Tensor) -> Iterator[tuple[float, list[list[int]]]]:
        """The steps of complete linkage, the most alike first: two clusters are as alike as their least alike heads.

        Args:
            similarity: [kv_heads, kv_heads].

        Yields:
            How alike those are that become one, no more than those before, and all clusters then.
        """
        alike = similarity.tolist()
        clusters = [[head] for head in range(len(alike))]
        while True:
            links = [
                (min(alike[i][j] for i in clusters[a] for j in clusters[b]), -a, -b)
                for b in range(len(clusters))
                for a in range(b)
                if len(clusters[a]) + len(clusters[b]) <= self.most
            ]
            if not links:
                return
            weakest, a, b = max(links)  # of equal ones the lowest heads
            one = sorted(clusters[-a] + clusters[-b])
            clusters = [one if i == -a else cluster for i, cluster in enumerate(clusters) if i != -b]
            yield weakest, clusters

    def clusters(self, similarity: Tensor, threshold: float) -> list[list[int]]:
        """Which heads become one where no two of a cluster may be less alike than the threshold."""
        clusters = [[head] for head in range(len(similarity))]
        for alike, merged in self.merges(similarity):
            if alike < threshold:
                break
            clusters = merged
        return clusters

    def groups(self, moments: Sequence[HeadMoments]) -> list[list[list[int]]]:
        """The clusters of each layer.

        Raises:
            UserError: the recipe has thresholds for a model of another number of layers.
        """
        layers = len(moments)
        thresholds = self.thresholds or [self.threshold] * layers
        if len(thresholds) != layers:
            raise UserError(
                f"heads.thresholds has {len(thresholds)} values, the model {layers} layers: calibrate for this model"
            )
        pairs = zip(moments, thresholds, strict=True)
        return [self.clusters(known.similarity(self.align), threshold) for known, threshold in pairs]

    def check(self, language_model: nn.Module, moments: Sequence[HeadMoments]) -> None:
        """Raise a `UserError` if the heads of this model cannot be merged in its weights."""
        for attention in attentions(language_model, len(moments)):
            _check(attention)
        # Keys are turned in pairs of a head's two halves: the model's RoPE must turn the same pairs.
        if self.align and not turns_halves(language_model, moments[0].values.shape[-1]):
            raise UserError("[heads] align needs RoPE that turns the halves of a whole head: set align = false")

    def fold(self, language_model: nn.Module, moments: Sequence[HeadMoments]) -> tuple[nn.Module, list[int]]:
        """The decoder with merged heads, and the number of KV heads of each layer.

        The given decoder is not changed, and all weights but those of the layers with merged heads are shared with it.

        Raises:
            UserError: the heads of this model cannot be merged in its weights.
        """
        self.check(language_model, moments)
        clusters = self.groups(moments)
        counts = [len(layer) for layer in clusters]
        if counts == [len(known.keys) for known in moments]:
            return language_model, counts
        merged = twin(language_model)
        for attention, groups, known in zip(attentions(merged, len(moments)), clusters, moments, strict=True):
            if len(groups) < len(known.keys):
                self._fold_layer(attention, groups, known)
        return merged, counts

    def _fold_layer(self, attention: Any, clusters: list[list[int]], known: HeadMoments) -> None:
        shape = (len(known.keys), -1, known.values.shape[-1])  # [kv_heads, heads of a group, head_dim]
        query, key, value = (_rows(getattr(attention, name), shape) for name in ("q_proj", "k_proj", "v_proj"))
        output = attention.o_proj.weight.T.clone().unflatten(0, shape)
        if self.align:
            for onto, *others in clusters:
                for head in others:
                    turn_key, turn_value = known.turns(head, onto)
                    query[head], key[head] = turn_key @ query[head], turn_key @ key[head]
                    output[head], value[head] = turn_value @ output[head], turn_value @ value[head]
        widest = query.shape[1] * max(map(len, clusters))
        queries, outputs = [], []
        for cluster in clusters:
            own, its = query[cluster].flatten(0, 1), output[cluster].flatten(0, 1)  # [query heads, head_dim, ...]
            copies = torch.arange(widest) % len(own)
            queries.append(own[copies])
            outputs.append(its[copies] * (torch.arange(widest) < len(own))[:, None, None])
        attention.q_proj = _linear(torch.stack(queries), attention.q_proj.bias)
        attention.k_proj, attention.v_proj = (
            _linear(torch.stack([rows[cluster].mean(dim=0) for cluster in clusters]), projection.bias)
            for rows, projection in ((key, attention.k_proj), (value, attention.v_proj))
        )
        weight = torch.stack(outputs).flatten(0, 2).T.contiguous()
        attention.o_proj.weight = nn.Parameter(weight, requires_grad=False)
        attention.o_proj.in_features, attention.num_key_value_groups = weight.shape[1], widest


def attentions(language_model: nn.Module, layers: int) -> list[Any]:
    """The attention of every layer; None where it cannot be found."""
    modules: list[Any] = [m for m in language_model.modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")]
    found = {module.layer_idx: module for module in modules}
    return [found.get(layer) for layer in range(layers)]


def _rows(projection: nn.Linear, shape: tuple[int, int, int]) -> Tensor:
    """A copy of a projection's rows by head, its bias as one more column, [kv_heads, group, head_dim, columns]."""
    bias = [] if projection.bias is None else [projection.bias[:, None]]
    return torch.cat([projection.weight, *bias], dim=1).unflatten(0, shape)


def _linear(rows: Tensor, bias: Tensor | None) -> nn.Linear:
    """The projection of rows [..., columns] whose last column is the bias if there was one."""
    rows = rows.flatten(0, -2)
    outputs, inputs = rows.shape[0], rows.shape[1] - (bias is not None)
    linear = nn.Linear(inputs, outputs, bias is not None, device="meta")
    linear.weight = nn.Parameter(rows[:, :inputs].contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(rows[:, inputs].contiguous(), requires_grad=False)
    return linear


def _check(attention: Any) -> None:
    """Only where keys and values are nothing but projections is the mean of the rows that of the heads."""
    parts = dict(attention.named_children()) if attention is not None else {}
    if wrong := [name for name in PROJECTIONS if not isinstance(parts.get(name), nn.Linear)]:
        raise UserError(f"[heads] merge: this model's attention has no {wrong[0]} to merge heads in: leave it out")
    extra = [name for name in (*parts, *dict(attention.named_parameters(recurse=False))) if name not in KNOWN_PARTS]
    if extra:
        raise UserError(
            f"[heads] merge: this model's attention has {extra[0]} beside its projections, so that its heads cannot be "
            "merged in the weights, and merging them inside the graph is not supported yet: leave [heads] out"
        )
