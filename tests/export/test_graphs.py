"""The graphs as PyTorch modules, run as the runtime runs them: against Hugging Face, and against a masked oracle."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calibration import keys, samples
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Vision
from tests.export import tiny
from tests.export.decoders import oracle
from tests.export.tiny import Driver, Prompt, greedy, hugging_face

STEPS = 64
LENGTH = 64
ROOMY = {"keep": 2.5}  # of 64 slots: prompt and answer fit into every store
EVICTING = {
    "budget": {"keep": 0.3, "shallow_rate": 0.6, "deep_rate": 0.3},
    "importance": {"pool": 3, "window": 4},
    "protect": {"sinks": 2, "recent": 3},
}
WHOLE = {"window": {"least": STEPS, "most": STEPS, "recent": 0.0, "compact": False}}  # never compacted


@pytest.fixture(scope="module")
def prompt(checkpoint: Checkpoint) -> Prompt:
    pictures = [tiny.picture(1), tiny.picture(2)]
    return Prompt(checkpoint, "what color is the shape ?", pictures)


@pytest.fixture(scope="module")
def generated(reference: Any, prompt: Prompt) -> tuple[Tensor, Tensor]:
    tokens, logits = hugging_face(reference, prompt, STEPS)
    assert len(tokens) == STEPS
    assert len(set(tokens.tolist())) > 10  # an answer that never changes could not tell much
    return tokens, logits


@pytest.fixture(scope="module")
def statistics(checkpoint: Checkpoint) -> list[KeyStatistics]:
    return keys.key_statistics(checkpoint, samples.read(checkpoint.path / "samples"))


def check_by_oracle(checkpoint: Checkpoint, driver: Driver, prompt: Prompt, steps: int) -> Tensor:
    """Generate, noting what every step may see; the oracle with those masks must give the same logits.

    Returns:
        The mask, [layers, kv_heads, tokens, tokens]; layers with fewer heads leave the last ones unused.
    """
    decoder, length = checkpoint.decoder, len(prompt)
    total = length + steps - 1
    positions = torch.cat([prompt.positions, torch.arange(steps - 1) + prompt.positions[-1] + 1])
    row_of = {int(position): row for row, position in enumerate(positions)}
    allowed = torch.zeros(decoder.num_layers, max(decoder.kv_heads), total, total, dtype=torch.bool)
    allowed[:, :, :length] = torch.ones(length, total).tril().bool()

    def note(step: int) -> None:
        for layer in range(decoder.num_layers):
            for head, visible in enumerate(driver.visible(layer)):
                allowed[layer, head, length + step, [*map(row_of.__getitem__, visible), length + step]] = True

    tokens, logits = greedy(driver, checkpoint, [prompt], steps, before_decode=note)
    embeddings = torch.cat([prompt.embeddings, checkpoint.embedding[tokens[0, :-1]]])
    want = oracle(decoder, embeddings, positions, allowed)[length - 1 :]
    torch.testing.assert_close(logits[0], want, atol=1e-4, rtol=0)
    return allowed


@pytest.mark.parametrize("tables", [WHOLE, {"budget": ROOMY}], ids=["window never full", "compacted"])
def test_without_eviction_tokens_are_hugging_faces(
    checkpoint: Checkpoint, prompt: Prompt, generated: tuple[Tensor, Tensor], tables: dict
) -> None:
    driver = Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH)
    tokens, logits = greedy(driver, checkpoint, [prompt], STEPS)
    assert tokens[0].tolist() == generated[0].tolist()
    torch.testing.assert_close(logits[0], generated[1], atol=1e-4, rtol=0)
    assert driver.compactions == (0 if tables is WHOLE else 10)  # every W - r = 6 steps


@pytest.mark.parametrize("tables", [{**WHOLE, "window": {**WHOLE["window"]}}, {"budget": ROOMY}])
def test_demo_tokens_are_hugging_faces(demo: Checkpoint, demo_reference: Any, tables: dict) -> None:
    prompt = Prompt(demo, "what color is the shape ?", [tiny.picture(1)])
    want, logits = hugging_face(demo_reference, prompt, STEPS)
    tokens, got = greedy(Driver(demo.decoder, tiny.recipe(**tables), 96), demo, [prompt], STEPS)
    assert tokens[0].tolist() == want.tolist()
    torch.testing.assert_close(got[0], logits, atol=1e-4 * float(logits.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("quantize", "window", "tolerance"),
    [
        ({"method": "float16"}, "float16", 0.02),
        ({"method": "int8"}, "float32", 0.2),
        ({"method": "int8", "center": False}, "float32", 0.2),
        ({"method": "int8", "rotate": True}, "float16", 0.2),
        ({"method": "int4"}, "float16", 1.0),
        ({"method": "kivi", "bits": 4}, "float16", 1.0),
        ({"method": "mixed"}, "float16", 1.0),
    ],
    ids=str,
)
def test_a_narrower_store_is_close(
    checkpoint: Checkpoint,
    prompt: Prompt,
    generated: tuple[Tensor, Tensor],
    statistics: list[KeyStatistics],
    quantize: dict,
    window: str,
    tolerance: float,
) -> None:
    recipe = tiny.recipe(quantize=quantize, budget=ROOMY, window={"dtype": window})
    driver = Driver(checkpoint.decoder, recipe, LENGTH, statistics=statistics)
    tokens, want = generated
    _, logits = greedy(driver, checkpoint, [prompt], STEPS, forced=tokens[None])
    assert driver.compactions == 10
    error = (logits[0] - want).square().mean().sqrt() / want.std()
    assert 0 < error < tolerance


@pytest.mark.parametrize("recent", [0.0, 0.25, 0.6])
def test_eviction_equals_a_masked_full_cache(checkpoint: Checkpoint, prompt: Prompt, recent: float) -> None:
    recipe = tiny.recipe(**EVICTING, window={"recent": recent})
    driver = Driver(checkpoint.decoder, recipe, LENGTH)
    allowed = check_by_oracle(checkpoint, driver, prompt, 40)
    assert driver.compactions >= 4
    sizes = [min(slots, len(prompt)) for slots in driver.state.capacities]
    seen = allowed[:, :, len(prompt) :].sum(-1)  # [layers, kv_heads, steps]
    for layer, slots in enumerate(sizes):
        assert int(seen[layer].max()) <= slots + driver.state.window + 1
    assert int(seen.max()) < len(prompt)  # tokens were dropped
    assert not torch.equal(allowed[:, 0], allowed[:, 1])  # each head chose its own


def test_sinks_are_never_dropped(checkpoint: Checkpoint, prompt: Prompt) -> None:
    driver = Driver(checkpoint.decoder, tiny.recipe(**EVICTING), LENGTH)

    def check(_step: int) -> None:
        for layer in range(checkpoint.decoder.num_layers):
            assert all({0, 1} <= visible for visible in driver.visible(layer))

    greedy(driver, checkpoint, [prompt], 40, before_decode=check)


def test_what_was_dropped_never_returns(checkpoint: Checkpoint, prompt: Prompt) -> None:
    driver = Driver(checkpoint.decoder, tiny.recipe(**EVICTING), LENGTH)
    before: dict[int, list[set[int]]] = {}

    def check(step: int) -> None:
        written = {len(prompt) + step - 1} if step else set()
        for layer in range(checkpoint.decoder.num_layers):
            now = driver.visible(layer)
            for known, visible in zip(before.get(layer, now), now, strict=True):
                assert visible <= known | written
            before[layer] = now

    greedy(driver, checkpoint, [prompt], 40, before_decode=check)


@pytest.mark.parametrize("tables", [{"budget": ROOMY}, EVICTING], ids=["roomy", "evicting"])
def test_a_batch_of_two_is_two_single_runs(checkpoint: Checkpoint, prompt: Prompt, tables: dict) -> None:
    prompts = [prompt, Prompt(checkpoint, "how many digits ?")]
    both = Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH, batch=2)
    tokens, logits = greedy(both, checkpoint, prompts, 40)
    for item, single in enumerate(prompts):
        alone = Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH)
        want_tokens, want = greedy(alone, checkpoint, [single], 40)
        assert tokens[item].tolist() == want_tokens[0].tolist()
        torch.testing.assert_close(logits[item], want[0], atol=1e-4, rtol=0)
        for layer in range(checkpoint.decoder.num_layers):
            assert both.visible(layer, item) == alone.visible(layer)


@pytest.mark.parametrize("tables", [{"budget": ROOMY}, EVICTING], ids=["roomy", "evicting"])
def test_centring_changes_nothing(checkpoint: Checkpoint, prompt: Prompt, tables: dict) -> None:
    decoder = checkpoint.decoder
    shape = (decoder.kv_heads[0], decoder.head_dim)
    generator = torch.Generator().manual_seed(0)
    random = [
        KeyStatistics(3 * torch.randn(shape, generator=generator), torch.ones(shape)) for _ in range(decoder.num_layers)
    ]
    plain, centred = (
        greedy(
            Driver(decoder, tiny.recipe(**tables, quantize=stage), LENGTH, statistics=random), checkpoint, [prompt], 40
        )
        for stage in ({"center": False}, {"center": True})
    )
    assert centred[0].tolist() == plain[0].tolist()
    torch.testing.assert_close(centred[1], plain[1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("tables", [{"budget": ROOMY}, EVICTING], ids=["roomy", "evicting"])
def test_layers_may_differ_in_kv_heads(tiny_path: Path, reference: Any, prompt: Prompt, tables: dict) -> None:
    checkpoint, model = checkpoints.load(tiny_path), copy.deepcopy(reference)
    for language_model in (checkpoint.model.model.language_model, model.model.language_model):
        attention = language_model.layers[1].self_attn  # its second KV head is cut off: all queries share the first
        attention.num_key_value_groups *= 2
        for name in ("k_proj", "v_proj"):
            weight = getattr(attention, name).weight
            getattr(attention, name).weight = torch.nn.Parameter(weight[:16].clone(), requires_grad=False)
    decoder = dataclasses.replace(checkpoint.decoder, kv_heads=[2, 1, 2])
    checkpoint = dataclasses.replace(checkpoint, decoder=decoder)
    driver = Driver(decoder, tiny.recipe(**tables), LENGTH)
    assert driver.state.specs()["key_window"].shape == [1, 5, 8, 16]
    if tables is EVICTING:
        check_by_oracle(checkpoint, driver, prompt, 40)
    else:
        tokens, logits = greedy(driver, checkpoint, [prompt], STEPS)
        want, want_logits = hugging_face(model, prompt, STEPS)
        assert tokens[0].tolist() == want.tolist()
        torch.testing.assert_close(logits[0], want_logits, atol=1e-4, rtol=0)


def test_vision_returns_the_kept_features(checkpoint: Checkpoint) -> None:
    vision = Vision(checkpoint.encoder, tiny.recipe(perception={"keep": 0.4}), checkpoint.layouts[0])
    pixels = torch.randn(checkpoint.layouts[0].pixel_values, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features, kept = vision(pixels)
        assert kept.dtype == torch.int32
        assert kept.shape == (1, round(0.4 * tiny.IMAGE_TOKENS))
        assert torch.equal(features[0], checkpoint.encoder(pixels)[0, kept[0].long()])
        whole, everything = Vision(checkpoint.encoder, tiny.recipe(), checkpoint.layouts[0])(pixels)
        assert torch.equal(whole, checkpoint.encoder(pixels))
        assert everything.tolist() == [list(range(tiny.IMAGE_TOKENS))]


@pytest.mark.parametrize("tables", [{"budget": ROOMY}, EVICTING], ids=["roomy", "evicting"])
def test_pruned_prompts_keep_their_positions(checkpoint: Checkpoint, prompt: Prompt, tables: dict) -> None:
    visual = (prompt.kinds == 2).nonzero()[:, 0].tolist()
    dropped = set(np.random.default_rng(0).choice(visual, len(visual) // 2, replace=False).tolist())
    pruned = prompt.only(torch.tensor([i for i in range(len(prompt)) if i not in dropped]))
    driver = Driver(checkpoint.decoder, tiny.recipe(**tables), LENGTH)
    check_by_oracle(checkpoint, driver, pruned, 30)
    if tables is not EVICTING:
        cached = set(pruned.positions.tolist()) | set(range(len(prompt), len(prompt) + 29))
        assert all(visible == cached for visible in driver.visible(0))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_prompt_leaves_slots_empty(checkpoint: Checkpoint, reference: Any, tokens: int) -> None:
    prompt = Prompt.of_ids(checkpoint, [1, 7, 9][:tokens])
    driver = Driver(checkpoint.decoder, tiny.recipe(budget=ROOMY), LENGTH)
    got, logits = greedy(driver, checkpoint, [prompt], 40)
    want, want_logits = hugging_face(reference, prompt, 40)
    assert got[0].tolist() == want.tolist()
    torch.testing.assert_close(logits[0], want_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_prompt_with_eviction(checkpoint: Checkpoint, tokens: int) -> None:
    prompt = Prompt.of_ids(checkpoint, [1, 7, 9][:tokens])
    check_by_oracle(checkpoint, Driver(checkpoint.decoder, tiny.recipe(**EVICTING), LENGTH), prompt, 40)


def test_a_prompt_that_fills_its_bucket(
    checkpoint: Checkpoint, prompt: Prompt, generated: tuple[Tensor, Tensor]
) -> None:
    driver = Driver(checkpoint.decoder, tiny.recipe(budget={"keep": 3.0}), len(prompt))
    tokens, _ = greedy(driver, checkpoint, [prompt], STEPS)
    assert tokens[0].tolist() == generated[0].tolist()
    check_by_oracle(checkpoint, Driver(checkpoint.decoder, tiny.recipe(**EVICTING), len(prompt)), prompt, 30)


def test_a_bucket_shorter_than_the_observation_window(checkpoint: Checkpoint) -> None:
    recipe = tiny.recipe(**{**EVICTING, "importance": {"window": 32}})
    prompt = Prompt.of_ids(checkpoint, [1, 7, 9, 11, 12])
    check_by_oracle(checkpoint, Driver(checkpoint.decoder, recipe, 12), prompt, 20)


@pytest.mark.parametrize("method", ["mixed", "kivi"])
def test_a_batch_of_two_is_two_single_runs_in_few_bits(
    checkpoint: Checkpoint, prompt: Prompt, statistics: list[KeyStatistics], method: str
) -> None:
    """Tokens of one prompt have no part in the scales of another's, nor padding in any."""
    recipe = tiny.recipe(**EVICTING, quantize={"method": method})
    prompts = [prompt, Prompt(checkpoint, "how many digits ?")]
    both = Driver(checkpoint.decoder, recipe, LENGTH, batch=2, statistics=statistics)
    tokens, logits = greedy(both, checkpoint, prompts, 30)
    for item, single in enumerate(prompts):
        alone = Driver(checkpoint.decoder, recipe, LENGTH, statistics=statistics)
        want_tokens, want = greedy(alone, checkpoint, [single], 30)
        assert tokens[item].tolist() == want_tokens[0].tolist()
        torch.testing.assert_close(logits[item], want[0], atol=1e-3, rtol=0)
        for layer in range(checkpoint.decoder.num_layers):
            assert both.visible(layer, item) == alone.visible(layer)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("importance", ["snapkv", "keydiff"])
