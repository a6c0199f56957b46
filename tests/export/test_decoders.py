"""Sliding windows, masks by block, capped and scaled logits: against Hugging Face, and a masked full cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.errors import UserError
from engines.ort import OrtSession
from export.graphs import Decode, Stateful
from export.stages.heads import HeadMoments, Heads
from export.stages.tokens import TEXT
from export.to_onnx import WeightFile, export
from tests.export import decoders, tiny
from tests.export.decoders import NAMES, WINDOW, Known, answer, hugging_face, may_look, oracle
from tests.export.tiny import Driver

STEPS, LENGTH = 65, 48
ROOMY = {"keep": 2.5}  # prompt and answer fit into every store
WHOLE = {"window": {"least": STEPS, "most": STEPS, "recent": 0.0, "compact": False}}  # never compacted
EVICTING = {
    "budget": {"keep": 0.3, "shallow_rate": 0.6, "deep_rate": 0.3},
    "importance": {"pool": 3, "window": 4},
    "protect": {"sinks": 2, "recent": 3},
}


@pytest.fixture(scope="module", params=NAMES)
def known(request: pytest.FixtureRequest) -> Known:
    return decoders.make(request.param)


@pytest.mark.parametrize("tables", [WHOLE, {"budget": ROOMY}], ids=["never compacted", "compacted"])
def test_without_eviction_logits_are_hugging_faces(known: Known, tables: dict[str, Any]) -> None:
    driver = Driver(known.decoder, tiny.recipe(**tables), LENGTH)
    tokens, logits = answer(driver, known, STEPS)
    want = hugging_face(known, tokens)
    torch.testing.assert_close(logits, want, atol=1e-4 * float(want.abs().max()), rtol=0)
    assert driver.compactions == (0 if tables is WHOLE else 10)


def test_where_all_layers_slide_a_store_as_long_as_the_window_is_enough() -> None:
    known = decoders.make("mistral")
    driver = Driver(known.decoder, tiny.recipe(), LENGTH)
    assert driver.state.capacities == [WINDOW] * 4
    tokens, logits = answer(driver, known, STEPS)
    want = hugging_face(known, tokens)
    torch.testing.assert_close(logits, want, atol=1e-4 * float(want.abs().max()), rtol=0)
    assert driver.compactions == 10


def check_by_oracle(known: Known, driver: Driver, steps: int, tolerance: float) -> Tensor:
    """Answer, noting what every step's state holds; a full cache with those masks must say the same.

    Returns:
        Those masks, [layers, kv_heads, tokens, tokens].
    """
    prompt, decoder = known.prompt, known.decoder
    length, total = len(prompt), len(prompt) + steps - 1
    positions = torch.arange(total)
    masks = torch.stack([may_look(known, layer, positions, prompt) for layer in range(decoder.num_layers)])
    held = torch.zeros(decoder.num_layers, decoder.kv_heads[0], total, total, dtype=torch.bool)
    held[:, :, :length] = True

    def note(step: int) -> None:
        for layer in range(decoder.num_layers):
            for head, slots in enumerate(driver.visible(layer)):
                held[layer, head, length + step, [*slots, length + step]] = True
            if driver.count == driver.state.recent and (window := known.windows[layer]):  # it was just compacted
                for slots in driver.visible(layer):
                    assert all(length + step - position < window for position in slots)

    tokens, logits = answer(driver, known, steps, note)
    allowed = held & masks[:, None]
    embeddings = torch.cat([prompt.embeddings, known.embedding[tokens]])
    want = oracle(known.decoder, embeddings, positions, allowed, known.softcap)[length - 1 :]
    errors = (logits - want).square().mean(dim=1).sqrt() / want.std()
    assert errors.median() < tolerance
    return allowed


@pytest.mark.parametrize(("quantize", "recent"), [("float32", 0.6), ("int8", 0.0)])
def test_eviction_equals_a_masked_full_cache(known: Known, quantize: str, recent: float) -> None:
    recipe = tiny.recipe(**EVICTING, quantize={"method": quantize}, window={"recent": recent})
    driver = Driver(known.decoder, recipe, LENGTH, statistics=decoders.statistics(known))
    allowed = check_by_oracle(known, driver, 40, 1e-5 if quantize == "float32" else 0.3)
    assert driver.compactions >= 4
    later = allowed[:, :, len(known.prompt) :].sum(dim=-1)  # [layers, kv_heads, steps]
    for layer, slots in enumerate(driver.state.capacities):
        assert int(later[layer].max()) <= min(slots + driver.state.window + 1, known.windows[layer] or LENGTH)


SLIDING = ["mistral", "cohere2", "gemma2"]


@pytest.mark.parametrize(
    "count", [{"method": "snapkv"}, {"method": "frequency", "share": 0.2}], ids=["sum", "by query"]
)
@pytest.mark.parametrize("name", SLIDING)
def test_a_chunk_longer_than_a_sliding_window_is_its_tokens_decoded(name: str, count: dict[str, Any]) -> None:
    """A slot at the window's edge is there for the first of the chunk's tokens and gone for the others."""
    known = decoders.make(name)
    recipe = tiny.recipe(
        **{**EVICTING, "importance": count}, quantize={"method": "int8"}, window={"least": 24, "most": 24}
    )
    one, other = (Driver(known.decoder, recipe, LENGTH, statistics=decoders.statistics(known)) for _ in range(2))
    length, chunk = len(known.prompt), one.state.chunk
    assert chunk > WINDOW
    ids = torch.randint(5, 290, (2, chunk), generator=torch.Generator().manual_seed(3))
    for driver in (one, other):
        driver.prefill([known.prompt])
    for turn, tokens in enumerate(ids):
        positions = torch.arange(length + turn * chunk, length + (turn + 1) * chunk)
        for token, position in zip(tokens, positions.tolist(), strict=True):
            want = one.decode(known.embedding[token][None], [position])
        got = other.extend(known.embedding[tokens][None], positions[None], torch.full((1, chunk), TEXT))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for driver in (one, other):
            driver.compact()
    assert one.tensors.keys() == other.tensors.keys()
    for held, tensor in one.tensors.items():
        torch.testing.assert_close(other.tensors[held], tensor, atol=1e-4, rtol=1e-4)


def test_only_what_slides_reads_positions() -> None:
    """And a store holds no more than a later query can see."""
    known = decoders.make("gemma3_text")
    for tables in (WHOLE, EVICTING):
        state = Driver(known.decoder, tiny.recipe(**tables), LENGTH).state
        positions = {f"store_positions.{layer}" for layer, window in enumerate(known.windows) if window}
        specs = {spec.name for spec in Decode(state, None).inputs.values()}
        assert {name for name in specs if "positions" in name} == {"window_positions", *positions}
    whole = Driver(known.decoder, tiny.recipe(**WHOLE), LENGTH).state
    assert whole.capacities == [window or LENGTH for window in known.windows]
    plain = decoders.make("llama")
    state = Driver(plain.decoder, tiny.recipe(**EVICTING), LENGTH).state
    assert not [name for name in Decode(state, None).inputs if "positions" in name]


def test_expected_attention_needs_rope_that_it_can_turn_on() -> None:
    """Gemma 3's two kinds of layers have a RoPE each; Cohere's turns neighbours."""
    recipe = tiny.recipe(**{**EVICTING, "importance": {"method": "expected-attention", "future": 8}})
    known = decoders.make("gemma3_text")
    check_by_oracle(known, Driver(known.decoder, recipe, LENGTH), 20, 1e-5)
    with pytest.raises(UserError, match="expected-attention needs RoPE that turns a head's two halves"):
        Driver(decoders.make("cohere2").decoder, recipe, LENGTH)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_heads_with_a_norm_are_not_merged(name: str) -> None:
    known = decoders.make(name)
    moments = [HeadMoments(torch.ones(2, 2, 8), torch.ones(2, 2, 16, 16))] * 4
    with pytest.raises(UserError, match="has q_norm beside its projections"):
        Heads(merge=True).fold(known.decoder.language_model, moments)


class Exported(Driver):
    """As the driver, its graphs in ONNX Runtime."""

    def __init__(self, folder: Path, *args: Any, **options: Any):
        super().__init__(*args, **options)
        with WeightFile(folder) as weights:
            made = {kind: export(graph, kind.__name__, weights) for kind, graph in self.graphs.items()}
        self.sessions = {kind: OrtSession(folder / graph.file) for kind, graph in made.items()}

    def run(self, kind: type[Stateful], feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {spec.name: feeds[spec.name].numpy() for spec in self.graphs[kind].inputs.values()}
        return {name: torch.from_numpy(np.array(array)) for name, array in self.sessions[kind].run(inputs).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "paligemma2"])
def test_exported(name: str, tmp_path: Path) -> None:
    known = decoders.make(name, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    recipe, statistics = tiny.recipe(**EVICTING, quantize={"method": "int8"}), tiny.statistics(known.decoder)
    one, other = (
        make(known.decoder, recipe, LENGTH, statistics=statistics) for make in (Driver, partial(Exported, tmp_path))
    )
    for first, second in zip(*(answer(driver, known, 30) for driver in (one, other)), strict=True):
        torch.testing.assert_close(first, second, atol=1e-3, rtol=1e-3)
    tokens = torch.arange(10, 10 + one.state.chunk)
    rows = (known.embedding[tokens][None], tokens[None] + 100, torch.full((1, len(tokens)), TEXT))
    for driver in (one, other):
        driver.compact()
    torch.testing.assert_close(one.extend(*rows), other.extend(*rows), atol=1e-3, rtol=1e-3)
