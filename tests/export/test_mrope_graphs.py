"""The graphs of models with M-RoPE and DeepStack against Hugging Face, visual embeddings random."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from calibration.evaluate import Prompt
from engines.bundle import Layout
from engines.errors import UserError
from engines.ort import OrtSession
from export.attention import use_hook
from export.families import FAMILIES
from export.graphs import Decoder, Extend, Prefill, State, Vision, split
from export.mrope import mrope_of
from export.stages.importance.importance import Observation
from export.stages.tokens import TEXT, VISUAL
from export.to_onnx import WeightFile, export
from export.verify import largest_error
from tests.export import tiny, zoo
from tests.export.tiny import Driver

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"]
STEPS = 64
GRIDS = [[1, 4, 6], [1, 2, 4], [1, 8, 2]]  # 6, 2 and 4 visual tokens
WHOLE = {"window": {"least": 80, "most": 80, "recent": 0.05, "compact": False, "chunk": 12}}
TOLERANCE = 2e-4


@cache
def decoder(family: str) -> Decoder:
    found = FAMILIES[family].decoder(zoo.model(family))
    use_hook(found.language_model)
    return found


def layers(family: str) -> Any:
    return decoder(family).language_model.layers


@cache
def hugging_face(family: str) -> Any:
    return zoo.model(family)


class Asked:
    """A random prompt: as Hugging Face takes it, and as the graphs do."""

    def __init__(self, family: str, grids: Sequence[list[int]], seed: int = 0, text: int = 7):
        rng, model, own = np.random.default_rng(seed), hugging_face(family), decoder(family)
        types: list[int] = []
        for grid in grids:
            types += [0] * int(rng.integers(1, text)) + [1] * (np.prod(grid) // 4)
        types += [0] * text
        self.visual = torch.tensor(types) == 1
        ids = torch.where(self.visual, zoo.IMAGE, torch.from_numpy(rng.integers(5, 290, len(types))))
        embeddings = model.get_input_embeddings()(ids)
        embeddings[self.visual] = torch.from_numpy(rng.standard_normal((int(self.visual.sum()), 128))).float()
        self.taps = torch.from_numpy(rng.standard_normal((own.deepstack, int(self.visual.sum()), 128))).float()
        self.position_ids, _ = model.model.get_rope_index(
            ids[None], mm_token_type_ids=torch.tensor([types]), image_grid_thw=torch.tensor(grids) if grids else None
        )
        assert own.mrope
        deepstack = torch.zeros(len(types), own.deepstack, 128)
        deepstack[self.visual] = self.taps.movedim(1, 0)
        self.prompt = Prompt(
            embeddings, torch.where(self.visual, VISUAL, TEXT), torch.arange(len(types)), torch.ones(len(types)).int(),
            torch.from_numpy(own.mrope.position_ids(self.visual.numpy(), grids)).T, deepstack,
        )  # fmt: skip

    def only(self, rows: Tensor) -> Prompt:
        """Some of its rows, at their own positions."""
        p = self.prompt
        parts = p.embeddings, p.kinds, p.positions, p.segments, p.position_ids, p.deepstack
        return Prompt(*(part[rows] for part in parts))

    def told(self, family: str, rows: Tensor, fed: Sequence[int]) -> Tensor:
        """By Hugging Face's own cache and attention: logits after the rows, and after each token that is fed then."""
        model, cache = hugging_face(family), DynamicCache()
        text, head, p = model.model.language_model, model.lm_head, self.prompt
        more = {}
        if decoder(family).deepstack:
            kept = torch.isin(self.visual.nonzero()[:, 0], rows)
            more = {
                "visual_pos_masks": self.visual[rows][None],
                "deepstack_visual_embeds": [tap[kept] for tap in self.taps],
            }
        position = int(self.position_ids.max()) + 1
        with torch.no_grad():
            out = text(
                inputs_embeds=p.embeddings[rows][None], position_ids=self.position_ids[:, :, rows], cache=cache,
                use_cache=True, **more,
            )  # fmt: skip
            logits = [head(out[0][:, -1])]
            for step, token in enumerate(fed):
                at = torch.full((3, 1, 1), position + step)
                embedding = model.get_input_embeddings()(torch.tensor([[token]]))
                logits.append(
                    head(text(inputs_embeds=embedding, position_ids=at, cache=cache, use_cache=True)[0][:, -1])
                )
        return torch.cat(logits)


def decoded(driver: Driver, asked: Sequence[Asked], fed: Tensor) -> list[Tensor]:
    """Logits [batch, vocab_size] after each token that is fed, [batch, steps]."""
    logits, family_embedding = [], driver.state.decoder.language_model.get_input_embeddings()  # type: ignore[operator]
    for step in range(fed.shape[1]):
        if driver.full:
            driver.compact()
        positions = [len(each.prompt) + step for each in asked]
        ids = [each.prompt.next + step for each in asked]
        logits.append(driver.decode(family_embedding(fed[:, step]), positions, position_ids=ids))
    return logits


