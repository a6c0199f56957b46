"""The attention map against loops over what Hugging Face's model looks at and caches, and against what was planted."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForImageTextToText, GenerationConfig

from calibration import __main__ as command_line
from calibration import attention_map, survey
from calibration import samples as sampling
from calibration.attention_map import AttentionMap
from engines.errors import UserError
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from tests.calibration import planted
from tests.calibration.loops import TEXT, VISUAL, Means, Seen, channels, gather_cache, gather_queries, gather_tokens
from tests.export import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with biases, and samples of every sort: two images, text alone, no answer."""
    model = tiny.llava(bias=True)
    for seed, layer in enumerate(model.model.language_model.layers):
        bias = layer.self_attn.k_proj.bias
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)))
    model.lm_head.weight[4] = 0  # the answer of a random model could be an image's token
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint", model)
    lines = [
        {"images": ["0.png"], "prompt": "what color is the shape ?", "answer": "red circle blue"},
        {"images": ["1.png", "0.png"], "prompt": "in image 1 , what shape is in the image ?", "answer": "yes"},
        {"images": [], "prompt": "how many digits ?", "answer": "3 1 5"},
        {"images": ["0.png"], "prompt": "is there a circle ?"},
    ]
    (folder / "samples" / sampling.FILE).write_text("\n".join(json.dumps(line) for line in lines))
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    torch.set_num_threads(1)
    return checkpoints.load(folder)


@pytest.fixture(scope="module")
def known(folder: Path) -> list[sampling.Sample]:
    return sampling.read(folder / "samples")


@pytest.fixture(scope="module")
def measured(checkpoint: Checkpoint, known: list[sampling.Sample]) -> AttentionMap:
    return survey.measure(checkpoint, known)


def by_hugging_face(folder: Path, checkpoint: Checkpoint, sample: sampling.Sample) -> Seen:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    inputs = sampling.model_inputs(checkpoint, sample)
    inputs.pop("mm_token_type_ids", None)
    ids = inputs.pop("input_ids")
    pixels = {name: inputs[name] for name in ("pixel_values",) if name in inputs}
    with torch.no_grad():
        if sample.answer:
            tokenizer = checkpoint.processor.tokenizer
            more = tokenizer.convert_tokens_to_ids(sample.answer.split())
        else:
            config = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=2)
            made = model.generate(input_ids=ids, **inputs, generation_config=config)[0, ids.shape[1] :].tolist()
            more = made[:-1] if made[-1] == 2 else made
        whole = torch.cat([ids, torch.tensor([more], dtype=ids.dtype)], dim=1)
        out = model(input_ids=whole, **pixels, output_attentions=True, use_cache=True)
    layers = out.past_key_values.layers
    return Seen(
        torch.cat(out.attentions).double().numpy(),
        torch.cat([layer.keys for layer in layers]).double().numpy(),
        torch.cat([layer.values for layer in layers]).double().numpy(),
        [VISUAL if token == checkpoint.image_token_id else TEXT for token in whole[0].tolist()],
        len(more) + 1,
    )


def test_every_statistic_is_what_loops_find(
    folder: Path, checkpoint: Checkpoint, known: list[sampling.Sample], measured: AttentionMap
) -> None:
    seen = [by_hugging_face(folder, checkpoint, sample) for sample in known]
    sizes, means = measured.facts.sizes, Means()
    assert dataclasses.astuple(sizes) == (3, 8, 2, 16)
    for one in seen:
        gather_queries(means, one)
        gather_tokens(means, one, sizes.kv_heads)
        gather_cache(means, one)
    biases = [layer.self_attn.k_proj.bias.numpy() for layer in checkpoint.decoder.language_model.layers]  # type: ignore[union-attr]
    want = channels(seen, np.array(biases).reshape(3, 2, 16))
    want["top_patch_share"] = means.array("of the best", (3, 8)) / means.array("of all", (3, 8))
    for statistic in attention_map.statistics():
        name, shape = statistic.name, sizes.shape(statistic.metadata["axes"])
        expected = want[name] if name in want else means.array(name, shape)
        assert np.isfinite(expected).all(), name
        np.testing.assert_allclose(getattr(measured, name), expected, rtol=2e-3, atol=2e-4, err_msg=name)
    assert measured.facts.samples == 4
    assert measured.facts.with_images == 3
    assert measured.facts.tokens == sum(len(one.kinds) for one in seen)
    assert measured.facts.steps == sum(one.steps for one in seen)
    assert measured.facts.signals == {name: pytest.approx(getattr(measured, name).mean()) for name in survey.SIGNALS}
    groups = measured.sink_strength.reshape(3, 2, 4).mean(axis=2)
    np.testing.assert_allclose(measured.by_group("sink_strength"), groups)