def test_the_state_holds_nothing_that_nobody_reads(
    checkpoint: Checkpoint, prompt: Prompt, compact: bool, importance: str
) -> None:
    window = {"least": 24, "most": 24, "recent": 0.25, "compact": compact}
    recipe = tiny.recipe(**{**EVICTING, "importance": {"method": importance}}, window=window)
    driver = Driver(checkpoint.decoder, recipe, LENGTH)
    greedy(driver, checkpoint, [prompt], 30 if compact else 18)
    assert driver.compactions == compact
    names = {name.partition(".")[0] for name in driver.tensors}
    rows = {"key_store", "value_store", "store_bias", "key_window", "value_window", "window_bias"}
    places = {"store_positions", "window_positions"} if compact else set()
    assert names == rows | places | ({"store_mass", "window_mass"} if compact and importance == "snapkv" else set())


@pytest.mark.parametrize("recent", [0.0, 0.75, 0.99])
def test_a_window_longer_than_the_bucket(checkpoint: Checkpoint, prompt: Prompt, recent: float) -> None:
    """A prompt fills its part of the window at most, and answers are those of a cache that keeps everything."""
    whole = Driver(checkpoint.decoder, tiny.recipe(), LENGTH)
    recipe = tiny.recipe(window={"least": 3 * LENGTH, "most": 3 * LENGTH, "recent": recent})
    long = Driver(checkpoint.decoder, recipe, LENGTH)
    assert long.state.recent < LENGTH
    tokens, logits = greedy(long, checkpoint, [prompt], 12)
    want_tokens, want = greedy(whole, checkpoint, [prompt], 12)
    assert tokens.tolist() == want_tokens.tolist()
    torch.testing.assert_close(logits, want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", ["int8", "int4", "kivi", "mixed"])
def test_the_state_is_no_larger_than_the_share_of_bytes(checkpoint: Checkpoint, method: str) -> None:
    for share in (0.3, 0.4, 0.5):
        recipe = tiny.recipe(
            quantize={"method": method}, budget={"kv_bytes": share}, window={"least": 4, "most": 4, "dtype": "float16"}
        )
        statistics = [KeyStatistics(torch.zeros(2, 16), torch.ones(2, 16))] * 3
        state = Driver(checkpoint.decoder, recipe, 128, statistics=statistics).state
        used = sum(spec.nbytes for spec in state.specs().values())
        fp16 = 2 * 3 * 2 * 16 * 2 * 128
        assert used / fp16 < share + 0.02
        assert used / fp16 > share - 0.02 or min(state.capacities) == 128  # all that there is, in fewer bytes
