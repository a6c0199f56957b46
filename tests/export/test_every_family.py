"""What a bundle of each family may have besides float32 graphs: int4 weights, and TensorRT plans of all graphs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, GotOcr2Processor

import runtime
from calibration import samples
from engines import bundle as bundles
from export import build
from export import checkpoint as checkpoints
from export.weights import Weights, nbits
from runtime.sampling import Sampling
from tests.export import processors, test_answers, test_mrope_end_to_end, test_text_only, zoo
from tests.export.test_answers import QUESTION, STEPS

SIZES = test_answers.SIZES | {name: sizes[0] for name, sizes in test_mrope_end_to_end.SIZES.items()}
SIZES |= {"smolvlm": (112, 112)}
NAMES = [*SIZES, *test_text_only.CONFIGS]
QUICK = {"llama", "smolvlm", "qwen2_5_vl"}
PLANS = ["--backend", "trt-rtx"] if importlib.util.find_spec("tensorrt_rtx") else []


def save(name: str, folder: Path) -> tuple[Any, list[str]]:
    """A tiny model whose checkpoint is in `folder`, and what more `build.py` is told of it."""
    if name in test_text_only.CONFIGS:
        return AutoModelForCausalLM.from_pretrained(test_text_only.save(folder, name)), []
    model = zoo.model(name, num_hidden_layers=2, **test_answers.LAYERS.get(name, {}))
    model.save_pretrained(folder)
    processors.save(name, folder)
    height, width = SIZES[name]
    return model, ["--image-sizes", f"{height}x{width}"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in QUICK else pytest.mark.long) for n in NAMES]
)
def test_int4_weights_answer_as_hugging_face_with_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same rounded weights, multiplied without rounding what they are multiplied with."""
    monkeypatch.setattr(GotOcr2Processor, "num_image_tokens", 4)  # 256 for the real encoder, and in no settings
    monkeypatch.setattr(nbits, "ACCURACY_LEVEL", 0)
    folder, out = tmp_path / "checkpoint", tmp_path / "bundle"
    model, more = save(name, folder)
    options = ["--recipe", "off", "--weights", "int4", "--guard", "off", "--no-report", "--kernels", "never"]
    assert build.main([str(folder), "--out", str(out), *options, "--buckets", "96", *more, *PLANS]) == 0
    manifest = bundles.read(out).manifest
    for graph in manifest.graphs.values():
        nodes = onnx.load(out / graph.file, load_external_data=False).graph.node
        assert (graph.kind == "vision") != any(node.op_type == nbits.OPERATOR for node in nodes)
    if PLANS:
        assert {plan.graph for plan in manifest.plans} == set(manifest.graphs)

    checkpoint = checkpoints.load(folder).quantized(Weights("int4"))
    rounded = {key: weight.clone() for key, weight in checkpoint.model.state_dict().items()}
    assert any(not torch.equal(weight, rounded[key]) for key, weight in model.state_dict().items())
    model.load_state_dict(rounded)
    pictures = []
    if name in SIZES:
        pixels = np.random.default_rng(1).integers(0, 256, (*SIZES[name], 3), dtype=np.uint8)
        pictures = [Image.fromarray(pixels)]
        inputs = test_answers.inputs_of(name, pictures[0])
    else:
        inputs = dict(samples.processed(checkpoint.processor, QUESTION, []))
    vlm = runtime.open(out, level="off", threads=1)
    got = vlm.generate(QUESTION, pictures, STEPS, ignore_eos=True, sampling=Sampling(logprobs=0))
    tokens, told = test_answers.answered(model.eval(), inputs)
    assert got.tokens == tokens
    np.testing.assert_allclose([each.logprob for each in got.logprobs], told, atol=1e-3)