def test_heads_are_classed_by_what_text_looks_at(measured: AttentionMap) -> None:
    share = measured.modality_share.copy()
    share[0, :4, TEXT, VISUAL] = [0.7, 0.69, 0.31, 0.29]
    share[0, 4] = np.nan
    changed = dataclasses.replace(measured, modality_share=share)
    assert changed.specialisation[0, :5].tolist() == ["image", "cross-modal", "cross-modal", "text", ""]


def test_a_checkpoint_is_known_by_the_files_that_decide(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint.path, tmp_path / "copy", ignore=lambda *_: ["samples"])
    known = survey.fingerprint(checkpoint)
    other = dataclasses.replace(checkpoint, path=copy)
    for name in ("accuracy_curve.json", "figures.json", "notes.txt"):
        (copy / name).write_text("{}")
    assert survey.fingerprint(other) == known
    for path in checkpoint.path.glob("*.*"):
        content = (copy / path.name).read_bytes()
        (copy / path.name).write_bytes(content + b" ")
        assert survey.fingerprint(other) != known, path.name
        (copy / path.name).write_bytes(content)
    assert survey.fingerprint(other) == known


def test_an_interrupted_run_goes_on_to_the_same_map(
    checkpoint: Checkpoint, known: list[sampling.Sample], measured: AttentionMap, tmp_path: Path, monkeypatch: Any
) -> None:
    read = survey.read_sample
    done: list[str] = []

    def counted(*arguments: Any) -> Any:
        if len(done) == 2:
            done.append("interrupted")
            raise KeyboardInterrupt
        done.append("sample")
        return read(*arguments)

    monkeypatch.setattr(survey, "read_sample", counted)
    with pytest.raises(KeyboardInterrupt):
        survey.measure(checkpoint, known, tmp_path / "work")
    damaged, *_ = (tmp_path / "work").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert equal(survey.measure(checkpoint, known, tmp_path / "work"), measured)
    assert len(done) == 2 + 1 + 3  # two, the interrupted one, and then that one, the damaged one and the last
    assert equal(survey.measure(checkpoint, known, tmp_path / "work"), measured)
    assert len(done) == 6
    other = survey.measure(checkpoint, known[::-1], tmp_path / "work")
    assert len(done) == 10  # another place among the samples chooses other rows
    np.testing.assert_allclose(other.entropy, measured.entropy)


def equal(a: AttentionMap, b: AttentionMap) -> bool:
    arrays = (np.array_equal(getattr(a, f.name), getattr(b, f.name), True) for f in attention_map.statistics())
    return a.facts == b.facts and all(arrays)


def test_percentiles_are_of_few_rows_by_seed(
    checkpoint: Checkpoint, known: list[sampling.Sample], measured: AttentionMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "ROWS", 4 * len(known))
    first, again, other = (survey.measure(checkpoint, known, seed=seed) for seed in (1, 1, 2))
    assert equal(first, again)
    assert not np.array_equal(first.key_percentiles, other.key_percentiles)
    assert np.array_equal(first.key_min, measured.key_min)  # ranges are of all rows
    assert (first.key_percentiles >= first.key_min[:, :, :, None]).all()
    assert (first.key_percentiles <= first.key_max[:, :, :, None]).all()


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.save(tmp_path_factory.mktemp("planted") / "checkpoint", count=8)


def test_the_map_shows_what_was_planted(plants: Path) -> None:
    found = survey.measure(checkpoints.load(plants), sampling.read(plants / "samples"))
    others = [layer for layer in range(planted.LAYERS) if layer != planted.NOISY]
    assert found.entropy[planted.NOISY].min() > 1.5 * found.entropy[others].max()
    assert found.coverage[planted.NOISY].min() > 1.5 * found.coverage[others].max()

    alike = np.minimum(found.key_similarity, found.value_similarity)
    alike[:, range(planted.KV_HEADS), range(planted.KV_HEADS)] = -1
    layer, first, second = planted.TWINS
    assert alike[layer, first, second] == pytest.approx(1, abs=1e-5)
    alike[layer, [first, second], [second, first]] = -1
    assert alike.max() < 0.5

    layer, head, channel = planted.SPIKE
    for figure in (found.key_outlier, found.key_bias_spike):
        others_of = np.delete(figure.reshape(-1), layer * planted.KV_HEADS + head)
        assert figure[layer, head] > 5 * others_of.max()
    assert found.key_max[layer, head].max(axis=0).argmax() == channel
    assert found.key_outlier_centred[layer, head] < 2

    for name in ("key_std", "value_std"):
        text, visual = np.median(getattr(found, name), axis=(1, 3)).T
        np.testing.assert_allclose(visual / text, planted.VISUAL, rtol=0.3)
    text, visual = found.value_norm.mean(axis=1).T
    np.testing.assert_allclose(visual / text, planted.VISUAL, rtol=0.3)


