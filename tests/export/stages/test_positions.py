"""NTK-aware RoPE: against its formula, Hugging Face's own dynamic scaling, and Hugging Face's model of another base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import runtime
from calibration import samples
from calibration.prepare import prepare
from engines import bundle as bundles
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.stages.positions import Positions
from tests.export import tiny
from tests.export.conftest import build
from tests.export.test_graphs import EVICTING, LENGTH, ROOMY, check_by_oracle
from tests.export.tiny import Driver, Prompt, greedy, hugging_face

THETA = 10_000.0


def llama(head_dim: int, **rope: Any) -> transformers.LlamaModel:
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=9, hidden_size=2 * head_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": THETA, **rope},
        )
    )  # fmt: skip


def frequencies(model: Any) -> np.ndarray:
    return model.rotary_emb.inv_freq.double().numpy()


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0, 8.0])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_frequencies_are_those_of_the_larger_base(head_dim: int, scale: float) -> None:
    got = frequencies(Positions(scale=scale).stretch(llama(head_dim)))
    base = THETA * scale ** (head_dim / (head_dim - 2))
    np.testing.assert_allclose(got, [base ** (-2 * i / head_dim) for i in range(head_dim // 2)], rtol=1e-5)
    plain = frequencies(llama(head_dim))
    assert got[0] == plain[0]  # neighbours are told apart as before
    assert got[-1] == pytest.approx(plain[-1] / scale)  # the longest wave reaches as far as the prompt
    assert (np.diff(got) < 0).all()


@pytest.mark.parametrize("scale", [2, 4])
def test_frequencies_are_hugging_faces_dynamic_ones_at_that_length(scale: int) -> None:
    """Its scale is factor · length / trained - (factor - 1): with factor 1, how far the length goes beyond training."""
    config = llama(64, rope_type="dynamic", factor=1.0).config
    want, attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=scale * 128)
    assert attention_scaling == 1
    got = Positions(scale=scale).stretch(llama(64)).rotary_emb.inv_freq  # type: ignore[union-attr]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_a_scale_of_one_leaves_the_model_itself() -> None:
    model = llama(16)
    assert Positions().stretch(model) is model


def test_only_the_rope_is_changed() -> None:
    model = llama(16)
    before = frequencies(model).copy()
    stretched = Positions(scale=2).stretch(model)
    assert np.array_equal(frequencies(model), before)
    weights = dict(model.named_parameters())
    assert all(weight is weights[name] for name, weight in stretched.named_parameters())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
        {
            "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)  # fmt: skip
def test_rope_that_is_already_stretched_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"\[positions\] scale: needs RoPE.*'{rope['rope_type']}'.*leave it out"):
        Positions(scale=2).stretch(llama(16, **rope))


def test_a_decoder_without_rope_or_with_several_is_refused() -> None:
    with pytest.raises(UserError, match="none that could be found"):
        Positions(scale=2).stretch(torch.nn.Linear(2, 2))
    gemma = transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            vocab_size=9, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, pad_token_id=0,
        )
    )  # fmt: skip
    with pytest.raises(UserError, match="needs RoPE of type 'default'"):
        Positions(scale=2).stretch(gemma)


@pytest.mark.parametrize("scale", [0.5, 0.0, -1.0, 1001.0])
def test_knobs_out_of_range(scale: float) -> None:
    with pytest.raises(UserError, match=r"test\.positions: scale must be from 1 to 1000"):
        tiny.recipe(positions={"scale": scale})


def stretched(checkpoint: Checkpoint, scale: float, **tables: Any) -> Checkpoint:
    recipe = tiny.recipe(positions={"scale": scale}, **tables)
    known = samples.read(checkpoint.path / "samples")
    return dataclasses.replace(checkpoint, decoder=prepare(checkpoint, {"test": recipe}, known)["test"].decoder)


@pytest.fixture(scope="module")
def larger_base(tiny_path: Path) -> Any:
    """Hugging Face's model of the tiny checkpoint, its base as the formula has it for twice the positions."""
    config: Any = transformers.AutoConfig.from_pretrained(tiny_path)
    base = THETA * 2 ** (16 / (16 - 2))
    assert config.text_config.rope_parameters["rope_theta"] == THETA
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": base}
    model = transformers.LlavaForConditionalGeneration.from_pretrained(
        tiny_path, config=config, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def test_tokens_are_those_of_hugging_faces_model_with_the_larger_base(
    checkpoint: Checkpoint, reference: Any, larger_base: Any
) -> None:
    far = stretched(checkpoint, 2.0)
    prompt = Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)])
    want, logits = hugging_face(larger_base, prompt, 40)
    tokens, got = greedy(Driver(far.decoder, tiny.recipe(budget=ROOMY), LENGTH), far, [prompt], 40)
    assert tokens[0].tolist() == want.tolist()
    torch.testing.assert_close(got[0], logits, atol=1e-4, rtol=0)
    driver = Driver(checkpoint.decoder, tiny.recipe(budget=ROOMY), LENGTH)  # the other decoder is as it was
    plain = greedy(driver, checkpoint, [prompt], 40)[0][0].tolist()
    assert plain == hugging_face(reference, prompt, 40)[0].tolist() != want.tolist()
    check_by_oracle(far, Driver(far.decoder, tiny.recipe(**EVICTING), LENGTH), prompt, 30)


