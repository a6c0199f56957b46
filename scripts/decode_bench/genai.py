"""onnxruntime-genai: a model made by its own builder, run by its own loop.

With `--build` it makes the model, and ends. Scales of a quantized cache are static there, one a channel, and have to be
measured: here the largest keys and values of a prompt, by transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from decode_bench.worker import Decoder, serve

ROOM = 256  # tokens that a generator has room for behind the context
SHORT = 16  # the same while the logits are looked at
STEPS = {"none": 4.0, "int8": 1.0, "int4": 0.5}  # bytes of a number in the cache
QMAX = 128  # what the scales are of, as the builder wants to know


def build(checkpoint: str, out: Path, precision: str, kv: str, prompt: list[int]) -> None:
    """What the builder makes of a Hugging Face checkpoint."""
    line = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", str(out)]
    line += ["-p", precision, "-e", "cpu", "-c", str(out / "cache")]
    if kv != "none":
        out.mkdir(parents=True, exist_ok=True)
        file = out / "kv_scales.json"
        file.write_text(json.dumps({"scales": scales(checkpoint, prompt), "qmax": QMAX}))
        line += ["--extra_options", f"kv_cache_quant_scheme={kv}_per_channel", f"kv_cache_scale_file={file}"]
    subprocess.run(line, check=True, stdout=2)


def scales(checkpoint: str, prompt: list[int]) -> dict[str, list[list[float]]]:
    """Largest key and value of every channel over `QMAX`, a layer a row, [kv_heads * head_dim]."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True).eval()
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), cache=cache)

    def of(rows: Any) -> list[float]:
        return (rows[0].abs().amax(dim=1).clamp(min=1e-3) / QMAX).flatten().tolist()

    return {
        "k_scales": [of(layer.keys) for layer in cache.layers],
        "v_scales": [of(layer.values) for layer in cache.layers],
    }


class GenAI(Decoder):
    def __init__(self, folder: str, kv: str, threads: int) -> None:
        import onnxruntime_genai as og  # type: ignore[import-not-found]  # in an environment of its own

        self.og, self.kv, self.threads = og, kv, threads
        config = og.Config(folder)
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        self.versions = {"onnxruntime-genai": version("onnxruntime-genai"), "onnxruntime": version("onnxruntime")}
        self.config = json.loads((Path(folder) / "genai_config.json").read_text())["model"]

    def _begin(self, tokens: list[int], most: int) -> None:
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(max_length=most, min_length=most, do_sample=False)
        self.generator, self.most = self.og.Generator(self.model, params), most
        self.generator.append_tokens(np.array(tokens, np.int32))

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        self._begin(prompt, len(prompt) + len(forced) + SHORT)
        for token in forced:
            self.generator.append_tokens(np.array([token], np.int32))
        return np.asarray(self.generator.get_logits()).reshape(-1, self.config["vocab_size"])[-1]

    def fill(self, context: int) -> None:
        tokens = np.random.default_rng(0).integers(5, self.config["vocab_size"], context).tolist()
        self.context, self.last = context, tokens[-1]
        self._begin(tokens, context + ROOM)
        self.generator.generate_next_token()  # its logits are there already: the next one's are a step's work

    def step(self) -> None:
        self.generator.generate_next_token()

    def rewind(self) -> None:
        if self.kv != "none":  # the cache would be copied, and 0.18 refuses it for 4 bits: so it grows by some tokens
            return
        self.generator.rewind_to(self.context - 1)
        self.generator.append_tokens(np.array([self.last], np.int32))
        self.generator.generate_next_token()

    @property
    def kv_bytes(self) -> int:
        decoder = self.config["decoder"]
        rows = 2 * decoder["num_hidden_layers"] * decoder["num_key_value_heads"] * decoder["head_size"]
        tokens = self.most if self.kv == "none" else self.context  # a quantized cache grows by a copy a step
        return int(rows * tokens * STEPS[self.kv])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of the model that the builder made")
    parser.add_argument("--build", metavar="CHECKPOINT")
    parser.add_argument("--prompt", help="token ids, comma-separated, that scales are measured on")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--kv", choices=STEPS, default="none")
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    if a.build:
        prompt = [int(token) for token in a.prompt.split(",")]
        build(a.build, Path(a.folder), a.precision, a.kv, prompt)
        return 0
    return serve(lambda: GenAI(a.folder, a.kv, a.threads))


if __name__ == "__main__":
    sys.exit(main())
