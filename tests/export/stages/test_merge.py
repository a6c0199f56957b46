"""Merging against a plain statement of it, what it preserves, and what it must never do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.attention import store_window_attention
from export.checkpoint import Checkpoint
from export.compress import Compress
from export.stages.merge import D2O, Evict, ThreeWay
from export.stages.merge.merge import Merge
from export.stages.tokens import TEXT, VISUAL, Tokens
from tests.export import tiny
from tests.export.stages.strategies import cached, seeds, tensor, tokens_of
from tests.export.tiny import Driver, Prompt, greedy

FIELDS = ("key", "value", "positions", "kinds", "bias", "mass")
THREE = ThreeWay(merge_above=0.3, evict_above=0.1)  # random keys are rarely more alike
MERGES = [
    THREE,
    ThreeWay(merge_above=0.3, evict_above=0.1, weigh="count", keys="mean"),
    ThreeWay(),
    D2O(),
    D2O(keys="mean"),
]
merges = st.sampled_from(MERGES)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tokens, torch.Tensor]:
    """Tokens, some of them near copies of others, and what was kept: any of them, real ones first."""
    tokens = draw(cached())
    rng = np.random.default_rng(draw(seeds))
    batch, heads, count = tokens.mass.shape
    like = tensor(rng.integers(0, count, (batch, heads, count)))[..., None].expand(tokens.key.shape)
    noise = tensor(rng.standard_normal(tokens.key.shape).astype(np.float32)) * draw(st.sampled_from([0.0, 0.3, 3.0]))
    tokens = dataclasses.replace(tokens, key=tokens.key.gather(2, like) + noise)
    if draw(st.booleans()):
        center = tensor(rng.standard_normal((heads, 1, tokens.key.shape[-1])).astype(np.float32))
        tokens = dataclasses.replace(tokens, key=tokens.key - center, center=center)
    priority = tensor(rng.random((batch, heads, count))) + tokens.real
    return tokens, priority.topk(draw(st.integers(1, count)), dim=-1).indices.sort(-1).values


def only(tokens: Tokens, index: torch.Tensor) -> Tokens:
    """The tokens at `index` [batch, kv_heads, K]."""
    rows = index[..., None].expand(*index.shape, tokens.key.shape[-1])
    taken = {name: getattr(tokens, name).gather(2, rows if name in ("key", "value") else index) for name in FIELDS}
    return Tokens(**taken, center=tokens.center)


def merged(merge: Merge | Evict, tokens: Tokens, index: torch.Tensor) -> Tokens:
    return merge(tokens, only(tokens, index), index)


def stated(merge: Merge, tokens: Tokens, index: torch.Tensor) -> dict[str, np.ndarray]:
    """The statement: one dropped token after another, in float64."""
    kept = only(tokens, index)
    out = {name: getattr(kept, name).double().numpy().copy() for name in ("key", "value", "bias", "mass")}
    every = {name: getattr(tokens, name).double().numpy() for name in ("value", "bias", "mass")}
    key, visual = tokens.plain_key.double().numpy(), (tokens.kinds == VISUAL).numpy()
    for b, h in np.ndindex(*index.shape[:2]):
        places = index[b, h].tolist()
        real = tokens.real[b, h].numpy()
        nearest: dict[int, tuple[float, int]] = {}
        for i in np.flatnonzero(real).tolist():
            if i in places:
                continue
            best = (-2.0, -1)
            for slot, place in enumerate(places):
                if real[place] and visual[b, h, place] == visual[b, h, i]:
                    x, y = key[b, h, i], key[b, h, place]
                    cosine = float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))
                    if cosine > best[0] + 1e-9:
                        best = (cosine, slot)
            if best[1] >= 0:
                nearest[i] = best
        mean = np.mean([cosine for cosine, _ in nearest.values()]) if nearest else 0.0
        taken: dict[int, list[int]] = {}
        for i, (cosine, slot) in nearest.items():
            if isinstance(merge, ThreeWay):
                high = every["mass"][b, h, i] > every["mass"][b, h, places[slot]]
                go = cosine > merge.merge_above or (high and cosine > merge.evict_above)
            else:
                go = cosine >= mean - 1e-6
            if go:
                taken.setdefault(slot, []).append(i)
        for slot, group in taken.items():
            place = places[slot]
            number = {i: math.exp(every["bias"][b, h, i]) for i in [place, *group]}
            if isinstance(merge, D2O):
                weight = {i: number[i] * math.exp(1.0 if i == place else nearest[i][0]) for i in number}
            elif merge.weigh == "count":
                weight = number
            else:
                weight = {i: every["mass"][b, h, i] + 1e-6 * number[i] for i in number}
            total = sum(weight.values())
            out["value"][b, h, slot] = sum(weight[i] / total * every["value"][b, h, i] for i in weight)
            if merge.keys == "mean":
                mixed = sum(weight[i] / total * key[b, h, i] for i in weight)
                mixed *= np.linalg.norm(key[b, h, place]) / np.linalg.norm(mixed)
                out["key"][b, h, slot] += mixed - key[b, h, place]
            out["bias"][b, h, slot] = math.log(sum(number.values()))
            out["mass"][b, h, slot] = sum(every["mass"][b, h, i] for i in weight)
    return out


def undecided(merge: Merge, tokens: Tokens, index: torch.Tensor) -> bool:
    """Whether float32 and float64 may decide differently: equally near kept tokens, or a cosine at a limit."""
    kept = only(tokens, index)
    unit = [torch.nn.functional.normalize(t.plain_key.double(), dim=-1) for t in (tokens, kept)]
    cosine = unit[0] @ unit[1].mT
    if cosine.shape[-1] > 1:
        best = cosine.topk(2, dim=-1).values
        gap = best[..., 0] - best[..., 1]
        if bool(((gap < 1e-5) & (gap > 0)).any()):
            return True
    highest = cosine.amax(-1)
    limits = [merge.merge_above, merge.evict_above] if isinstance(merge, ThreeWay) else []
    return any(bool(((highest - limit).abs() < 1e-5).any()) for limit in limits)


@given(choice=choices(), merge=merges)
def test_merge_is_its_statement(choice: tuple[Tokens, torch.Tensor], merge: Merge) -> None:
    tokens, index = choice
    if undecided(merge, tokens, index):
        return
    got, want = merged(merge, tokens, index), stated(merge, tokens, index)
    for name, rows in want.items():
        np.testing.assert_allclose(getattr(got, name).numpy(), rows, rtol=2e-4, atol=2e-4, err_msg=name)


@given(choice=choices(), merge=merges)
def test_merge_never_moves_drops_or_fills_a_slot(choice: tuple[Tokens, torch.Tensor], merge: Merge) -> None:
    tokens, index = choice
    kept, got = only(tokens, index), merged(merge, tokens, index)
    assert torch.equal(got.positions, kept.positions)
    assert torch.equal(got.kinds, kept.kinds)
    assert torch.equal(got.real, kept.real)
    for name in ("key", "value", "mass"):
        assert getattr(got, name).isfinite().all()
    for name in ("key", "value", "bias", "mass"):  # slots that took nothing in are the same to the bit
        same = got.bias == kept.bias
        assert torch.equal(getattr(got, name)[same], getattr(kept, name)[same]), name
    if merge.keys == "own":
        assert torch.equal(got.key, kept.key)
    else:
        torch.testing.assert_close(got.plain_key.norm(dim=-1), kept.plain_key.norm(dim=-1), rtol=1e-4, atol=1e-4)


@given(choice=choices(), keys=st.sampled_from(["own", "mean"]))
def test_counts_and_masses_add_up(choice: tuple[Tokens, torch.Tensor], keys: str) -> None:
    """A merge of all there is: of each modality that is kept at all, nothing is lost."""
    tokens, index = choice
    everything = ThreeWay(merge_above=-1.0, evict_above=-1.0, keys=keys)  # type: ignore[arg-type]
    kept, got = only(tokens, index), merged(everything, tokens, index)
    for visual in (False, True):
        all_of, kept_of = (t.real & ((t.kinds == VISUAL) == visual) for t in (tokens, kept))
        held = kept_of.any(-1)
        for rows, new in ((tokens.bias.exp(), got.bias.exp()), (tokens.mass, got.mass)):
            before, after = (rows * all_of).sum(-1), (new * kept_of).sum(-1)
            torch.testing.assert_close(after[held], before[held], rtol=1e-5, atol=1e-5)
            assert (after[~held] == 0).all()


@given(choice=choices(), merge=merges)
def test_a_batch_is_its_samples(choice: tuple[Tokens, torch.Tensor], merge: Merge) -> None:
    tokens, index = choice
    if undecided(merge, tokens, index):
        return
    whole = merged(merge, tokens, index)
    for b in range(len(index)):
        rows = {name: getattr(tokens, name)[b : b + 1] for name in FIELDS}
        alone = merged(merge, Tokens(**rows, center=tokens.center), index[b : b + 1])
        for name in FIELDS:
            torch.testing.assert_close(getattr(alone, name)[0], getattr(whole, name)[b], rtol=1e-4, atol=1e-4)


@given(choice=choices(), merge=merges, seed=seeds)
def test_the_order_of_dropped_tokens_does_not_matter(
    choice: tuple[Tokens, torch.Tensor], merge: Merge, seed: int
) -> None:
    tokens, index = choice
    if undecided(merge, tokens, index):
        return
    dropped = [i for i in range(tokens.mass.shape[-1]) if i not in index[0, 0]]
    order = np.arange(tokens.mass.shape[-1])
    order[dropped] = np.random.default_rng(seed).permutation(dropped)
    one = Tokens(**{name: getattr(tokens, name)[:1, :1] for name in FIELDS})
    mixed = Tokens(**{name: getattr(one, name)[:, :, order] for name in FIELDS})
    plain, shuffled = (merged(merge, t, index[:1, :1]) for t in (one, mixed))
    for name in FIELDS:
        torch.testing.assert_close(getattr(shuffled, name), getattr(plain, name), rtol=1e-4, atol=1e-4)


def pair(cosine: float, mass: tuple[float, float] = (1.0, 1.0), kinds: tuple[int, int] = (TEXT, TEXT)) -> Tokens:
    """Two tokens whose keys have this cosine."""
    key = torch.tensor([[1.0, 0.0], [cosine, math.sqrt(1 - cosine**2)]])[None, None]
    tokens = tokens_of(key, torch.tensor([[1.0, 0.0], [0.0, 1.0]])[None, None], torch.tensor([[mass]]))
    return dataclasses.replace(tokens, kinds=torch.tensor([[kinds]], dtype=torch.int32))


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (pair(0.9), [0.5, 0.5]),
        (pair(0.9, (3.0, 1.0)), [0.75, 0.25]),  # by the attention that they received
        (pair(0.9, (0.0, 0.0)), [0.5, 0.5]),  # none was counted
        (pair(0.7, (3.0, 1.0)), [1.0, 0.0]),  # in between, and its score is low
        (pair(0.7, (1.0, 3.0)), [0.25, 0.75]),  # in between, and its score is high
        (pair(0.7, (0.0, 0.0)), [1.0, 0.0]),
        (pair(0.4, (1.0, 3.0)), [1.0, 0.0]),  # nothing resembles it
        (pair(0.9, kinds=(TEXT, VISUAL)), [1.0, 0.0]),
        (pair(0.9, kinds=(VISUAL, VISUAL)), [0.5, 0.5]),
    ],
)
def test_the_three_ways(tokens: Tokens, value: list[float]) -> None:
    got = merged(ThreeWay(), tokens, torch.tensor([[[0]]]))
    torch.testing.assert_close(got.value[0, 0, 0], torch.tensor(value), atol=1e-5, rtol=0)
    assert got.bias.exp().item() == pytest.approx(1 if value == [1, 0] else 2)


def test_d2o_merges_what_is_nearer_than_the_mean() -> None:
    angles = torch.tensor([0.0, 0.2, 0.4, 1.2])
    key = torch.stack([angles.cos(), angles.sin(), 0 * angles, 0 * angles], -1)[None, None]
    got = merged(D2O(), tokens_of(key, torch.eye(4)[None, None]), torch.tensor([[[0]]]))
    e = [math.e, math.exp(math.cos(0.2)), math.exp(math.cos(0.4)), 0.0]  # cos(1.2) is below the mean
    torch.testing.assert_close(got.value[0, 0, 0], torch.tensor(e) / sum(e))
    assert got.bias.exp().item() == pytest.approx(3)


@given(seed=seeds, keys=st.sampled_from(["own", "mean"]))
def test_merging_equal_keys_leaves_attention_as_it_was(seed: int, keys: str) -> None:
    rng = np.random.default_rng(seed)
    key = tensor(rng.standard_normal((1, 1, 4, 8)).astype(np.float32))[:, :, [0, 1, 2, 3, 0, 1, 2, 2]]
    tokens = tokens_of(key, tensor(rng.standard_normal((1, 1, 8, 8)).astype(np.float32)))
    got = merged(ThreeWay(merge_above=0.999, weigh="count", keys=keys), tokens, torch.arange(4)[None, None])  # type: ignore[arg-type]
    query, nothing = tensor(rng.standard_normal((1, 2, 3, 8)).astype(np.float32)), torch.zeros(1, 1, 0, 8)

    def output(t: Tokens) -> torch.Tensor:
        return store_window_attention(query, t.key, t.value, t.bias, nothing, nothing, torch.zeros(1, 3, 0), 0.3)[0]

    torch.testing.assert_close(output(got), output(tokens), rtol=1e-4, atol=1e-5)


def test_counts_survive_compactions_in_a_float16_bias() -> None:
    """Sixty times, four more tokens are merged into one slot; in between the bias is stored as float16."""
    merge, index = ThreeWay(), torch.tensor([[[0, 1]]])
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], *([[1.0, 0.0]] * 4)])[None, None]
    bias = torch.zeros(1, 1, 2)
    for _ in range(60):
        tokens = dataclasses.replace(tokens_of(rows, rows), bias=torch.cat([bias, torch.zeros(1, 1, 4)], 2))
        bias = merged(merge, tokens, index).bias.half().float()
        assert torch.equal(bias[..., 1], torch.zeros(1, 1))
    assert bias[0, 0, 0].exp().item() == pytest.approx(241, rel=0.02)


@pytest.mark.parametrize("merge", [ThreeWay(), D2O()])
def test_an_idle_store_does_not_drift(merge: Merge) -> None:
    """Nothing is dropped but padding: a hundred compactions change no bit."""
    rng = np.random.default_rng(0)
    tokens = tokens_of(*(tensor(rng.standard_normal((1, 2, 9, 8)).astype(np.float32)) for _ in range(2)))
    bias = torch.tensor(rng.integers(1, 400, (1, 2, 9))).float().log().half().float()
    bias[:, :, 6:] = -torch.inf
    tokens = dataclasses.replace(tokens, bias=bias)
    index = torch.arange(6).expand(1, 2, 6)
    for _ in range(100):
        got = merged(merge, tokens, index)
        for name in FIELDS:
            assert torch.equal(getattr(got, name), getattr(tokens, name)[:, :, :6]), name


def test_compress_merges_before_it_stores(checkpoint: Checkpoint) -> None:
    key = torch.ones(1, 1, 6, 8)
    tokens = tokens_of(key, key * torch.arange(6.0)[:, None], torch.tensor([[[5.0, 1, 1, 1, 1, 1]]]))
    tables = {"merge": {"method": "three-way"}, "protect": {"sinks": 1, "recent": 0}}
    store = Compress(tiny.recipe(**tables), 1, 0.0, None)(tokens)
    assert store["store_bias"].float().exp().item() == pytest.approx(6, rel=1e-3)
    assert store["store_mass"].item() == 10
    torch.testing.assert_close(store["value_store"], torch.full((1, 1, 1, 8), 1.5))
    kept = Compress(tiny.recipe(**tables), 6, 0.0, None)(tokens)  # nothing to choose: nothing to merge
    assert torch.equal(kept["value_store"], tokens.value)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[Prompt]:
    return [
        Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)]),
        Prompt(checkpoint, "how many digits ?", [tiny.picture(3)]),
    ]


SMALL: dict[str, Any] = {"budget": {"keep": 0.3}, "protect": {"sinks": 2, "recent": 2, "separators": 1}}


def test_no_token_is_lost_over_compactions(checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    everything = {"method": "three-way", "merge_above": -1.0, "evict_above": -1.0}
    driver = Driver(checkpoint.decoder, tiny.recipe(**SMALL, merge=everything, quantize={"method": "float16"}), 64)
    greedy(driver, checkpoint, prompts[:1], 40)
    assert driver.compactions >= 4
    for layer in range(checkpoint.decoder.num_layers):
        counts = driver.tensors[f"store_bias.{layer}"].float().exp().sum(-1) + driver.count
        np.testing.assert_allclose(counts, len(prompts[0]) + 39, rtol=0.005)


@pytest.mark.parametrize("merge", [{"method": "three-way", "merge_above": 0.5}, {"method": "d2o", "keys": "mean"}])
@pytest.mark.parametrize("modality", ["joint", "density"])
def test_a_batch_of_two_generates_as_two_single_runs(
    checkpoint: Checkpoint, prompts: list[Prompt], merge: dict, modality: str
) -> None:
    recipe = tiny.recipe(**SMALL, merge=merge, modality={"method": modality})
    both = Driver(checkpoint.decoder, recipe, 64, batch=2)
    tokens, logits = greedy(both, checkpoint, prompts, 30)
    assert float(both.tensors["store_bias.0"].max()) > 0  # something was merged
    for item, single in enumerate(prompts):
        alone = Driver(checkpoint.decoder, recipe, 64)
        want_tokens, want = greedy(alone, checkpoint, [single], 30)
        assert tokens[item].tolist() == want_tokens[0].tolist()
        torch.testing.assert_close(logits[item], want[0], atol=1e-3, rtol=0)


@given(choice=choices())
def test_evict_is_no_work(choice: tuple[Tokens, torch.Tensor]) -> None:
    kept = only(*choice)
    assert Evict()(choice[0], kept, choice[1]) is kept
    assert not tiny.recipe().needs_kinds
    assert tiny.recipe(merge={"method": "d2o"}).needs_kinds


@pytest.mark.parametrize("wrong", [{"merge_above": 0.4}, {"evict_above": -2.0}, {"merge_above": 1.5}])
def test_three_way_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        ThreeWay(**wrong)
