"""Head merge: KV heads that cache nearly the same become one, folded into the projections, so that it costs nothing.

RoPE is linear and turns all heads of a token alike: the mean of some heads after RoPE is one head whose rows of k_proj
(and bias) are the mean of theirs, and so it is with v_proj. Mean-pooled heads are GQA's (arXiv 2305.13245); only heads
that are alike are pooled, in clusters, as CHAI does (arXiv 2403.08058); `align` turns them onto each other first
(arXiv 2412.20677), which by itself changes nothing the model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.errors import UserError
from export.stages.stage import Stage, twin

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
KNOWN_PARTS = (*PROJECTIONS, "rotary_emb")


@dataclass(frozen=True)
class HeadMoments:
    """How alike the KV heads of a layer are: means over the tokens of the samples, rows scaled to length one.

    Attributes:
        keys: conj(z_i) z_j of heads i and j, complex64 [kv_heads, kv_heads, head_dim / 2]; z are the pairs of numbers
            of a key, (x_d, x_(d + head_dim / 2)), that RoPE turns together.
        values: outer products of the values v_i and v_j, float32 [kv_heads, kv_heads, head_dim, head_dim].
    """

    keys: Tensor
    values: Tensor

    def similarity(self, aligned: bool) -> Tensor:
        """Mean cosine of each two heads, the lower of keys' and values', [kv_heads, kv_heads].

        Args:
            aligned: each two heads turned onto each other as well as can be (`turns`).
        """
        if aligned:
            return torch.minimum(self.keys.abs().sum(dim=-1), torch.linalg.svdvals(self.values).sum(dim=-1))
        return torch.minimum(self.keys.sum(dim=-1).real, self.values.diagonal(dim1=-2, dim2=-1).sum(dim=-1))

    def turns(self, head: int, onto: int) -> tuple[Tensor, Tensor]:
        """Rotations [head_dim, head_dim] that bring a head's keys and values closest to another's.

        Keys may only be turned within the pairs that RoPE turns, values by any orthogonal matrix (Procrustes).
        """
        turn = self.keys[onto, head].conj()
        turn = torch.where(turn.abs() > 0, turn / turn.abs(), 1.0)
        real, imaginary = torch.diag(turn.real), torch.diag(turn.imag)
        key = torch.cat([torch.cat([real, -imaginary], dim=1), torch.cat([imaginary, real], dim=1)])
        left, _, right = torch.linalg.svd(self.values[onto, head])
        return key, left @ right


@dataclass(eq=False)
class Heads(Stage):
    """Merge the KV heads of a layer whose keys and values are alike: the plain mean of every cluster.

    A cluster's query heads share its KV head. Smaller clusters get query heads more, so that the layer stays plain
    grouped-query attention: copies of their own, whose output counts nothing. That costs time in prefill, hence `most`.
    Weighting the mean by attention would change nothing: a softmax row sums to one whatever the head.

    Attributes:
        merge: whether heads are merged at all.
        threshold: lowest mean cosine of any two heads of a cluster, of their keys after RoPE and of their values.
        most: heads of a cluster, at most.
        align: turn heads onto each other before they are compared and averaged; folded into the projections too.
    """

    merge: bool = False
    threshold: float = 0.88
    most: int = 4
    align: bool = False

    def __post_init__(self) -> None:
        if self.most < 2:
            raise ValueError(f"most must be at least 2, got {self.most}")

    def clusters(self, similarity: Tensor) -> list[list[int]]:
        """Which heads become one, by complete linkage: two clusters are as alike as their least alike heads.

        Args:
            similarity: [kv_heads, kv_heads].
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
            weakest, a, b = max(links, default=(-torch.inf, 0, 0))  # of equal ones the lowest heads
            if weakest < self.threshold:
                return clusters
            clusters[-a] = sorted(clusters[-a] + clusters.pop(-b))

    def fold(self, language_model: nn.Module, moments: Sequence[HeadMoments]) -> tuple[nn.Module, list[int]]:
        """The decoder with merged heads, and the number of KV heads of each layer.

        The given decoder is not changed, and all weights but those of the layers with merged heads are shared with it.

        Raises:
            UserError: the heads of this model cannot be merged in its weights.
        """
        for attention in _attentions(language_model, len(moments)):
            _check(attention)
        if self.align:
            _check_rope(language_model, moments[0].values.shape[-1])
        clusters = [self.clusters(known.similarity(self.align)) for known in moments]
        counts = [len(layer) for layer in clusters]
        if counts == [len(known.keys) for known in moments]:
            return language_model, counts
        merged = twin(language_model)
        for attention, groups, known in zip(_attentions(merged, len(moments)), clusters, moments, strict=True):
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


def _attentions(language_model: nn.Module, layers: int) -> list[Any]:
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


def _check_rope(language_model: Any, head_dim: int) -> None:
    """Keys are turned in pairs of a head's two halves: the model's RoPE must turn the same pairs."""
    cos, _ = language_model.rotary_emb(torch.zeros(1, 1, head_dim), torch.ones(1, 1, dtype=torch.long))
    if cos.shape[-1] != head_dim or not torch.equal(*cos.chunk(2, dim=-1)):
        raise UserError("[heads] align needs RoPE that turns the halves of a whole head: set align = false")