def test_text_alone_warns_and_misses_the_visual_rows(plants: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "maps" / "text.safetensors"
    assert command_line.main(["map", str(plants), "--samples", str(plants / "text"), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"warning: {survey.TEXT_ONLY}" in printed.err
    assert "warning: 8 samples are few" in printed.err
    found = attention_map.load(out)
    assert len(found.facts.warnings) == 2
    assert np.isnan(found.key_max[:, :, VISUAL]).all()
    assert np.isfinite(found.key_max[:, :, TEXT]).all()
    assert np.isnan(found.modality_share).all()
    assert set(found.specialisation.flat) == {""}


def test_from_command_to_a_file(folder: Path, measured: AttentionMap, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "map.safetensors"
    assert command_line.main(["map", str(folder), "--out", str(out), "--json"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    told = json.loads(capsys.readouterr().out)
    assert equal(attention_map.load(out), measured)
    assert told["facts"] == dataclasses.asdict(measured.facts)
    np.testing.assert_allclose(told["statistics"]["entropy"]["values"], measured.entropy)
    assert not [name for name, known in told["statistics"].items() if "head_dim" in known["axes"]]

    assert command_line.main(["map", str(folder), "--out", str(out), "--limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"| {layer} ") for line in lines for layer in range(3)) == 9
    assert attention_map.load(out).facts.samples == 1


def test_an_interrupt_says_how_to_go_on(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(survey, "read_sample", interrupted)
    assert command_line.main(["map", str(folder), "--out", str(tmp_path / "m")]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a Hugging Face checkpoint"),
        (["CHECKPOINT", "--samples", "nowhere"], "samples.jsonl does not exist"),
        (["CHECKPOINT", "--limit", "0"], "must be at least 1, got 0"),
        (["CHECKPOINT", "--out", "CHECKPOINT"], "is a folder: give a file by --out"),
        (["CHECKPOINT", "--out", "/dev/null/map"], "/dev/null/map cannot be written"),
        (["CHECKPOINT", "--out", "CHECKPOINT/config.json"], "which is read: choose a place outside of it"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(folder: Path, arguments: list[str], message: str, capsys: Any) -> None:
    given = [argument.replace("CHECKPOINT", str(folder)) for argument in arguments]
    assert command_line.main(["map", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_no_map_is_one_line(measured: AttentionMap, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(UserError, match="no attention map"):
        attention_map.load(path)
    measured.save(path)
    whole = path.read_bytes()
    arrays = {f.name: getattr(measured, f.name) for f in attention_map.statistics()}
    facts = dataclasses.asdict(measured.facts)

    def other(facts: dict, **changed: np.ndarray) -> None:
        save_file(arrays | changed, path, {"facts": json.dumps(facts)})

    infinite = arrays["entropy"].copy()
    infinite[0, 0] = np.inf
    for change, why in (
        (lambda: path.write_bytes(whole[:-5]), "no attention map"),
        (lambda: path.write_bytes(b""), "no attention map"),
        (lambda: save_file({"x": infinite}, path), "not JSON"),
        (lambda: other({**facts, "format": 2}), "format 2"),
        (lambda: other({**facts, "more": 2}), "unknown key 'more'"),
        (lambda: other(facts, entropy=infinite), "entropy is not finite"),
        (lambda: other(facts, entropy=infinite[:2]), r"entropy is float32 \(2, 8\), not float32 \(3, 8\)"),
        (lambda: other(facts, entropy=infinite.astype(np.float64)), "entropy is float64"),
        (lambda: other(facts, more=infinite), "unexpected keyword argument 'more'"),
        (lambda: save_file({"entropy": infinite}, path, {"facts": json.dumps(facts)}), "missing"),
    ):
        change()
        with pytest.raises(UserError, match=why):
            attention_map.load(path)


def test_what_is_longer_than_the_model_reads_is_refused(checkpoint: Checkpoint, known: list[sampling.Sample]) -> None:
    long = dataclasses.replace(known[0], answer="red " * tiny.POSITIONS)
    with pytest.raises(UserError, match=f"the model reads {tiny.POSITIONS}"):
        survey.measure(checkpoint, [long])


def test_easy_vqa_in_place_of_a_folder() -> None:
    pytest.importorskip("easy_vqa")
    known = sampling.read("easy-vqa")
    assert len({sample.images[0] for sample in known}) == len(known) == sampling.EASY_VQA_SAMPLES
    assert all("train" in str(sample.images[0]) and sample.prompt and sample.answer for sample in known)
