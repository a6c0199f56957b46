"""How tokens are chosen, against Hugging Face's processors and against the formulas told with loops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UserError
from runtime import sampling
from runtime.sampling import Distribution, Sampler, Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

INF = float("inf")
EQUALS = np.full(8, 2.5, np.float32)


@st.composite
def logits(draw: st.DrawFn) -> np.ndarray:
    """Of any size and spread; often with ties, sometimes with tokens that the model rules out, never all."""
    size = draw(st.integers(2, 80))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.normal(0, draw(st.sampled_from([0.1, 1.0, 5.0, 40.0])), size).astype(np.float32)
    if draw(st.booleans()):
        values = np.round(values)
    if draw(st.booleans()):
        values[rng.random(size) < 0.3] = -INF
        values[rng.integers(size)] = 1.0
    return values


def processed(values: np.ndarray, said: list[int], **options: Any) -> np.ndarray:
    """What Hugging Face's `generate` makes of logits: its own processors, in its own order."""
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    owner = transformers.GenerationMixin()
    owner.config = SimpleNamespace(is_encoder_decoder=False)
    processors = owner._get_logits_processor(config, len(said), device="cpu", logits_processor=[])
    return processors(torch.tensor([said], dtype=torch.int64), torch.tensor(values[None]))[0].numpy()


def softmax(scores: np.ndarray) -> np.ndarray:
    exact = np.exp(scores.astype(np.float64) - scores.max())
    return exact / exact.sum()


def kept(scores: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(scores)).tolist()


def weights(values: np.ndarray, **options: Any) -> np.ndarray:
    """Of each token, as a sampler draws by it, but for top-p and min-p."""
    few, tokens = sampling.weigh(values - values.max(), Sampling(**{"temperature": 1.0, **options}))
    own = np.zeros_like(values)
    own[slice(None) if tokens is None else tokens] = few
    return own


def drawn(values: np.ndarray, **options: Any) -> list[int]:
    """Tokens that a sampler takes as soon as its numbers fall on them; of those with a chance that floats can hit."""
    own = weights(values, **options).astype(np.float64)
    found = []
    for token in np.flatnonzero(own > math.exp(-25)).tolist():
        start = token - token % sampling.BLOCK
        block, before = own[start : start + sampling.BLOCK], own[:start].sum()
        first = (before + block.sum() / 2) / own.sum()
        second = (own[start:token].sum() + own[token] / 2) / block.sum()
        sampler = Sampler(Sampling(**{"temperature": 1.0, **options}))
        with patch.object(sampler, "_random", SimpleNamespace(random=iter([first, second]).__next__)):
            try:
                assert sampler.choose(values) == token
                found.append(token)
            except StopIteration:  # it asked for another number, as this token was refused
                pass
    return found


def possible(values: np.ndarray) -> set[int]:
    """What a random number falls on, but for rounding."""
    return set(np.flatnonzero(values - values.max() > -25).tolist())


@given(logits(), st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.3, 20.0]))
def test_temperature(values: np.ndarray, temperature: float) -> None:
    theirs = processed(values, [0], temperature=temperature)
    ours = weights(values, temperature=temperature)
    np.testing.assert_allclose(ours / ours.sum(dtype=np.float64), softmax(theirs), atol=2e-5)
    assert ours.max() == 1


@given(logits(), st.integers(1, 90), st.sampled_from([3, 256]))
def test_top_k(values: np.ndarray, k: int, block: int) -> None:
    theirs = processed(values, [0], top_k=k)
    with patch.object(sampling, "BLOCK", block):
        ours = weights(values, top_k=k)
        wanted = sorted(range(len(values)), key=lambda i: -values[i])[:k]
        assert sampling.largest(values, k).tolist() == np.flatnonzero(values >= values[wanted[-1]]).tolist()
    assert set(np.flatnonzero(ours)) & possible(values) == set(kept(theirs)) & possible(values)
    np.testing.assert_allclose(ours / ours.sum(dtype=np.float64), softmax(theirs), atol=2e-5)