def tokens(steps: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(5, 290, (batch, steps)))


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=TOLERANCE * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("family", NAMES)
def test_prefill_and_64_steps_are_hugging_faces(family: str) -> None:
    """Two prompts at once, of different lengths: each row has RoPE positions of its own."""
    asked = [Asked(family, GRIDS[:2]), Asked(family, GRIDS[2:], seed=1, text=4)]
    driver, fed = Driver(decoder(family), tiny.recipe(**WHOLE), 32, batch=2), tokens(STEPS, 2)
    logits = torch.stack([driver.prefill([each.prompt for each in asked]), *decoded(driver, asked, fed)], dim=1)
    assert len({each.prompt.next - len(each.prompt) for each in asked}) == 2
    for row, each in enumerate(asked):
        close(logits[row], each.told(family, torch.arange(len(each.prompt)), fed[row].tolist()))


@pytest.mark.parametrize("family", NAMES)
def test_pruned_tokens_keep_their_position_ids(family: str) -> None:
    """As Hugging Face reads the same kept tokens with the ids that they had among all."""
    asked, rng = Asked(family, GRIDS, seed=2), np.random.default_rng(0)
    rows = torch.from_numpy(np.flatnonzero(~asked.visual.numpy() | (rng.random(len(asked.prompt)) < 0.5)))
    assert 2 < int(asked.visual[rows].sum()) < int(asked.visual.sum()) - 2
    driver, fed = Driver(decoder(family), tiny.recipe(**WHOLE), 32), tokens(STEPS)
    logits = torch.cat([driver.prefill([asked.only(rows)]), *decoded(driver, [asked], fed)])
    close(logits, asked.told(family, rows, fed[0].tolist()))


@pytest.mark.parametrize("family", NAMES)
def test_an_image_may_come_behind_prefill(family: str) -> None:
    """Extend reads the rest of a prompt, an image among it, as prefill would have."""
    asked, whole = Asked(family, GRIDS[:2], seed=3), torch.arange
    second = int(asked.visual.nonzero()[6]) - 1  # one token before the second image
    p, driver = asked.prompt, Driver(decoder(family), tiny.recipe(**WHOLE), 32)
    driver.prefill([asked.only(whole(second))])
    rest = asked.only(whole(second, len(p)))
    assert (rest.kinds == VISUAL).sum() == 2
    logits = driver.extend(
        rest.embeddings[None], rest.positions[None], rest.kinds[None], rest.position_ids.T[:, None],
        rest.deepstack.movedim(1, 0)[:, None],
    )  # fmt: skip
    fed = tokens(4)
    got = torch.cat([logits, *decoded(driver, [asked], fed)])
    close(got, asked.told(family, whole(len(p)), fed[0].tolist()))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_compacted_cache_that_evicts_nothing_changes_nothing(family: str) -> None:
    """Positions in the cache are of the sequence, whatever the ids of RoPE: a window that wraps keeps their order."""
    asked = Asked(family, GRIDS[:2], seed=4)
    driver, fed = Driver(decoder(family), tiny.recipe(), 64), tokens(30)
    logits = torch.cat([driver.prefill([asked.prompt]), *decoded(driver, [asked], fed)])
    assert driver.compactions > 2
    assert driver.visible(0)[0] == set(range(len(asked.prompt) + 30))
    close(logits, asked.told(family, torch.arange(len(asked.prompt)), fed[0].tolist()))


SHORTEN = {"method": "fastv", "layer": 3, "keep": 0.8}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_prompt_shortened_inside_keeps_its_position_ids(family: str) -> None:
    asked = Asked(family, GRIDS, seed=5, text=6)
    driver = Driver(decoder(family), tiny.recipe(shorten=SHORTEN), len(asked.prompt))
    seen: list[tuple[Tensor, Tensor]] = []
    attention = layers(family)[3].self_attn
    rotary = attention.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    driver.prefill([asked.prompt])
    rotary.remove()
    kept = sorted(driver.visible(3)[0])
    assert len(kept) < len(asked.prompt)
    wanted = hugging_face(family).model.language_model.rotary_emb(torch.zeros(1), asked.position_ids[:, :, kept])
    for got, want in zip(seen[0], wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_shortening_among_deepstacks_layers_is_refused() -> None:
    recipe = tiny.recipe(shorten={**SHORTEN, "layer": 1}, **WHOLE)
    with pytest.raises(UserError, match=r"layer = 1: DeepStack adds to images behind the first 2"):
        Driver(decoder("qwen3_vl"), recipe, 32)
    Driver(decoder("qwen2_vl"), recipe, 32)


def test_expected_attention_refuses_rope_of_neighbours() -> None:
    recipe = tiny.recipe(importance={"method": "expected-attention"}, **WHOLE)
    with pytest.raises(UserError, match="expected-attention needs RoPE"):
        Driver(decoder("glm4v"), recipe, 32)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_expected_attention_turns_by_position_ids(family: str) -> None:
    """Its queries before RoPE are the model's own, and what is expected comes after the highest id."""
    asked, recipe = Asked(family, GRIDS, seed=6), tiny.recipe(importance={"method": "expected-attention"}, **WHOLE)
    driver = Driver(decoder(family), recipe, 32)
    before: list[Tensor] = []
    moved: list[Tensor] = []
    attention = layers(family)[1].self_attn
    norm = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
    hook = norm.register_forward_hook(lambda _module, _args, out: before.append(out.reshape(*out.shape[:2], 8, -1)))
    stage: Any = recipe.importance
    plain = stage._moved

    def told(seen: Observation) -> Tensor:
        moved.append(plain(seen))
        return moved[-1]

    stage._moved = told
    driver.prefill([asked.prompt])
    hook.remove()
    ahead = asked.prompt.next + torch.arange(512)
    cos, sin = (
        t.mean(dim=1) for t in hugging_face(family).model.language_model.rotary_emb(torch.zeros(1), ahead[None])
    )
    query = before[0].transpose(1, 2)[0, :, -len(asked.prompt) :]
    first, second = query.chunk(2, dim=-1)
    wanted = query * cos + torch.cat([-second, first], dim=-1) * sin
    torch.testing.assert_close(moved[1][0, :, -len(asked.prompt) :], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "kind"), [("qwen2_vl", Extend), ("qwen3_vl", Prefill)])
