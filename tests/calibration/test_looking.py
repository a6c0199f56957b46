"""What a sample adds to the map, of random layers of any shape, against loops."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import attention_map
from calibration.looking import Look
from export.stages.tokens import TEXT as TEXT_TOKEN
from export.stages.tokens import VISUAL as VISUAL_TOKEN
from tests.calibration.loops import Means, Seen, gather_cache, gather_queries, gather_tokens


def softmax(query: np.ndarray, key: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of one head, [tokens, tokens]."""
    weights = np.zeros((len(query), len(key)))
    for q in range(len(query)):
        logits = np.array([scale * (query[q] @ key[t]) for t in range(q + 1)])
        exponents = np.exp(logits - logits.max())
        weights[q, : q + 1] = exponents / exponents.sum()
    return weights


@settings(max_examples=40)
@given(
    layers=st.integers(2, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 3), pairs=st.integers(1, 3),
    tokens=st.integers(2, 14), data=st.data(),
)  # fmt: skip
def test_sums_are_those_of_loops(
    layers: int, kv_heads: int, group: int, pairs: int, tokens: int, data: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, tokens - 1), "steps")
    prompt = data.draw(st.lists(st.integers(0, 1), min_size=tokens - steps, max_size=tokens - steps), "kinds")
    kinds = [*prompt, *[0] * steps]  # whatever answers is text
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    shape, scale = (tokens, 2 * pairs), float(rng.uniform(0.1, 2))
    query, key, value = (
        rng.normal(size=(layers, heads, *shape)).astype(np.float32) for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    attention = np.array(
        [
            [
                softmax(query[layer, h].astype(float), key[layer, h // group].astype(float), scale)
                for h in range(kv_heads * group)
            ]
            for layer in range(layers)
        ]
    )
    tokens_of = torch.tensor([VISUAL_TOKEN if kind else TEXT_TOKEN for kind in kinds])
    causal = torch.full((1, tokens, tokens), -1e4).triu(1)
    look = Look(tokens_of, steps, torch.ones(tokens, dtype=torch.bool), [causal] * layers)
    for layer in range(layers):
        q, k, v = (torch.from_numpy(part[layer])[None] for part in (query, key, value))
        out = look(layer, q, k, v, scale)
        mixed = [attention[layer, h] @ value[layer, h // group] for h in range(kv_heads * group)]
        np.testing.assert_allclose(out[0], mixed, atol=1e-4)

    seen, means = Seen(attention, key.astype(float), value.astype(float), kinds, steps), Means()
    gather_queries(means, seen)
    gather_tokens(means, seen, kv_heads)
    gather_cache(means, seen)
    sizes = attention_map.Sizes(layers, kv_heads * group, kv_heads, 2 * pairs)
    of_best, of_all = (means.array(name, (layers, kv_heads * group)) for name in ("of the best", "of all"))
    for statistic in attention_map.statistics():
        name = statistic.name
        if name not in look.sums[0]:
            continue  # of all layers, or of all samples together
        found = [layer[name] for layer in look.sums if name in layer]
        got = np.array([(summed / count).numpy() for summed, count in found])
        want = (
            of_best / of_all
            if name == "top_patch_share"
            else means.array(name, sizes.shape(statistic.metadata["axes"]))
        )
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=name)
