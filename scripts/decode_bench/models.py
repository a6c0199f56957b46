"""The decoders that are compared, made when they are first asked for: checkpoints for peers, bundles for us."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import check_exit

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo-vlm"
SHORT = 128  # tokens of the bucket whose prefill is real: what each way computes is compared there
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] if m['content'] is string else m['content'][0]['text'] }} {% endfor %}"
)


@dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
        contexts: that are measured by default.
        make: writes its Hugging Face checkpoint into a folder; None: it is there.
        kernels: ours are compiled and checked for it; without them nothing of it is worth a comparison.
    """

    name: str
    what: str
    contexts: tuple[int, ...]
    make: Callable[[Path], None] | None = None
    kernels: bool = True


def llama(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, words: int, positions: int) -> Any:
    """Writes a Llama of these sizes and random weights, with the demo model's tokenizer and as many words more."""

    def make(folder: Path) -> None:
        from transformers import LlamaConfig

        import random_checkpoint
        from demo_vlm.saving import build_processor

        config = LlamaConfig(
            vocab_size=words, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden // heads,
            max_position_embeddings=positions, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        tokenizer = build_processor().tokenizer
        tokenizer.chat_template = TEMPLATE
        random_checkpoint.save(folder, config, tokenizer, "float32")

    return make


def smollm2(folder: Path) -> None:
    import smollm2

    smollm2.save(folder)


def demo_text(folder: Path) -> None:
    """The demo VLM's decoder as a model of its own, for peers that take no LLaVA."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, LlamaForCausalLM

    vlm: Any = AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.float32, local_files_only=True)
    text = LlamaForCausalLM(vlm.config.get_text_config())
    text.model.load_state_dict(vlm.model.language_model.state_dict())
    text.lm_head.load_state_dict(vlm.lm_head.state_dict())
    text.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO, local_files_only=True).save_pretrained(folder)


SMOLLM2 = (576, 9, 3, 1536, 49_152)  # sizes of SmolLM2-135M
MODELS = {
    model.name: model
    for model in (
        Model("demo", "the demo VLM's decoder", (512,), demo_text),
        Model("smollm2", "SmolLM2-135M-Instruct", (512, 2048, 4096), smollm2),
        Model("gqa", "30 layers, 9 heads, 3 KV heads of 64, random", (8192, 16_384), llama(30, *SMOLLM2, 32_768)),
        Model("mha", "12 layers, 12 heads of 64, random", (4096, 16_384), llama(12, 768, 12, 12, 2048, 32_000, 32_768)),
        Model("tiny", "1 layer, 4 heads, 2 KV heads of 16", (SHORT,), llama(1, 64, 4, 2, 128, 300, 1024), False),
    )
}


def into(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, whole or not at all."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            make(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def checkpoint(model: Model, home: Path) -> Path:
    """What peers take."""
    assert model.make
    return into(home / model.name / "checkpoint", model.make)


def recipe(level: str, folder: Path, own: Path | None) -> Path:
    """The level's recipe without the one that it names for later questions, which would be built too."""
    from export import recipe as recipes

    lines = recipes.find(level, own).read_text().splitlines()
    file = folder / f"{level}.toml"
    file.write_text("\n".join(line for line in lines if not line.startswith("unknown")) + "\n")
    return file


def bundle(model: Model, weights: str, levels: list[str], contexts: list[int], home: Path) -> Path:
    """What we take: a bundle with buckets for these contexts.

    Raises:
        UserError: it could not be built.
    """
    out = home / model.name / "-".join([weights, *levels, *map(str, contexts)])
    if out.is_dir():
        return out
    given = DEMO if model.name == "demo" else checkpoint(model, home)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        files = [recipe(level, Path(temporary), given) for level in levels]
        line = [sys.executable, "-m", "decode_bench.bundle", "--real", SHORT, given, "--out", out, "--weights", weights]
        line += ["--buckets", *sorted({SHORT, *contexts}), "--guard", "off", "--no-report", "--jobs", 1]
        line += [] if model.kernels else ["--kernels", "never"]
        line += [part for file in files for part in ("--recipe", file)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
        code = subprocess.run([str(part) for part in line], env=environment, stdout=2).returncode
    check_exit(code, f"the bundle of {model.name} could not be built (exit code {code}): see above")
    return out
