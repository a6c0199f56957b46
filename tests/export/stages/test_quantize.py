"""Every method of quantization: its round trip against numpy loops, its error, its bytes, and what compaction does."""

from __future__ import annotations

import typing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export.attention import store_window_attention
from export.compress import KeyStatistics
from export.packing import pack, packed_size, unpack
from export.stages import quantize
from export.stages.quantize.blockwise import Blockwise
from export.stages.quantize.quantize import Quantize
from export.stages.quantize.rotation import rotate
from export.stages.tokens import Tokens
from tests.export import tiny
from tests.export.stages import quantized
from tests.export.stages.strategies import cached, seeds, tensor, tokens_of

METHODS = typing.get_args(quantize.Methods)
# A method and its knobs -> bits, tokens and channels of a block, offset: of keys, then of values.
Rows = tuple[int, int | None, int | None, bool]
BLOCKS: list[tuple[dict[str, Any], Rows, Rows]] = [
    ({"method": "int8"}, (8, None, 1, False), (8, 1, None, False)),
    ({"method": "int8", "scales": "float32", "center": False}, (8, None, 1, False), (8, 1, None, False)),
    ({"method": "per-head"}, (8, None, None, False), (8, None, None, False)),
    ({"method": "per-head", "rotate": True}, (8, None, None, False), (8, None, None, False)),
    ({"method": "per-token"}, (8, 1, 32, False), (8, 1, 32, False)),
    ({"method": "per-token", "bits": 4, "group": 20}, (4, 1, 20, False), (4, 1, 20, False)),
    ({"method": "k8v4", "rotate": True}, (8, None, 1, False), (4, 1, 32, False)),
    ({"method": "int4"}, (4, 32, 1, False), (4, 1, 32, False)),
    ({"method": "int4", "group": 7, "rotate": True}, (4, 7, 1, False), (4, 1, 7, False)),
    ({"method": "kivi"}, (2, 32, 1, True), (2, 1, 32, True)),
    ({"method": "kivi", "bits": 3, "rotate": True, "group": 16}, (3, 16, 1, True), (3, 1, 16, True)),
    ({"method": "kivi", "bits": 4, "scales": "float32"}, (4, 32, 1, True), (4, 1, 32, True)),
]
blocks = pytest.mark.parametrize(
    ("knobs", "keys", "values"), BLOCKS, ids=lambda x: str(x) if isinstance(x, dict) else ""
)


def stage_of(knobs: dict[str, Any], statistics: KeyStatistics | None = None) -> Quantize:
    return tiny.recipe(quantize=knobs).quantize.of_layer(statistics)


def statistics_of(key: torch.Tensor, value: torch.Tensor) -> KeyStatistics:
    """Of these rows: keys come centred, so that their mean is 0."""

    def absmax(rows: torch.Tensor) -> torch.Tensor:
        return rows.abs().amax(dim=(0, 2))

    zero = torch.zeros(key.shape[1], key.shape[3])
    return KeyStatistics(zero, absmax(key), absmax(value), absmax(rotate(key)), absmax(rotate(value)))


@st.composite
def stored(draw: st.DrawFn) -> Tokens:
    """Tokens as a store gets them: any size, holes whose rows are garbage, equal rows, zeros, outlier channels."""
    rng = np.random.default_rng(draw(seeds))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 70)))
    head_dim = draw(st.sampled_from([5, 33, 64, 80, 96, 128]))
    kind = draw(st.sampled_from(["random", "equal", "zero", "outliers"]))
    rows = [rng.standard_normal((*shape, head_dim)) * draw(st.sampled_from([1e-2, 1.0, 100.0])) for _ in range(2)]
    if kind == "equal":
        rows = [np.broadcast_to(x[:, :, :1], x.shape) for x in rows]
    elif kind == "zero":
        rows = [np.zeros_like(x) for x in rows]
    elif kind == "outliers":
        rows = [x * np.where(np.arange(head_dim) % 7 == 3, 30, 1) for x in rows]
    real = rng.random(shape) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    key, value = (np.where(real[..., None], x, 1e4).astype(np.float32) for x in rows)
    tokens = tokens_of(tensor(key), tensor(value))
    tokens.bias = tensor(np.where(real, 0, -np.inf).astype(np.float32))
    return tokens


