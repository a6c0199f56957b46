"""The extend graph: a chunk of tokens read at once is what decoding them one after another gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calibration.evaluate import Prompt
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.graphs import Decode, Extend, State
from export.recipe import Recipe
from export.stages.tokens import FIRST, PADDING, TEXT, VISUAL
from tests.export import tiny
from tests.export.tiny import Driver, hugging_face

LENGTH = 40
EVICTING = {"budget": {"keep": 0.4}, "protect": {"sinks": 1, "recent": 2}}
QUANTIZERS: list[dict[str, Any]] = [
    {"method": "float32"},
    {"method": "float16"},
    {"method": "int8"},
    {"method": "int4"},
    {"method": "int4", "rotate": True, "group": 7},
    {"method": "kivi", "bits": 2, "group": 8},
    {"method": "by-layer", "layers": ["int8", "int4", "float32"]},
]
COUNTS: list[dict[str, Any]] = [
    {"method": "snapkv"},
    {"method": "h2o"},
    {"method": "decayed", "gamma": 0.8},
    {"method": "frequency", "share": 0.2},
    {"method": "keydiff"},
]


@pytest.fixture(scope="module", params=[(8, 2), (4, 1), (4, 4)], ids=["grouped", "one KV head", "as many KV heads"])
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("heads") / "checkpoint"
    return checkpoints.load(tiny.save(folder, tiny.llava(*request.param)))


def rows(checkpoint: Checkpoint, rng: np.random.Generator, count: int, start: int = 0) -> Prompt:
    """Tokens of either kind, some positions between them pruned."""
    ids = torch.from_numpy(rng.integers(5, len(checkpoint.embedding), count))
    kinds = torch.from_numpy(rng.choice([TEXT, VISUAL], count))
    positions = torch.from_numpy(start + np.cumsum(rng.integers(1, 3, count)))
    return Prompt(checkpoint.embedding[ids], kinds, positions, torch.ones(count, dtype=torch.int32))


def marked(prompt: Prompt, rng: np.random.Generator) -> Tensor:
    """Kinds as a window holds them: some text begins a sentence."""
    return prompt.kinds + FIRST * (prompt.kinds == TEXT) * torch.from_numpy(rng.integers(0, 2, len(prompt)))


def by_decoding(driver: Driver, chunk: Prompt, kinds: Tensor) -> Tensor:
    for i in range(len(chunk)):
        logits = driver.decode(chunk.embeddings[i : i + 1], [int(chunk.positions[i])], kinds[i : i + 1])
    return logits


def by_extending(driver: Driver, chunk: Prompt, kinds: Tensor) -> Tensor:
    return driver.extend(chunk.embeddings[None], chunk.positions[None], kinds[None])


def check_same(one: Driver, other: Driver, tolerance: float = 1e-4) -> None:
    assert (one.count, one.compactions) == (other.count, other.compactions)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(other.tensors[name], tensor, atol=tolerance, rtol=tolerance, msg=told)


def recipe_of(count: dict[str, Any], quantize: dict[str, Any], **window: Any) -> Recipe:
    return tiny.recipe(**EVICTING, importance=count, quantize=quantize, window=window)


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from(COUNTS),
    quantize=st.sampled_from(QUANTIZERS),
    prompt=st.integers(1, LENGTH),
    window=st.integers(2, 20),
    recent=st.sampled_from([0.0, 0.25, 0.6]),
    data=st.data(),
)
def test_a_chunk_is_its_tokens_decoded(
    heads: Checkpoint,
    seed: int,
    count: dict[str, Any],
    quantize: dict[str, Any],
    prompt: int,
    window: int,
    recent: float,
    data: st.DataObject,
) -> None:
    """From an empty store to a full one, into an empty window and into its last slot; and the same compaction after."""
    rng = np.random.default_rng(seed)
    recipe = recipe_of(count, quantize, least=window, most=window, recent=recent)
    known = tiny.statistics(heads.decoder)
    one, other = (Driver(heads.decoder, recipe, LENGTH, statistics=known) for _ in range(2))
    start = rows(heads, rng, prompt)
    for driver in (one, other):
        driver.prefill([start])
    free = window - one.count
    before = data.draw(st.integers(0, free - 1), "decoded before")
    first = rows(heads, rng, before, int(start.positions[-1]))
    kinds = marked(first, rng)
    for driver in (one, other):
        if before:
            by_decoding(driver, first, kinds)
    chunk = rows(heads, rng, data.draw(st.integers(1, free - before), "chunk"), 60)
    kinds = marked(chunk, rng)
    want, got = by_decoding(one, chunk, kinds), by_extending(other, chunk, kinds)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    check_same(one, other)


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count["method"])
def test_what_is_kept_and_said_afterwards_is_the_same(checkpoint: Checkpoint, count: dict[str, Any]) -> None:
    """The masses counted in chunks choose the tokens that those counted one by one choose: greedy answers are equal."""
    rng = np.random.default_rng(1)
    recipe = recipe_of(count, {"method": "int8"}, least=12, most=12)
    known = tiny.statistics(checkpoint.decoder)
    one, other = (Driver(checkpoint.decoder, recipe, LENGTH, statistics=known) for _ in range(2))
    start, said = rows(checkpoint, rng, 30), []
    for driver in (one, other):
        driver.prefill([start])
    for turn in range(4):
        free = recipe.window.least - one.count
        chunk = rows(checkpoint, rng, free, 60 + 24 * turn)
        kinds = marked(chunk, rng)
        logits = by_decoding(one, chunk, kinds), by_extending(other, chunk, kinds)
        said.append([int(each.argmax()) for each in logits])
        for driver in (one, other):
            driver.compact()
        for layer in range(checkpoint.decoder.num_layers):
            assert one.visible(layer) == other.visible(layer)
    assert one.compactions == 4
    assert all(first == second for first, second in said)
    assert len({first for first, _ in said}) > 1


@pytest.mark.parametrize("name", recipes.presets())
def test_every_preset(checkpoint: Checkpoint, name: str) -> None:
    rng = np.random.default_rng(2)
    known = tiny.statistics(checkpoint.decoder)
    one, other = (Driver(checkpoint.decoder, recipes.load(name), 64, statistics=known) for _ in range(2))
    start = rows(checkpoint, rng, 50)
    for driver in (one, other):
        driver.prefill([start])
    chunk = rows(checkpoint, rng, one.state.chunk, 110)
    kinds = chunk.kinds.int()
    want, got = by_decoding(one, chunk, kinds), by_extending(other, chunk, kinds)
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)  # decoded, the chunk's own rows are in float16 already
    assert int(got.argmax()) == int(want.argmax())
    check_same(one, other, 5e-3)


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count["method"])
def test_padding_leaves_no_trace(checkpoint: Checkpoint, count: dict[str, Any]) -> None:
    """Rows of a batch with chunks of different lengths, whatever lies in the padding."""
    rng = np.random.default_rng(3)
    recipe = recipe_of(count, {"method": "int8"}, least=12, most=12)
    known, decoder = tiny.statistics(checkpoint.decoder), checkpoint.decoder
    both = Driver(decoder, recipe, LENGTH, 2, known)
    starts = [rows(checkpoint, rng, 30), rows(checkpoint, rng, 7)]
    both.prefill(starts)
    size = both.state.chunk
    chunks = [rows(checkpoint, rng, length, 60) for length in (size - 1, 3)]
    results = []
    for noise in (0.0, 50.0):
        feeds = {
            **both.tensors,
            "embeddings": noise * torch.from_numpy(rng.standard_normal((2, size, 64)).astype(np.float32)),
            "positions": torch.full((2, size), int(noise), dtype=torch.int32),
            "kinds": torch.full((2, size), PADDING, dtype=torch.int32),
        }
        for item, chunk in enumerate(chunks):
            feeds["embeddings"][item, -len(chunk) :] = chunk.embeddings
            feeds["positions"][item, -len(chunk) :] = chunk.positions
            feeds["kinds"][item, -len(chunk) :] = chunk.kinds
        results.append(both.run(Extend, feeds))
    for item, (start, chunk) in enumerate(zip(starts, chunks, strict=True)):
        alone = Driver(decoder, recipe, LENGTH, statistics=known)
        alone.prefill([start])
        kinds = chunk.kinds.int()
        want = by_decoding(alone, chunk, kinds)
        slots = slice(alone.state.recent, alone.state.recent + len(chunk))
        for out in results:
            torch.testing.assert_close(out["logits"][item : item + 1], want, atol=1e-4, rtol=0)
            for name, tensor in alone.tensors.items():
                if f"new_{name}" in out and name != "window_mass":
                    torch.testing.assert_close(out[f"new_{name}"][item : item + 1], tensor, atol=1e-5, rtol=1e-5)
            window = {"key_window": "new_key", "value_window": "new_value", "window_mass": "new_mass"}
            for name, new in window.items():
                if new in out:
                    got = out[new][item : item + 1, :, -len(chunk) :]
                    torch.testing.assert_close(got, alone.tensors[name][:, :, slots], atol=1e-4, rtol=1e-5)


def test_a_prompt_in_chunks_is_hugging_faces(checkpoint: Checkpoint, reference: Any) -> None:
    """Level off: the first part by prefill, the rest of it in chunks; every chunk's logits are those of the whole."""
    pictures = [tiny.picture(1), tiny.picture(2)]
    whole = tiny.Prompt(checkpoint, "what color is the shape ? how many digits ? red", pictures)
    with torch.no_grad():
        want = reference(**whole.inputs).logits[0]
    driver = Driver(checkpoint.decoder, recipes.load("off"), 16)
    driver.prefill([whole.only(torch.arange(10))])
    for first, last in ((10, 11), (11, 40), (40, len(whole))):
        part = whole.only(torch.arange(first, last))
        logits = by_extending(driver, part, part.kinds)
        torch.testing.assert_close(logits[0], want[last - 1], atol=1e-4, rtol=0)
    tokens, _ = hugging_face(reference, whole, 1)
    assert int(logits.argmax()) == int(tokens[0])