@given(logits(), st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1)), st.sampled_from([3, 256]))
def test_top_p(values: np.ndarray, p: float, block: int) -> None:
    theirs = processed(values, [0], top_p=p)
    with patch.object(sampling, "BLOCK", block):
        ours = drawn(values, top_p=p)
    # The formula: from the least likely on, dropped while all that is dropped has at most 1 - p.
    probabilities, total, wanted, near = softmax(values), 0.0, [], False
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    for token in order:
        total += probabilities[token]
        near |= abs(total - (1 - p)) < 1e-5  # float32 and float64 may fall on either side
        if (total > 1 - p or token == order[-1]) and probabilities[token] > 0:
            wanted.append(token)
    if not near:
        assert set(ours) & possible(values) == set(wanted) & possible(values)
        their = set(kept(theirs)) & possible(values)
        assert sorted(values[list(set(ours) & possible(values))]) == sorted(values[list(their)])  # of equals any
    assert ours


@pytest.mark.parametrize(("p", "count"), [(0.0, 1), (0.1, 1), (0.125, 1), (0.13, 2), (0.5, 4), (0.75, 6), (1.0, 8)])
def test_top_p_of_equals_at_its_very_edge(p: float, count: int) -> None:
    """Eight of 1/8 each, which floats hold exactly: at most 1 - p is dropped, the first of them first."""
    with patch.object(sampling, "BLOCK", 3):
        ours = drawn(EQUALS, top_p=p)
    assert ours == list(range(8 - count, 8)) == kept(processed(EQUALS, [0], top_p=p))


@given(logits(), st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)))
def test_min_p(values: np.ndarray, p: float) -> None:
    theirs = processed(values, [0], min_p=p)
    ours = drawn(values, min_p=p)
    probabilities = softmax(values)
    shares = [probability / max(probabilities) for probability in probabilities]
    wanted = {i for i, share in enumerate(shares) if share >= p}
    if all(share == 1 or abs(share - p) > 1e-5 for share in shares):
        assert set(ours) & possible(values) == set(kept(theirs)) & possible(values) == wanted & possible(values)


@given(logits(), st.lists(st.integers(0, 79), max_size=30), st.sampled_from([0.5, 1.1, 1.5, 7.0]))
def test_repetition_penalty(values: np.ndarray, said: list[int], penalty: float) -> None:
    sampling.penalize(ours := values.copy(), set(said), penalty)
    np.testing.assert_array_equal(ours, processed(values, said or [79], repetition_penalty=penalty) if said else values)
    for token, value in enumerate(values):
        wanted = value if token not in said else value * penalty if value < 0 else value / penalty
        assert ours[token] == pytest.approx(wanted, rel=1e-6)


def everything(values: np.ndarray, said: list[int], s: Sampling) -> np.ndarray:
    """Probabilities by Hugging Face."""
    options = {name: getattr(s, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    return softmax(processed(values, said, **options))


def surprise(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's chi-square, in standard deviations above its mean; classes expected under five times are one."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    got, want = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    freedom = len(want) - 1 - (want[-1] == 0)
    statistic = sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True) if w)
    return (statistic - freedom) / math.sqrt(2 * freedom)


SETTINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, seed=2),
    Sampling(temperature=1.7, top_k=9, seed=3),
    Sampling(temperature=1.0, top_p=0.8, seed=4),
    Sampling(temperature=1.2, min_p=0.1, seed=5),
    Sampling(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.6, seed=6),
]
DRAWS = 20_000