def test_statistics_are_those_of_the_stretched_keys(checkpoint: Checkpoint, larger_base: Any) -> None:
    known = samples.read(checkpoint.path / "samples")
    recipes = {
        "plain": tiny.recipe(quantize={"method": "int8"}),
        "far": tiny.recipe(quantize={"method": "int8"}, positions={"scale": 2.0}),
        "again": tiny.recipe(quantize={"method": "int8"}, positions={"scale": 2.0}, heads={"merge": True}),
    }
    tasks: list[str] = []

    def task(what: str) -> Any:
        tasks.append(what)
        return lambda: None

    prepared = prepare(checkpoint, recipes, known, task)
    assert sorted(tasks) == ["calibrating keys"] * 3 + ["comparing KV heads"]
    with torch.no_grad():
        caches = [
            larger_base(**samples.model_inputs(checkpoint, sample), use_cache=True).past_key_values for sample in known
        ]
    for layer, (plain, far) in enumerate(
        zip(prepared["plain"].statistics or [], prepared["far"].statistics or [], strict=True)
    ):
        center = torch.cat([cache.layers[layer].keys[0] for cache in caches], dim=1).mean(dim=1)
        torch.testing.assert_close(far.center, center, atol=1e-5, rtol=1e-4)
        assert (far.center - plain.center).abs().max() > 1e-3


def test_the_limit_of_positions_grows(checkpoint: Checkpoint) -> None:
    assert checkpoint.max_positions(2.5) == int(2.5 * tiny.POSITIONS)


@pytest.mark.slow
def test_a_prompt_longer_than_the_training_goes_through_a_bundle(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text("[positions]\nscale = 2.0\n[window]\nleast = 8\nmost = 8\n")
    build(tiny_path, "--out", tmp_path / "bundle", "--recipe", tmp_path / "far.toml", "--buckets", 300)
    bundle = bundles.read(tmp_path / "bundle")
    assert bundle.manifest.levels["far"].max_positions == 2 * tiny.POSITIONS
    vlm = runtime.open(bundle.path, threads=1)
    result = vlm.generate(
        "what color is the shape ? " * 45, images=[tiny.picture(0)], max_new_tokens=9, ignore_eos=True
    )
    assert result.stats.prompt_tokens > tiny.POSITIONS
    assert len(result.tokens) == 9
    with pytest.raises(UserError, match="has only 512 positions"):
        vlm.generate("what color is the shape ? " * 99, images=[tiny.picture(0)])