def check(
    stage: Quantize, name: str, row: Rows, tokens: Tokens, store: dict[str, torch.Tensor], got: torch.Tensor
) -> None:
    """What a store holds is what the formula gives, and what is read from it is within half a step of what came."""
    bits, block_tokens, channels, offset = row
    rotated = isinstance(stage, Blockwise) and stage.rotate
    matrix = quantized.hadamard(got.shape[-1]) if rotated else np.eye(got.shape[-1])
    for b, h in np.ndindex(*got.shape[:2]):
        given_rows = getattr(tokens, name)[b, h].double().numpy() @ matrix
        real = tokens.real[b, h].numpy()
        packed = store[f"{name}_store"][b, h].numpy()
        static = getattr(stage, f"{name}_scale", None)
        scale = (store[f"{name}_scale"][b, h] if static is None else static[0, h]).float().numpy()
        low = store[f"{name}_low"][b, h].float().numpy() if offset else None
        rows = quantized.restored(packed, scale, low, bits, block_tokens, channels, got.shape[-1])
        size = max(float(np.abs(rows).max()), 1e-6)
        np.testing.assert_allclose(got[b, h].double().numpy(), rows @ matrix, atol=1e-5 * size, rtol=1e-4)
        if block_tokens is None:  # static: of all heads' tokens, with the margin
            step = np.broadcast_to(
                np.repeat(scale, -(-got.shape[-1] // scale.shape[1]), 1)[:, : got.shape[-1]], rows.shape
            )
        else:
            step = quantized.steps(given_rows, real, bits, block_tokens, channels, offset)
        # A scale is rounded to float16 (2^-11), or is the smallest one; a block's smallest number is rounded too.
        slack = np.abs(given_rows).max(where=real[:, None], initial=0) * 2**-10
        assert (np.abs(rows - given_rows) <= step * 0.501 + slack + 1e-6)[real].all()
        assert np.isfinite(rows).all()


@blocks
@settings(max_examples=12)
@given(tokens=stored())
def test_a_round_trip_is_the_formula(knobs: dict, keys: Rows, values: Rows, tokens: Tokens) -> None:
    clean = torch.where(tokens.real[..., None], tokens.key, 0.0), torch.where(tokens.real[..., None], tokens.value, 0.0)
    stage = stage_of(knobs, statistics_of(*clean))
    store = stage.quantize(tokens)
    key, value = stage.restore(store, tokens.key.shape[-1])
    check(stage, "key", keys, tokens, store, key)
    check(stage, "value", values, tokens, store, value)


@pytest.mark.parametrize(
    "knobs",
    [{"method": "float16"}, {"method": "float32"}, {"method": "turboquant"}, *(knobs for knobs, *_ in BLOCKS)],
    ids=str,
)
@settings(max_examples=12)
@given(tokens=stored())
def test_the_store_is_what_the_state_says(knobs: dict, tokens: Tokens) -> None:
    """Names, dtypes and shapes: a byte not stated would not be counted."""
    stage = stage_of(knobs, statistics_of(tokens.key, tokens.value))
    specs = stage.specs([*tokens.key.shape[:2]], tokens.key.shape[2], tokens.key.shape[3])
    store = stage.quantize(tokens)
    assert {name: (str(x.dtype), list(x.shape)) for name, x in store.items()} == {
        name: (f"torch.{dtype}", shape) for name, (dtype, shape) in specs.items()
    }


@blocks
@settings(max_examples=12)
@given(tokens=stored(), seed=seeds)
def test_attention_reads_what_restore_gives(knobs: dict, keys: Rows, values: Rows, tokens: Tokens, seed: int) -> None:
    stage = stage_of(knobs, statistics_of(tokens.key, tokens.value))
    generator = torch.Generator().manual_seed(seed % 2**31)
    batch, heads, _, head_dim = tokens.key.shape
    query = torch.randn(batch, 2 * heads, 1, head_dim, generator=generator)
    window = [torch.randn(batch, heads, 3, head_dim, generator=generator) for _ in range(2)]
    store = stage.quantize(tokens) | {"store_bias": tokens.bias}
    rest = (*window, torch.zeros(batch, 1, 3), head_dim**-0.5)
    got = stage.attend(query, store, *rest)
    rows = stage.restore(store, head_dim)
    want = store_window_attention(query, *rows, tokens.bias, *rest)
    size = max(1.0, *(float(x.abs().max()) for x in rows))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, atol=1e-4 * size, rtol=1e-3)


@blocks
@settings(max_examples=12)
@given(tokens=stored())
def test_a_batch_of_two_is_two_single_runs(knobs: dict, keys: Rows, values: Rows, tokens: Tokens) -> None:
    stage = stage_of(knobs, statistics_of(tokens.key, tokens.value))
    both, head_dim = stage.quantize(tokens), tokens.key.shape[-1]
    for b in range(len(tokens.key)):
        alone = stage.quantize(Tokens(**{name: x[b : b + 1] for name, x in tokens._rows().items()}))
        if not knobs.get("rotate"):
            assert all(torch.equal(x[0], both[name][b]) for name, x in alone.items())
        # A product of another size rounds otherwise in its last bit: a rotated number may fall on a code's other side.
        for one, two, name in zip(stage.restore(alone, head_dim), stage.restore(both, head_dim), "kv", strict=True):
            rows = tokens.key if name == "k" else tokens.value
            step = 2 * float(rows[b].norm(dim=-1).max()) / (2 ** knobs.get("bits", 4) - 1)
            torch.testing.assert_close(one[0], two[b], atol=1.1 * step + 1e-6, rtol=0)


@given(seed=seeds, size=st.sampled_from([1e-2, 1.0, 100.0]), tokens=st.integers(1, 70), rounds=st.integers(1, 5))
@settings(max_examples=12)
@pytest.mark.parametrize("knobs", [knobs for knobs, *_ in BLOCKS if not knobs.get("rotate")], ids=str)
def test_what_was_restored_is_stored_alike(knobs: dict, seed: int, size: float, tokens: int, rounds: int) -> None:
    """In the same blocks, quantizing again changes nothing that one can see, however often."""
    rng = np.random.default_rng(seed)
    key, value = (tensor((rng.standard_normal((1, 2, tokens, 64)) * size).astype(np.float32)) for _ in range(2))
    stage = stage_of(knobs, statistics_of(key, value))
    first = again = stage.quantize(tokens_of(key, value))
    for _ in range(rounds):
        again = stage.quantize(tokens_of(*stage.restore(again, 64)))
    if knobs["method"] in ("int8", "per-head", "k8v4"):
        assert all(torch.equal(first[name], again[name]) for name in first)
    for was, now in zip(stage.restore(first, 64), stage.restore(again, 64), strict=True):
        torch.testing.assert_close(now, was, atol=2e-3 * size, rtol=0)


@pytest.mark.parametrize(
    "knobs", [{"method": "int4"}, {"method": "kivi", "bits": 4}, {"method": "kivi", "bits": 2}], ids=str
)
def test_keys_drift_by_half_a_step_a_compaction_at_most(knobs: dict) -> None:
    """A store that slides by some tokens at every compaction: the keys' groups change, and they are rounded anew."""
    rng = np.random.default_rng(0)
    rows = tensor(rng.standard_normal((1, 1, 400, 32)).astype(np.float32))
    slots, stage = 100, stage_of(knobs)
    key, value = rows[:, :, :slots], rows[:, :, :slots]
    offset = knobs["method"] == "kivi"
    allowed = np.zeros((slots, 32))
    for first in range(0, 300, 6):  # 50 compactions: a token goes through 16 of them
        store = stage.quantize(tokens_of(key, value))
        step = quantized.steps(key[0, 0].numpy(), np.ones(slots, bool), knobs.get("bits", 4), 32, 1, offset)
        allowed = allowed + 0.51 * step + 0.01
        got_key, got_value = stage.restore(store, 32)
        error = np.abs(got_key[0, 0].numpy() - rows[0, 0, first : first + slots].numpy())
        assert (error <= allowed).all()
        once = stage.restore(stage.quantize(tokens_of(*[rows[:, :, first : first + slots]] * 2)), 32)[1]
        torch.testing.assert_close(got_value, once, atol=5e-3, rtol=0)  # values keep their scales: no drift
        key, value = (
            torch.cat([x[:, :, 6:], rows[:, :, first + slots : first + slots + 6]], dim=2) for x in (got_key, got_value)
        )
        allowed = np.concatenate([allowed[6:], np.zeros((6, 32))])


@settings(max_examples=12)
@given(tokens=stored(), bits=st.sampled_from([2, 3, 4]), group=st.sampled_from([16, 128]))
def test_turboquant_fits_a_scale_to_the_levels_of_normal_numbers(tokens: Tokens, bits: int, group: int) -> None:
    stage = stage_of({"method": "turboquant", "bits": bits, "group": group})
    head_dim = tokens.key.shape[-1]
    store, matrix = stage.quantize(tokens), quantized.hadamard(head_dim)
    for name, got in zip(("key", "value"), stage.restore(store, head_dim), strict=True):
        for b, h in np.ndindex(*got.shape[:2]):
            packed, scale = store[f"{name}_store"][b, h].numpy(), store[f"{name}_scale"][b, h].float().numpy()
            rows = quantized.restored(packed, scale, None, bits, 1, group, head_dim, normal=True)
            size = max(float(np.abs(rows).max()), 1e-6)
            np.testing.assert_allclose(got[b, h].double().numpy(), rows @ matrix, atol=1e-5 * size, rtol=1e-4)
            wanted = getattr(tokens, name)[b, h].double().numpy() @ matrix
            for slot in tokens.real[b, h].nonzero()[:, 0].tolist():
                for j, block in enumerate(quantized.blocks_of(head_dim, group)):
                    x = wanted[slot, block]
                    levels = quantized.codes_of(packed[slot], bits, head_dim)[block] - 2 ** (bits - 1) + 0.5
                    fitted = float(x @ levels / (levels @ levels))
                    assert scale[slot, j] == pytest.approx(fitted, rel=1e-3, abs=1e-6)
                    position = x / max({2: 0.9957, 3: 0.5860, 4: 0.3352}[bits] * np.sqrt(np.mean(x * x)), 1e-6)
                    nearest = np.clip(np.floor(position), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
                    tie = np.abs(position - np.round(position)) < 1e-3
                    assert ((levels == nearest) | tie).all()


@pytest.mark.parametrize(("bits", "error"), [(2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_turboquant_errs_as_the_best_uniform_quantizer_of_normal_numbers(bits: int, error: float) -> None:
    """The errors of Max (Quantizing for minimum distortion, 1960); the fitted scale can only be better."""
    rng = np.random.default_rng(0)
    rows = tensor((rng.standard_normal((1, 1, 500, 128)) * rng.choice([0.1, 1, 30], (1, 1, 500, 1))).astype(np.float32))
    stage = stage_of({"method": "turboquant", "bits": bits})
    got = stage.restore(stage.quantize(tokens_of(rows, rows)), 128)[1]
    relative = float(((got - rows).square().sum(-1) / rows.square().sum(-1)).mean())
    assert 0.93 * error < relative < 1.02 * error


@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_of_rows_that_rotation_makes_normal_hardly_drifts(bits: int, head_dim: int, spread: int) -> None:
    """Powers of normal numbers: with 3 the rows have outliers, until they are rotated."""
    rng = np.random.default_rng(bits)
    rows = tensor((rng.standard_normal((1, 2, 200, head_dim)) ** spread).astype(np.float32))
    stage = stage_of({"method": "turboquant", "bits": bits})
    again = stage.quantize(tokens_of(rows, rows))
    errors = []
    for _ in range(6):
        key, value = stage.restore(again, head_dim)
        errors.append(float((value - rows).norm() / rows.norm()))
        again = stage.quantize(tokens_of(key, value))
    assert errors[-1] < 1.05 * errors[0]


def mixed_in_loops(tokens: Tokens, share: float) -> np.ndarray:
    """Slots in the order of a mixed store, [batch, kv_heads, slots]: the heaviest first, each part in its order."""
    mass = np.where(tokens.real, tokens.mass, -1.0)
    slots = mass.shape[2]
    wide = min(max(round(share * slots), 1), max(slots - 1, 1))
    order = np.zeros(mass.shape, int)
    for b, h in np.ndindex(*mass.shape[:2]):
        best = sorted(range(slots), key=lambda slot: (-mass[b, h, slot], slot))
        order[b, h] = [*sorted(best[:wide]), *sorted(best[wide:])]
    return order


@settings(max_examples=20)
@given(tokens=cached(), share=st.sampled_from([0.01, 0.3, 0.9]))
def test_mixed_gives_the_heaviest_slots_more_bits(tokens: Tokens, share: float) -> None:
    tokens.key = torch.randn(tokens.key.shape) * tokens.real[..., None]
    knobs = {"method": "mixed", "share": share, "margin": 1.0}
    known = statistics_of(tokens.key, tokens.value)
    stage = stage_of(knobs, known)
    arranged = stage.arrange(tokens)
    order = tensor(mixed_in_loops(tokens, share))
    for name, x in tokens._rows().items():
        index = order[..., None].expand(x.shape) if x.dim() == 4 else order
        assert torch.equal(getattr(arranged, name), x.gather(2, index)), name
    slots = order.shape[2]
    wide = min(max(round(share * slots), 1), max(slots - 1, 1))  # one slot alone is wide
    store = stage.quantize(arranged)
    want = {  # as the two methods store their parts
        "": (stage_of({"method": "int8", "margin": 1.0}, known), arranged[:wide]),
        "narrow_": (stage_of({"method": "int4"}), arranged[wide:slots]),
    }
    if slots == wide:
        del want["narrow_"]
    parts = [part.quantize(some) for part, some in want.values()]
    named = {prefix + name: x for prefix, part in zip(want, parts, strict=True) for name, x in part.items()}
    assert store.keys() == named.keys()
    assert all(torch.equal(store[name], named[name]) for name in store)
    key, value = stage.restore(store, 8)
    rows = [part.restore(stored, 8) for (part, _), stored in zip(want.values(), parts, strict=True)]
    assert torch.equal(key, torch.cat([part[0] for part in rows], dim=2))
    assert torch.equal(value, torch.cat([part[1] for part in rows], dim=2))


@settings(max_examples=20)
@given(tokens=cached())
def test_mixed_is_put_back_in_the_order_of_positions(tokens: Tokens) -> None:
    stage = stage_of({"method": "mixed"}, statistics_of(tokens.key, tokens.value))
    again = stage.rearrange(stage.arrange(tokens))
    assert torch.equal(again.positions, tokens.positions.sort(dim=-1, stable=True).values)
    for name, rows in tokens._rows().items():
        for b, h in np.ndindex(*tokens.bias.shape[:2]):
            real = tokens.real[b, h]
            assert torch.equal(getattr(again, name)[b, h][again.real[b, h]], rows[b, h][real]), name


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_mixed_of_few_slots(slots: int) -> None:
    rows = torch.randn(1, 2, slots, 8)
    stage = stage_of({"method": "mixed"}, statistics_of(rows, rows))
    tokens = tokens_of(rows, rows)
    store = stage.quantize(stage.arrange(tokens))
    assert {name: (str(x.dtype), list(x.shape)) for name, x in store.items()} == {
        name: (f"torch.{dtype}", shape) for name, (dtype, shape) in stage.specs([1, 2], slots, 8).items()
    }
    assert all(x.numel() for x in store.values())
    torch.testing.assert_close(stage.restore(store, 8)[0], rows, atol=float(rows.abs().max()) / 13, rtol=0)


def test_mixed_needs_attention_to_be_counted() -> None:
    with pytest.raises(Exception, match="the second counts none"):
        tiny.recipe(quantize={"method": "mixed"}, importance={"method": "keydiff"})


@given(seed=seeds, bits=st.sampled_from([8, 4, 3, 2]), channels=st.integers(1, 130))
def test_packing(seed: int, bits: int, channels: int) -> None:
    codes = np.random.default_rng(seed).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, channels))
    packed = pack(tensor(codes.astype(np.float32)), bits)
    assert packed.dtype == torch.int8
    assert packed.shape == (3, packed_size(channels, bits))
    if channels % 8 == 0:
        assert packed_size(channels, bits) == channels * bits // 8
    for row, want in zip(packed.numpy(), codes, strict=True):
        np.testing.assert_array_equal(quantized.codes_of(row, bits, channels) - 2 ** (bits - 1), want)
    np.testing.assert_array_equal(unpack(packed, bits, channels), codes)
    np.testing.assert_array_equal(unpack(packed, bits, channels, torch.float16), codes)


@pytest.mark.parametrize("size", [1, 7, 32, 80, 96, 256])
def test_rotation_is_orthonormal(size: int) -> None:
    eye = rotate(torch.eye(size))
    np.testing.assert_allclose(eye, quantized.hadamard(size), atol=1e-6)
    np.testing.assert_allclose(rotate(eye), np.eye(size), atol=1e-5)
    outlier = torch.zeros(size)
    outlier[0] = 1
    assert float(rotate(outlier).abs().max()) == pytest.approx((size & -size) ** -0.5)


def test_a_key_beyond_the_calibrated_range_is_clipped() -> None:
    stage = stage_of({"method": "int8", "margin": 1.0}, KeyStatistics(torch.zeros(1, 64), torch.ones(1, 64)))
    key = torch.full((1, 1, 1, 64), -5.0)
    store = stage.quantize(tokens_of(key, key))
    assert (store["key_store"] == -127).all()
    assert float(stage.restore(store, 64)[1].mean()) == pytest.approx(-5, rel=1e-3)


def test_a_range_around_zero_holds_the_one_around_the_centre() -> None:
    known = KeyStatistics(torch.tensor([[3.0, -3.0]]), torch.tensor([[1.0, 1.0]]))
    scale = {
        center: stage_of({"method": "int8", "center": center, "margin": 1.0}, known).get_buffer("key_scale")
        for center in (False, True)
    }
    np.testing.assert_allclose(scale[True] * 127, [[[[1, 1]]]])
    np.testing.assert_allclose(scale[False] * 127, [[[[4, 4]]]])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [({"margin": 0.9}, "margin"), ({"method": "int4", "group": 1}, "group"), ({"method": "kivi", "bits": 5}, "bits")],
)
def test_knobs_out_of_range(knobs: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):
        tiny.recipe(quantize={"method": "int8", **knobs})


def test_a_static_scale_needs_calibration() -> None:
    with pytest.raises(ValueError, match="needs the calibrated absmax"):
        stage_of({"method": "int8"})
    assert not tiny.recipe(quantize={"method": "int4", "center": False}).quantize.calibrated