def test_the_chunk_is_no_longer_than_what_a_compacted_window_has_room_for(checkpoint: Checkpoint) -> None:
    def chunk(**window: Any) -> int:
        return State(checkpoint.decoder, tiny.recipe(window=window), LENGTH).chunk

    assert chunk(least=20, most=20, recent=0.25) == 15
    assert chunk(least=20, most=20, recent=0.25, chunk=6) == 6
    assert chunk(least=100, most=100, recent=0.0) == 64
    with pytest.raises(Exception, match="chunk must be at least 1, got 0"):
        chunk(chunk=0)


def test_the_operator_reads_the_store_unless_queries_are_counted_one_by_one(checkpoint: Checkpoint) -> None:
    def nodes(kind: type[Decode], count: dict[str, Any]) -> int:
        recipe = recipe_of(count, {"method": "int8"}, least=8, most=8)
        graph = kind(State(checkpoint.decoder, recipe, LENGTH), tiny.statistics(checkpoint.decoder)).eval()
        feeds = tuple(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in graph.inputs.values())
        program = torch.export.export(graph, feeds, strict=False)
        return sum("quant_kv_attention" in str(node.target) for node in program.graph.nodes)

    layers = checkpoint.decoder.num_layers
    found: Sequence[int] = [nodes(kind, count) for kind in (Decode, Extend) for count in COUNTS[1:4:2]]
    assert found == [layers, layers, layers, 0]