@pytest.mark.parametrize("block", [7, 256])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_frequencies_are_the_probabilities(setting: Sampling, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of many draws against Hugging Face's probabilities, and the proof that it sees a wrong temperature."""
    monkeypatch.setattr(sampling, "BLOCK", block)
    values = np.random.default_rng(7).normal(0, 2, 40).astype(np.float32)
    values[3] = -INF
    said = [5, 6, int(values.argmax())]
    sampler, counts = Sampler(setting, said), np.zeros(40)
    for _ in range(DRAWS):
        sampler._said = set(said)  # every draw is a first one
        counts[sampler.choose(values)] += 1
    probabilities = everything(values, said, setting)
    assert counts[probabilities == 0].sum() == 0
    assert surprise(counts, probabilities) < 4
    warmer = Sampling(**{**setting.__dict__, "temperature": setting.temperature * 1.15})
    assert surprise(counts, everything(values, said, warmer)) > 6


@given(logits(), st.integers(0, 2**32), st.floats(0.01, 30), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
def test_what_is_drawn_was_possible(
    values: np.ndarray, seed: int, temperature: float, k: int, p: float, least: float
) -> None:
    setting = Sampling(temperature, k, p, least, 1.3, seed=seed)
    sampler, said = Sampler(setting), [0]
    for _ in range(5):
        token = sampler.choose(values)
        assert np.isfinite(values[token])
        said.append(token)
    assert sampler._said == set(said[1:])


@given(logits(), st.lists(st.integers(0, 79), max_size=9), st.sampled_from([0.5, 1.0, 1.8]))
def test_greedy_takes_the_likeliest_after_the_penalty(values: np.ndarray, said: list[int], penalty: float) -> None:
    sampler, said = Sampler(Sampling(repetition_penalty=penalty), said), list(said)
    for _ in range(4):
        wanted = values if not said or penalty == 1 else processed(values, said, repetition_penalty=penalty)
        token = sampler.choose(values)
        assert token == int(np.argmax(wanted))
        said.append(token)


def test_temperature_0_is_the_limit() -> None:
    values = np.random.default_rng(0).normal(0, 3, 50).astype(np.float32)
    sampler = Sampler(Sampling(temperature=0.01, seed=0))
    assert {sampler.choose(values) for _ in range(50)} == {Sampler(Sampling()).choose(values)}


@given(logits(), st.integers(0, 2**32), st.sampled_from([3, 7, 256]), st.sampled_from([0, 4]), st.floats(0.1, 1))
def test_which_tokens_a_seed_gives(values: np.ndarray, seed: int, block: int, k: int, p: float) -> None:
    """The first number chooses a block of the vocabulary by its weight, the second one of its tokens.

    One that top-p drops makes all that is no likelier 0, and two more numbers are drawn.
    """

    def first(shares: list[float], number: float) -> int:
        reached, sought = 0.0, number * sum(shares)
        for place, share in enumerate(shares):
            reached += share
            if abs(reached - sought) < 1e-9 * sum(shares):
                return -1  # any rounding decides
            if reached > sought:
                return place
        return -1

    setting, numbers = Sampling(0.9, k, p, seed=seed), np.random.default_rng(seed)
    with patch.object(sampling, "BLOCK", block):
        sampler = Sampler(setting)
        own = weights(values, temperature=0.9, top_k=k).astype(np.float64)
        tokens = np.flatnonzero(own) if k else np.arange(len(own))  # in the order that they are drawn from
        for _ in range(4):
            left = own[tokens].tolist()
            while True:
                blocks = [left[start : start + block] for start in range(0, len(left), block)]
                chosen = first([sum(each) for each in blocks], numbers.random())
                place = first(blocks[chosen], numbers.random())
                if -1 in (chosen, place):
                    return
                place += chosen * block
                rest = [share if (share, other) > (left[place], place) else 0.0 for other, share in enumerate(left)]
                if abs(sum(rest) - p * sum(own)) < 1e-5 * sum(own):
                    return
                if p == 1 or sum(rest) < p * sum(own) or not any(rest):
                    break
                left = rest
            assert sampler.choose(values) == tokens[place]


def test_a_seed_gives_the_same_tokens_whatever_other_requests_draw() -> None:
    steps = np.random.default_rng(0).normal(0, 1, (60, 40)).astype(np.float32)
    alone = [[sampler.choose(row) for row in steps] for sampler in (Sampler(Sampling(1.0, seed=s)) for s in (1, 2))]
    first, second = (Sampler(Sampling(1.0, seed=seed)) for seed in (1, 2))
    turns = [(first.choose(row), second.choose(row)) for row in steps]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone
    assert alone[0] != alone[1]
    free = [[sampler.choose(row) for row in steps] for sampler in (Sampler(Sampling(1.0)), Sampler(Sampling(1.0)))]
    assert free[0] != free[1]


@pytest.mark.parametrize(
    "setting", [Sampling(), Sampling(1.0), Sampling(1.0, 3, 0.5, 0.1, 2.0), Sampling(0, 0, 1, 0, 2.0)]
)
@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [1.0, INF, 2.0], [-INF, -INF], [math.nan], [-INF, math.nan]])
def test_logits_that_are_no_numbers(setting: Sampling, values: list[float]) -> None:
    with pytest.raises(UserError, match="logits are not numbers"):
        Sampler(setting, [0]).choose(np.array(values, np.float32))


