"""The tiny models must be worth testing with: their visual tokens differ, in a picture and from one to the next."""

from __future__ import annotations

import pytest

from tests.export.zoo import ZOO, features, model, picture


@pytest.mark.parametrize("name", ZOO)
def test_visual_tokens_vary(name: str) -> None:
    made = model(name)
    side = 128 if name in ("got_ocr2", "qwen3_vl") else 112 if hasattr(made.config.vision_config, "depth") else 56
    (first, taps), (second, _) = (features(made, picture(made, side, side, seed=seed)) for seed in (0, 1))
    assert first.shape[1] == made.config.get_text_config().hidden_size
    assert first.std(dim=0).mean() > 0.1 * first.abs().mean()
    assert (first - second).abs().mean() > 0.1 * first.abs().mean()
    assert (taps is not None) == (name == "qwen3_vl")


def test_a_model_made_twice_is_the_same() -> None:
    ours, again = model("llava_next"), model("llava_next")
    for name, weight in ours.named_parameters():
        assert weight.equal(again.get_parameter(name)), name
