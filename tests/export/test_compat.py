"""What is assumed of transformers: it holds for the release that is installed, and what breaks it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl

from engines.errors import UserError
from export import checkpoint as checkpoints
from export import compat
from export.compat import broken_assumption, check_transformers
from export.mrope import FAMILIES


@pytest.mark.parametrize("model_type", ["llava", *FAMILIES])
def test_the_installed_release_keeps_all(model_type: str) -> None:
    assert broken_assumption(model_type) is None


Plant = Callable[[pytest.MonkeyPatch], None]


def attention_is(change: Callable[..., Any]) -> Plant:
    """The layers find another attention function; `change` makes it of the one that is registered."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        found = type(ALL_ATTENTION_FUNCTIONS).get_interface
        patch.setattr(
            type(ALL_ATTENTION_FUNCTIONS), "get_interface", lambda self, *names: change(found(self, *names), names[0])
        )

    return plant


def repeated(attention: Any, _name: str) -> Any:
    def call(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return attention(module, query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), mask, **options)

    return call


def not_in_the_last_layer(attention: Any, _name: str) -> Any:
    return lambda module, *states, **options: (
        modeling_llama.eager_attention_forward if module.layer_idx else attention
    )(module, *states, **options)


def scaled_twice(attention: Any, _name: str) -> Any:
    return lambda *states, scaling, **options: attention(*states, scaling=scaling**2, **options)


def dropped(attention: Any, name: str) -> Any:
    """Our answer is not used: that of one's own is."""
    if name != "unicache":
        return attention
    return lambda *states, **options: (torch.zeros_like(attention(*states, **options)[0]), None)


def keys_not_turned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, cos, sin: (query, key))


def neighbours_turned(patch: pytest.MonkeyPatch) -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    patch.setattr(modeling_llama, "rotate_half", rotate)


def layers_return_tuples(patch: pytest.MonkeyPatch) -> None:
    """As they did once, and the model takes the first of them."""
    layer = modeling_llama.LlamaDecoderLayer
    one, norm = layer.forward, modeling_llama.LlamaRMSNorm.forward

    def bare(states: Any) -> Any:
        return states[0] if isinstance(states, tuple) else states

    patch.setattr(layer, "forward", lambda self, hidden, **options: (one(self, bare(hidden), **options), None))
    patch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, hidden: norm(self, bare(hidden)))


def tables_have_another_name(patch: pytest.MonkeyPatch) -> None:
    """The layers read RoPE's tables from elsewhere: what is put into `position_embeddings` is not looked at."""
    forward = modeling_llama.LlamaDecoderLayer.forward

    def own(self: Any, hidden: Any, position_embeddings: Any, **options: Any) -> Any:
        kept = self.__dict__.setdefault("tables", position_embeddings)
        return forward(self, hidden, position_embeddings=kept, **options)

    patch.setattr(modeling_llama.LlamaDecoderLayer, "forward", own)


def a_name_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.delattr("transformers.vision_utils.get_vision_window_index")


BREAKS: dict[str, list[Plant]] = {
    "names that are imported": [a_name_is_gone],
    "every layer calls": [attention_is(repeated), attention_is(not_in_the_last_layer), attention_is(scaled_twice)],
    "keys reach attention": [keys_not_turned, neighbours_turned],
    "go on with what": [attention_is(dropped)],
    "position_embeddings": [tables_have_another_name],
    "hidden states alone": [layers_return_tuples],
}


@pytest.mark.parametrize(("assumption", "plant"), [(name, plant) for name, all in BREAKS.items() for plant in all])
def test_what_breaks_is_named(assumption: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert assumption in str(broken_assumption("llava"))


def test_the_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    a_name_is_gone(monkeypatch)
    assert "no attribute 'get_vision_window_index'" in str(broken_assumption("llava"))


def test_positions_that_are_counted_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    count = modeling_qwen2_vl.Qwen2VLModel.get_rope_index

    def later(self: Any, *args: Any, **options: Any) -> Any:
        ids, delta = count(self, *args, **options)
        return ids + (torch.arange(ids.shape[-1]) > 8), delta

    monkeypatch.setattr(modeling_qwen2_vl.Qwen2VLModel, "get_rope_index", later)
    assert "M-RoPE" in str(broken_assumption("qwen2_vl"))
    assert broken_assumption("qwen3_vl") is None


def test_a_newer_release_that_breaks_one_builds_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers replaces its own module while it loads: here it may be another object.
    monkeypatch.setattr(compat.transformers, "__version__", "99.1.0")
    check_transformers("llava")
    keys_not_turned(monkeypatch)
    with pytest.raises(
        UserError, match=rf"transformers 99\.1\.0 .*keys reach.*transformers=={compat.TESTED}"
    ) as caught:
        checkpoints.load(tiny_path)
    assert "\n" not in str(caught.value)


def test_the_tested_release_is_not_looked_at_and_older_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_not_turned(monkeypatch)
    monkeypatch.setattr(compat.transformers, "__version__", compat.TESTED)
    check_transformers("llava")
    monkeypatch.setattr(compat.transformers, "__version__", "5.0.0")
    with pytest.raises(UserError, match=r"^transformers 5\.0\.0 is too old: pip install 'transformers>=5\.24'$"):
        check_transformers("llava")