@given(logits(), st.integers(0, 100), st.data())
def test_logprobs(values: np.ndarray, top: int, data: st.DataObject) -> None:
    token = data.draw(st.sampled_from(kept(values)))
    distribution = Distribution()
    for logits in (values + 3, values):  # the arrays of a step before are used again
        distribution.read(logits)
    found = distribution.logprob(values, token, top)
    wanted = torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1).numpy()
    assert found.token == token
    assert found.logprob == pytest.approx(wanted[token], abs=1e-4)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top]
    assert sorted(values[i] for i, _ in found.top) == sorted(values[order])
    assert [value for _, value in found.top] == pytest.approx([wanted[i] for i, _ in found.top], abs=1e-4)
    assert [value for _, value in found.top] == sorted((value for _, value in found.top), reverse=True)


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.integers(0, 3))
def test_entropy(finite: list[float], impossible: int) -> None:
    total = sum(math.exp(value) for value in finite)
    probabilities = [math.exp(value) / total for value in finite]
    wanted = -sum(p * math.log(p) for p in probabilities if p > 0)
    assert entropy([*finite, *[-INF] * impossible]) == pytest.approx(wanted, abs=1e-4)


def test_entropy_of_what_is_certain_and_of_what_is_not() -> None:
    assert entropy([0, 900, -900]) == 0
    assert entropy([0] * 49_152) == pytest.approx(math.log(49_152), rel=1e-5)


def entropy(values: list[float]) -> float:
    distribution = Distribution()
    distribution.read(np.array(values, np.float32))
    return distribution.entropy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature, where it is not 0, must be from 0.01 to 100, got -0.1"),
        ({"temperature": 1e-5}, "temperature.*from 0.01 to 100"),
        ({"temperature": math.nan}, "temperature.*must be a number, got nan"),
        ({"temperature": "1"}, "temperature.*must be a number, got '1'"),
        ({"temperature": True}, "temperature.*must be a number, got True"),
        ({"temperature": False}, "temperature.*must be a number, got False"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_k": 2.0}, "top_k must be a whole number, got 2.0"),
        ({"top_p": 1.01}, "top_p must be from 0 to 1, got 1.01"),
        ({"top_p": math.nan}, "top_p must be a number"),
        ({"min_p": -1}, "min_p must be from 0 to 1, got -1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.01 to 100, got 0"),
        ({"repetition_penalty": INF}, "repetition_penalty must be from 0.01 to 100, got inf"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"stop": [""]}, "stop must be texts, none of them empty"),
        ({"stop": 3}, "stop must be texts"),
        ({"stop": ["a", 3]}, "stop must be texts"),
    ],
)
def test_mistake_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Sampling(**options)
    assert "\n" not in str(error.value)


def test_one_stop_string_may_be_given_by_itself() -> None:
    assert Sampling(stop="ab") == Sampling(stop=["ab"]) == Sampling(stop=("ab",))
