"""Head merge: clusters and folded weights, against the heads averaged by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines.errors import UserError
from export.attention import attention_by, full_attention, use_hook
from export.stages.heads import HeadMoments, Heads
from tests.export import tiny

CLUSTERS = [[[0, 2], [1], [3]], [[0], [1, 2, 3]], [[0], [1], [2], [3]]]  # of each layer's KV heads
COUNTS = [len(layer) for layer in CLUSTERS]


def moments_of(clusters: list[list[int]], head_dim: int) -> HeadMoments:
    """As if the heads of a cluster were equal, and those of different clusters opposite."""
    heads = sum(map(len, clusters))
    home = {head: number for number, cluster in enumerate(clusters) for head in cluster}
    sign = torch.tensor([[1.0 if home[i] == home[j] else -1.0 for j in range(heads)] for i in range(heads)])
    keys = (sign[:, :, None] / (head_dim // 2)).repeat(1, 1, head_dim // 2).to(torch.complex64)
    return HeadMoments(keys, sign[:, :, None, None] * torch.eye(head_dim) / head_dim)


def llama(kv_heads: int = 4, group: int = 2, head_dim: int = 16, bias: bool = True) -> Any:
    """A decoder with random weights, its biases too, that calls our attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=len(CLUSTERS),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=bias,
        initializer_range=0.3,
    )
    model: Any = transformers.LlamaModel(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_()
    use_hook(model)
    return model


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens).tril().log().clamp(min=-1e4)[None]


def run(model: Any, rows: Tensor, replace=lambda layer, key, value: (key, value)) -> tuple[Tensor, list]:
    """Hidden states of embeddings [1, tokens, hidden], and every layer's keys and values as they are cached."""
    cached = []

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        cached.append((key, value))
        key, value = replace(layer, key, value)
        return full_attention(query, key, value, causal(key.shape[2]), scale)

    with torch.no_grad(), attention_by(attention):
        return model(inputs_embeds=rows, use_cache=False)[0], cached


def means(heads: Tensor, clusters: list[list[int]]) -> Tensor:
    """Every head in place of which its cluster's mean stands, [1, kv_heads, tokens, head_dim]."""
    result = heads.clone()
    for cluster in clusters:
        for head in cluster:
            result[:, head] = sum(heads[:, other] for other in cluster) / len(cluster)
    return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (2, 10), (3, 80)])
def test_merged_heads_are_the_means_of_heads_after_rope(group: int, head_dim: int, bias: bool) -> None:
    model = llama(group=group, head_dim=head_dim, bias=bias)
    known = [moments_of(clusters, head_dim) for clusters in CLUSTERS]
    merged, counts = Heads(merge=True).fold(model, known)
    assert counts == COUNTS
    rows = torch.randn(1, 11, 24, generator=torch.Generator().manual_seed(1))
    want, cached = run(model, rows, lambda layer, *both: tuple(means(rows, CLUSTERS[layer]) for rows in both))
    got, now = run(merged, rows)
    for layer, clusters in enumerate(CLUSTERS):
        for plain, fewer in zip(cached[layer], now[layer], strict=True):
            wanted = means(plain, clusters)[:, [cluster[0] for cluster in clusters]]
            torch.testing.assert_close(fewer, wanted, atol=1e-6 * 10, rtol=1e-5)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (got - run(model, rows)[0]).abs().max() > 0.01  # the given model is as it was, and merging is no trifle


def test_all_that_is_not_merged_is_shared() -> None:
    model = llama()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    merged, _ = Heads(merge=True).fold(model, [moments_of(clusters, 16) for clusters in CLUSTERS])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    own = {id(weight) for weight in model.parameters()}
    new = {name for name, weight in merged.named_parameters() if id(weight) not in own}
    names = [f"{p}.{kind}" for p in ("q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")] + ["o_proj.weight"]
    assert new == {f"layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in names}


@pytest.mark.parametrize("align", [False, True])
def test_a_threshold_that_nothing_reaches_leaves_the_model_itself(align: bool) -> None:
    model = llama()
    known = [moments_of([[0, 1, 2, 3]], 16)] * len(CLUSTERS)
    merged, counts = Heads(merge=True, threshold=1.01, align=align).fold(model, known)
    assert merged is model
    assert counts == [4, 4, 4]


def test_each_layer_may_have_its_own_threshold() -> None:
    known = [moments_of([[0, 1], [2, 3]], 16)] * len(CLUSTERS)
    heads = Heads(merge=True, thresholds=[1.01, 0.9, -1.01])
    assert heads.groups(known) == [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]]
    with pytest.raises(UserError, match="thresholds has 3 values, the model 2 layers"):
        heads.groups(known[:2])