def test_exported(family: str, kind: Any, tmp_path: Path) -> None:
    state = State(decoder(family), tiny.recipe(budget={"keep": 0.5}), 24)
    graph: Any = kind(state, None)
    with WeightFile(tmp_path) as weights:
        exported = export(graph, "graph", weights)
    taken = {spec.name: spec.shape for spec in exported.inputs}
    tokens = 24 if kind is Prefill else state.chunk
    assert taken["position_ids"] == [3, 1, tokens]
    assert taken.get("deepstack") == ([2, 1, tokens, 128] if family == "qwen3_vl" else None)
    assert list(OrtSession(tmp_path / exported.file).inputs) == list(taken)  # no input is left out for being unused
    assert largest_error(graph, exported, tmp_path) < 1e-4


def test_a_decoder_with_sliding_windows_is_refused() -> None:
    config = zoo.model("qwen2_vl").config
    config.get_text_config().layer_types = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(UserError, match="sliding windows"):
        mrope_of(config)


class Encoder(nn.Module):
    """Visual tokens that do not depend on pixels, and taps where there are any."""

    def __init__(self, tokens: Tensor, taps: Tensor):
        super().__init__()
        self.tokens, self.taps = tokens, taps

    def forward(self, pixel_values: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (self.tokens, self.taps) if len(self.taps) else self.tokens


GRID = [1, 4, 6]  # 6 tokens


@pytest.mark.parametrize("family", ["glm4v", "qwen3_vl"])
@pytest.mark.parametrize("asked", [1, 5])
def test_a_question_looks_at_an_image_as_in_hugging_face(family: str, asked: int) -> None:
    """The image at its ids, the question behind it, padded on the left; the taps of what is kept go with it."""
    perception = {"method": "attention", "layers": [1, 3], "keep": 0.5, "question_tokens": 5, "centre": 0, "detail": 0}
    generator, own = torch.Generator().manual_seed(asked), decoder(family)
    encoder = Encoder(
        torch.randn(1, 6, 128, generator=generator), torch.randn(own.deepstack, 6, 128, generator=generator)
    )
    layout = Layout("8x12", 8, 12, [24, 3], "<image>" * 6, 6, GRID)
    graph = Vision(encoder, tiny.recipe(perception=perception), layout, own)
    question, real = torch.randn(1, 5, 128, generator=generator), torch.zeros(1, 5)
    real[:, 5 - asked :] = 1
    with torch.no_grad():
        got = graph.attention(*split(encoder(real))[:1], question, real, encoder.taps)
        out = graph.compute(torch.zeros(24, 3), question=question, asked=real)

    model = hugging_face(family)
    types = torch.tensor([[1] * 6 + [0] * asked])
    ids, _ = model.model.get_rope_index(types, mm_token_type_ids=types, image_grid_thw=torch.tensor([GRID]))
    more: dict[str, Any] = {}
    if own.deepstack:
        more = {"visual_pos_masks": types == 1, "deepstack_visual_embeds": list(encoder.taps)}
    weights: list[Tensor] = []
    hooks = [
        model.model.language_model.layers[layer].self_attn.register_forward_hook(
            lambda _module, _args, out: weights.append(out[1])
        )
        for layer in (1, 3)
    ]
    with torch.no_grad():
        rows = torch.cat([encoder.tokens, question[:, 5 - asked :]], dim=1)
        model.model.language_model(inputs_embeds=rows, position_ids=ids, use_cache=False, **more)
    for hook in hooks:
        hook.remove()
    wanted = torch.stack([w[:, :, -1, :6].mean(dim=1) for w in weights]).mean(dim=0)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)

    kept = wanted[0].topk(3).indices.sort().values
    assert out["kept"][0].tolist() == kept.tolist()
    torch.testing.assert_close(out["visual_tokens"], encoder.tokens[:, kept])
    if own.deepstack:
        torch.testing.assert_close(out["deepstack"], encoder.taps[:, kept])
    assert ("deepstack" in graph.outputs) == bool(own.deepstack)
