"""What `plan` says against the runtime's own allocation, the checkpoint's files, and formulas written out by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import LlavaConfig

import runtime
from calibration.devices import Device, Figure
from calibration.plan import GROUP, Chat, Planner, Weights, Work, most, run, size, stored_bytes
from demo_vlm.saving import build_processor
from engines.bundle import Bundle
from export import checkpoint as checkpoints
from export import recipe as recipes
from export.buckets import text_tokens
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Decode, Decoder, Prefill, State, Vision
from export.recipe import Recipe
from tests.export import tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
LEVELS = ("off", "balanced", "extreme", "chat")
ALL_WEIGHTS: tuple[Weights, ...] = ("fp32", "fp16", "int8", "int4")
ENOUGH = Device("a device", Figure(1e12), Figure(1e9), Figure(1e12), Figure(2e12))


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return checkpoints.load(DEMO, weights=False)


def planner(checkpoint: Checkpoint, device: Device = ENOUGH, weights: Weights = "fp16", **chat: int) -> Planner:
    return Planner(checkpoint, device, weights, 0, Chat(**chat))


def of(device: Device, **figures: float) -> Device:
    changes: dict[str, Any] = {name: Figure(value) for name, value in figures.items()}
    return dataclasses.replace(device, **changes)


@pytest.mark.parametrize("level", LEVELS)
def test_kv_bytes_are_those_that_the_runtime_allocates(demo: Checkpoint, demo_bundle: Bundle, level: str) -> None:
    vlm, recipe = runtime.open(demo_bundle.path, level=level), recipes.load(level, DEMO)
    for count in (1, 4, 8):
        images = [np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8) for i in range(count)]
        stats = vlm.generate("what color is the circle ?", images=images, max_new_tokens=2).stats
        planned = planner(demo, images=count)
        state = planned.state(recipe, planned.chat)
        assert state.length == stats.bucket
        assert state.nbytes == pytest.approx(stats.kv_bytes, rel=0.02)


def test_an_fp16_cache_is_what_the_runtime_says_it_is(demo: Checkpoint, demo_bundle: Bundle) -> None:
    per_token = demo.decoder.fp16_token_bytes
    assert demo_bundle.manifest.model.kv_bytes(77) == 77 * per_token
    row = planner(demo, images=4, answer=10).row(recipes.load("balanced", DEMO))
    assert row.kv_bytes_fp16 == (row.prompt_tokens + 10) * per_token
    assert row.kv_bytes_per_token == row.kv_bytes / (row.prompt_tokens + 10)


def shapes() -> dict[str, tuple[int, ...]]:
    with safe_open(DEMO / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def stored(name: str, shape: tuple[int, ...], weights: Weights) -> int:
    """Bytes of one tensor of the demo checkpoint."""
    count = math.prod(shape)
    if weights == "fp32":
        return 4 * count
    if weights == "fp16" or "embed" in name or len(shape) != 2:
        return 2 * count
    scales = shape[0] if weights == "int8" else shape[0] * math.ceil(shape[1] / GROUP)
    return math.ceil(count * {"int8": 1, "int4": 0.5}[weights]) + 2 * scales


@pytest.mark.parametrize("weights", ALL_WEIGHTS)
def test_weights_are_those_of_the_checkpoints_file(demo: Checkpoint, weights: Weights) -> None:
    planned, sizes = planner(demo, weights=weights), {n: stored(n, s, weights) for n, s in shapes().items()}
    table = sum(bytes for name, bytes in sizes.items() if "embed_tokens" in name)
    decoder = sum(bytes for name, bytes in sizes.items() if "language_model" in name or "lm_head" in name)
    assert planned.weight_bytes == sum(sizes.values())
    assert planned.step_weight_bytes == decoder - table
    assert planned.vision_weight_bytes == sum(sizes.values()) - decoder


def test_weights_in_fp32_are_those_of_the_bundle(demo: Checkpoint, demo_bundle: Bundle) -> None:
    """But for the padding to pages, the graphs' constants and the RoPE tables."""
    file = demo_bundle.manifest.files["weights.bin"].bytes
    assert planner(demo, weights="fp32").weight_bytes == pytest.approx(file, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_a_head_that_shares_the_embedding_table(tmp_path: Path, tied: bool, weights: Weights) -> None:
    """The table is there once, in fp16, and every step reads it."""
    config: Any = tiny.llava().config
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    planned = planner(checkpoint_of(tmp_path, config), weights=weights)
    shape = (config.text_config.vocab_size, config.text_config.hidden_size)
    table, head = stored("embed_tokens", shape, weights), stored("lm_head", shape, weights)
    layers = stored_bytes(weights, planned.checkpoint.decoder.language_model) - table
    assert planned.step_weight_bytes == layers + (table if tied else head)
    assert planned.weight_bytes == layers + table + (0 if tied else head) + planned.vision_weight_bytes


def checkpoint_of(folder: Path, config: Any, image_size: int = tiny.IMAGE_SIZE) -> Checkpoint:
    """A checkpoint of which there are only the configuration and the processor."""
    build_processor(image_size, config.vision_config.patch_size).save_pretrained(folder)
    config.save_pretrained(folder)
    return checkpoints.load(folder, weights=False)


def test_the_skeleton_has_the_shapes_of_the_model_and_none_of_its_numbers(demo: Checkpoint) -> None:
    loaded = checkpoints.load(DEMO)
    assert {n: p.shape for n, p in demo.model.named_parameters()} == {
        n: p.shape for n, p in loaded.model.named_parameters()
    }
    assert all(p.is_meta for p in demo.model.parameters())
    assert (demo.image_tokens, demo.decoder.kv_heads) == (loaded.image_tokens, loaded.decoder.kv_heads)


def test_turns_are_counted_as_the_template_writes_them(demo: Checkpoint) -> None:
    """A chat of real words, tokenized whole."""
    question, answer = "what color is the circle ?", "red"
    asked = {"role": "user", "content": [{"type": "text", "text": question}]}
    told = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    first = {"role": "user", "content": [{"type": "image"}, {"type": "image"}, *asked["content"]]}
    text = demo.processor.apply_chat_template([first, told, asked, told, asked], add_generation_prompt=True)
    tokenizer = demo.processor.tokenizer
    count = {words: len(tokenizer(words, add_special_tokens=False).input_ids) for words in (question, answer, text)}
    assert text_tokens(demo, 2, count[question], 3, count[answer]) == count[text] - 2


def plain(**tables: Any) -> Recipe:
    """Importance that looks at nothing but the cache, so that a graph's products are the model's own."""
    return tiny.recipe(importance={"method": "knorm"}, **tables)


def linear_flops(decoder: Decoder) -> int:
    """Of a token in the layers: 2 a weight."""
    matrices = [p for n, p in decoder.language_model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    return 2 * sum(p.numel() for p in matrices)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Grouped-query heads."""
    return checkpoint_of(tmp_path_factory.mktemp("small"), tiny.llava().config)


@settings(max_examples=25)
@given(st.integers(12, 70), st.sampled_from([0.3, 1.0]), st.sampled_from(["float32", "int8", "int4"]))
def test_flops_are_those_of_the_formula(small: Checkpoint, length: int, keep: float, method: str) -> None:
    decoder, text = small.decoder, small.text_config
    state = State(decoder, plain(budget={"keep": keep}, quantize={"method": method}), length)
    with torch.device("meta"):
        known = [KeyStatistics(*(torch.zeros(heads, decoder.head_dim) for _ in range(5))) for heads in decoder.kv_heads]
        prefill, decode = run(Prefill(state, known)).flops, run(Decode(state, known)).flops
    heads, head = text.num_attention_heads * decoder.head_dim, 2 * text.hidden_size * text.vocab_size
    attention = decoder.num_layers * 4 * heads * length * length
    assert prefill == linear_flops(decoder) * length + attention + head
    seen = sum(slots + state.window + 1 for slots in state.capacities)
    assert decode == linear_flops(decoder) + 4 * heads * seen + head


def test_flops_of_vision(small: Checkpoint) -> None:
    vision, hidden = small.model.config.vision_config, small.text_config.hidden_size
    d, patches = vision.hidden_size, (vision.image_size // vision.patch_size) ** 2
    rows = patches + 1  # the class token
    layer = 2 * rows * (4 * d * d + 2 * d * vision.intermediate_size) + 4 * rows * rows * d
    projector = 2 * patches * (d * hidden + hidden * hidden)
    expected = 2 * patches * d * 3 * vision.patch_size**2 + vision.num_hidden_layers * layer + projector
    with torch.device("meta"):
        assert run(Vision(small.encoder, plain(), small.layouts[0])).flops == expected


@given(
    flops=st.integers(0, 10**15),
    bytes=st.integers(0, 10**12),
    rates=st.tuples(*[st.floats(1e9, 1e15)] * 3),
    weights=st.sampled_from(ALL_WEIGHTS),
)
def test_roofline(flops: int, bytes: int, rates: tuple[float, float, float], weights: Weights) -> None:
    bandwidth, fp16, int8 = rates
    device = of(ENOUGH, bandwidth=bandwidth, fp16=fp16, int8=int8)
    rate = int8 if weights == "int8" else fp16 * 0.5 if weights == "fp32" else fp16
    seconds = Work(flops, bytes).seconds(device, weights)
    assert seconds == pytest.approx(np.maximum(flops / rate, bytes / bandwidth))


@pytest.mark.parametrize("importance", ["knorm", "h2o"])  # h2o counts the attention that tokens receive
def test_times_by_bytes_alone(small: Checkpoint, importance: str) -> None:
    """On a device that computes at once, every part takes as long as what it moves."""
    recipe = tiny.recipe(importance={"method": importance}, budget={"keep": 0.5})
    planned = planner(small, of(ENOUGH, fp16=1e30, int8=1e30, bandwidth=1.0), images=3, answer=7)
    row = planned.row(recipe)
    kv = {name: spec.nbytes for name, spec in planned.state(recipe, planned.chat).specs().items()}
    step = sum(bytes for name, bytes in kv.items() if "_positions" not in name and "_kinds" not in name)
    step += sum(bytes for name, bytes in kv.items() if "_mass" in name)  # written back
    assert any("_mass" in name for name in kv) == (importance == "h2o")
    weights, window = planned.step_weight_bytes, recipe.window.sizes(row.bucket)
    assert row.decode_seconds == pytest.approx(weights + step + 2 * sum(kv.values()) / (window[0] - window[1]))
    assert row.decode_seconds_fp16 == pytest.approx(weights + row.kv_bytes_fp16)
    assert row.prefill_seconds == pytest.approx(3 * planned.vision_weight_bytes + weights + sum(kv.values()))
    assert row.kv_share == pytest.approx(step / (weights + step))
    assert row.kv_share_fp16 == pytest.approx(row.kv_bytes_fp16 / (weights + row.kv_bytes_fp16))
    assert planned.pays_from * small.decoder.fp16_token_bytes / 0.1 == pytest.approx(weights / 0.9, rel=0.05)


@given(end=st.integers(1, 60), true=st.integers(0, 60), asked=st.integers(1, 60))
def test_most_is_the_last_that_has_no_limit(end: int, true: int, asked: int) -> None:
    true = min(true, end)
    found = most(lambda count: "memory" if count > true else "", asked, end + 1)
    assert found.count == max(n for n in range(true + 1))
    assert found.limit == "memory"


@pytest.mark.parametrize("level", LEVELS)
def test_one_more_does_not_fit(demo: Checkpoint, level: str) -> None:
    recipe, chat = recipes.load(level, DEMO), Chat(images=2, turns=2, answer=5)
    need = planner(demo).state(recipe, chat).nbytes
    planned = dataclasses.replace(planner(demo), chat=chat)
    free = int(need * 1.5)
    planned = dataclasses.replace(planned, device=of(ENOUGH, memory=planned.weight_bytes + free))
    row = planned.row(recipe)
    assert planned.free == free
    assert State(demo.decoder, recipe, row.tokens.count).nbytes <= free
    assert {row.tokens.limit, row.images.limit, row.turns.limit} == {"memory"}
    for more in (
        State(demo.decoder, recipe, row.tokens.count + 1),
        planned.state(recipe, dataclasses.replace(chat, images=row.images.count + 1)),
        planned.state(recipe, dataclasses.replace(chat, turns=row.turns.count + 1)),
    ):
        assert more.nbytes > free
    for what in ("images", "turns"):
        fits = dataclasses.replace(chat, **{what: getattr(row, what).count})
        assert planned.state(recipe, fits).nbytes <= free


def test_positions_end_what_memory_does_not(demo: Checkpoint) -> None:
    row = planner(demo, answer=24).row(recipes.load("extreme", DEMO))
    assert (row.tokens.count, row.tokens.limit) == (1024 - 24, "positions")
    assert row.images.limit == row.turns.limit == "positions"
    chat = Chat(images=row.images.count + 1, answer=24)
    assert planner(demo).prompt(chat)[0] + 24 > 1024 >= planner(demo).prompt(Chat(images=row.images.count))[0] + 24


def verdict(checkpoint: Checkpoint, level: str, **figures: float) -> str:
    """Of four images, with so many bytes of memory beside the weights."""
    planned = planner(checkpoint, images=4)
    figures["memory"] = planned.weight_bytes + figures.pop("free", 1e9)
    row = dataclasses.replace(planned, device=of(ENOUGH, **figures)).row(recipes.load(level, DEMO))
    return row.verdict.split(";")[0]  # behind it: no reserve is given


def test_verdicts(demo: Checkpoint) -> None:
    assert "does not fit: " in verdict(demo, "off", free=10_000)
    assert verdict(demo, "balanced", free=-1) == "the weights alone do not fit"
    assert verdict(demo, "balanced", free=400_000) == "fits only because it is compressed: an fp16 cache would not"
    assert verdict(demo, "off") == "allocates more than an fp16 cache: it saves nothing"
    assert "saves memory and 1" in verdict(demo, "balanced")  # 1x % of the time: an fp16 cache is 22 % of the bytes
    assert verdict(demo, "balanced", fp16=1e6).endswith("saves memory, not time")  # bound by arithmetic


def test_a_tensor_beyond_the_reserve_is_told(small: Checkpoint) -> None:
    planned = planner(small, images=8)
    row = planned.row(plain())
    heads, rows = small.text_config.num_attention_heads, row.bucket
    assert row.activation_bytes >= heads * rows * rows * 2  # the logits of a layer, in fp16
    assert f"prefill makes a tensor of {size(row.activation_bytes)}, more than the reserve" in row.verdict
    assert "reserve" not in dataclasses.replace(planned, reserve=row.activation_bytes).row(plain()).verdict


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3,072.0 GiB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_a_model_of_billions_is_planned_from_its_configuration(tmp_path: Path) -> None:
    """7.6 billion parameters in the decoder, of which none is ever made."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = LlavaConfig(  # type: ignore[call-arg]  # image_token_id is an alias
        vision_config={"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, **vision},
        text_config={"model_type": "qwen2", **sizes, **heads},
        image_token_id=4,
        vision_feature_layer=-2,
    )
    checkpoint = checkpoint_of(tmp_path, config, 336)
    planned = planner(checkpoint, images=10)
    d, kv, wide = 3584, 4 * 128, 18944
    layer = d * d * 2 + 2 * d * kv + d + 2 * kv + 3 * d * wide + 2 * d  # q and o, k and v, their biases, MLP, norms
    assert planned.step_weight_bytes == 2 * (28 * layer + d + d * 152064)
    assert checkpoint.decoder.fp16_token_bytes == 28 * 2 * kv * 2
    row = planned.row(recipes.load("balanced"))
    assert row.prompt_tokens > 10 * checkpoint.image_tokens == 10 * 576
    assert row.kv_bytes / row.kv_bytes_fp16 < 0.25
    assert row.kv_share < row.kv_share_fp16 < 0.05