def test_no_padding_where_clusters_are_of_one_size() -> None:
    merged: Any = Heads(merge=True).fold(llama(), [moments_of([[0, 3], [1, 2]], 16)] * len(CLUSTERS))[0]
    assert merged.layers[0].self_attn.q_proj.weight.shape == (4 * 2 * 16, 24)


def test_a_token_receives_what_the_clusters_own_queries_give_it() -> None:
    """The query heads that fill up a cluster are copies: zeros would look at every token alike."""
    model, rows = llama(group=1), torch.randn(1, 11, 24)
    clusters = [[0, 1], [2], [3]]
    merged = Heads(merge=True).fold(model, [moments_of(clusters, 16)] * len(CLUSTERS))[0]
    received: list[Tensor] = []

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        weights = (query.unflatten(1, (key.shape[1], -1)) @ key[:, :, None].mT * scale + causal(11)).softmax(-1)
        received.append(weights.mean(dim=2))  # over the query heads of a KV head
        return full_attention(query, key, value, causal(11), scale)

    with torch.no_grad():
        for each in (model, merged):
            with attention_by(attention):
                each(inputs_embeds=rows, use_cache=False)
    plain, fewer = received[0], received[len(CLUSTERS)]
    torch.testing.assert_close(fewer[:, 1:], plain[:, 2:])


@st.composite
def similarities(draw: st.DrawFn) -> Tensor:
    """Cosines of some heads, many of them equal."""
    heads, rng = draw(st.integers(1, 9)), np.random.default_rng(draw(st.integers(0, 99)))
    cosines = np.round(rng.uniform(-1, 1, (heads, heads)), draw(st.sampled_from([1, 6])))
    upper = np.triu(cosines, 1)
    return torch.from_numpy(upper + upper.T + np.eye(heads))


def linked(cosines: np.ndarray, threshold: float, most: int) -> list[list[int]]:
    """Complete linkage by a shrinking table: the row of two joined clusters is the lower of theirs."""
    table = np.where(np.eye(len(cosines)) > 0, -np.inf, cosines)
    members = {i: [i] for i in range(len(cosines))}
    while True:
        allowed = table.copy()
        for a in members:
            for b in members:
                if len(members[a]) + len(members[b]) > most:
                    allowed[a, b] = -np.inf
        a, b = divmod(int(np.argmax(allowed)), len(cosines))  # the first of equal ones
        if a == b or allowed[a, b] < threshold:
            return [sorted(heads) for _, heads in sorted(members.items())]
        table[a] = table[:, a] = np.minimum(table[a], table[b])
        table[b] = table[:, b] = -np.inf
        members[a] += members.pop(b)


@given(similarities(), st.floats(-1, 1), st.integers(2, 5))
def test_clusters_are_those_of_complete_linkage(similarity: Tensor, threshold: float, most: int) -> None:
    clusters = Heads(merge=True, most=most).clusters(similarity, threshold)
    assert clusters == linked(similarity.numpy(), threshold, most)
    assert sorted(head for cluster in clusters for head in cluster) == list(range(len(similarity)))
    for cluster in clusters:
        assert len(cluster) <= most
        assert all(similarity[i, j] >= threshold for i in cluster for j in cluster)


@pytest.mark.parametrize(
    ("kind", "part"),
    [("Qwen3", "q_norm"), ("Gemma3Text", "q_norm"), ("GptOss", "sinks"), ("DeepseekV3", "q_proj"), ("Phi3", "q_proj")],
)
def test_models_whose_heads_are_more_than_projections_are_refused(kind: str, part: str) -> None:
    sizes = {
        "vocab_size": 9, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    if kind in ("GptOss", "DeepseekV3"):
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config)
    with pytest.raises(UserError, match=rf"\[heads\].*attention has .*{part}"):
        Heads(merge=True).fold(model, [moments_of([[0, 1], [2], [3]], 8)])


def test_alignment_refuses_rope_that_turns_other_pairs() -> None:
    model, known = llama(bias=False), [moments_of([[0, 1], [2], [3]], 16)] * len(CLUSTERS)
    plain = model.rotary_emb.forward

    def interleaved(rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[..., : part.shape[-1] // 2].repeat_interleave(2, dim=-1) for part in plain(rows, positions))

    model.rotary_emb.forward = interleaved
    with pytest.raises(UserError, match="set align = false"):
        Heads(merge=True, align=True).fold(model, known)
    assert Heads(merge=True).fold(model, known)[1] == [3, 3, 3]


@pytest.mark.parametrize("most", [1, 0, -3])
def test_knobs_out_of_range(most: int) -> None:
    with pytest.raises(UserError, match=r"test.heads: most must be at least 2"):
        tiny.recipe(heads={"merge": True, "most": most})
