"""What the runtime itself takes of a decode step: the token loop in Python, and handing tensors to ONNX Runtime.

    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --keep build/smol
    python scripts/bench_overhead.py build/demo-vlm --level extreme --tokens 200 --json overhead.json

Without a bundle, one is built of random weights with the decoder of SmolLM2-135M: 30 layers, 9 query heads and 3 KV
heads of 64, 49,152 tokens. That takes some minutes and 2 GB of disk. Tokens are generated on one core, and each step is
taken apart: from the return of one call of the decode graph to the next call it is the loop; handing over is a call of
a graph that has the same inputs and outputs and computes nothing. Steps in which the window is compacted do not count.
Times are the processor's, of this process: what else the machine does takes no part in them.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

import runtime
from demo_vlm.vocabulary import IMAGE_SIZE, PATCH
from engines.bundle import Bundle, Graph
from engines.errors import Parser, UserError, check_exit, command, positive
from engines.ort import OrtSession
from figures import Figures, typed
from plots import Panel
from reporting import QUESTION, json_option
from runtime import backends
from runtime.backends import load
from runtime.sampling import Sampling

if TYPE_CHECKING:
    from transformers import LlavaConfig

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "greedy": Sampling(),
    "temperature, top-k, top-p": Sampling(0.8, 50, 0.9, seed=0),
    "all filters, 5 logprobs": Sampling(0.8, 0, 0.9, 0.02, 1.1, ["never said"], 0, 5),
}
NOTE = "Medians. Overhead: loop and handing over, as a share of the step."
CALLS = 200  # of the graph that computes nothing


@dataclass(frozen=True)
class Row:
    """Medians of the steps, in seconds.

    Attributes:
        loop: between two calls of the decode graph.
        handing: a call of a graph with its inputs and outputs that computes nothing.
        overhead: both, as a share of the step.
    """

    way: str
    steps: int
    step: float
    loop: float
    handing: float
    overhead: float


class Clock:
    """Stands in for ONNX Runtime's session, and notes of each run when it began and when it ended."""

    def __init__(self, session: Any, decodes: bool, runs: list[tuple[bool, float, float]]) -> None:
        self._session, self._decodes, self._runs = session, decodes, runs

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> Any:
        start = time.process_time()
        outputs = self._session.run(names, feeds)
        self._runs.append((self._decodes, start, time.process_time()))
        return outputs


def measure(path: Path, level: str | None, tokens: int) -> list[Row]:
    runs: list[tuple[bool, float, float]] = []

    def timed(bundle: Bundle, graph: str, *options: Any) -> Any:
        session: Any = load(bundle, graph, *options)
        decodes = bundle.manifest.graphs[graph].kind == "decode"
        session._session = Clock(session._session, decodes, runs)
        return session

    with patch.object(backends, "load", timed):
        vlm = runtime.open(path, "ort", level, threads=1)
        opened = vlm.bundle.manifest.levels[vlm.level]
        rows = []
        for way, sampling in WAYS.items():
            result = vlm.generate(QUESTION, max_new_tokens=tokens, ignore_eos=True, sampling=sampling)
            bucket = next(bucket for bucket in opened.buckets if bucket.length == result.stats.bucket)
            # A step is a decode after a decode.
            pairs = [(first, then) for first, then in itertools.pairwise(runs) if first[0] and then[0]]
            loops = np.array([then[1] - first[2] for first, then in pairs])
            steps = np.array([then[2] - first[2] for first, then in pairs])
            runs.clear()
            if len(steps) == 0:
                raise UserError(f"level {vlm.level} decoded too few tokens in a row: give more --tokens")
            handing = handing_over(vlm.bundle.manifest.graphs[bucket.decode])
            share = float(np.median((loops + handing) / steps))
            rows.append(Row(way, len(steps), float(np.median(steps)), float(np.median(loops)), handing, share))
    return rows


def handing_over(graph: Graph) -> float:
    """Median seconds of a call of a graph with the same inputs and outputs, which are zeros."""
    import onnx
    from onnx import helper, numpy_helper

    inputs, outputs = (
        [
            helper.make_tensor_value_info(s.name, helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype)), s.shape)
            for s in specs
        ]
        for specs in (graph.inputs, graph.outputs)
    )
    nodes, shapes = [], []
    for spec in graph.outputs:
        shapes.append(numpy_helper.from_array(np.array(spec.shape, np.int64), f"{spec.name}.shape"))
        zero = numpy_helper.from_array(np.zeros(1, spec.dtype))
        nodes.append(helper.make_node("ConstantOfShape", [f"{spec.name}.shape"], [spec.name], value=zero))
    nothing = helper.make_graph(nodes, "nothing", inputs, outputs, shapes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nothing.onnx"
        onnx.save(helper.make_model(nothing, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
        session = OrtSession(file, 1)
    feeds = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in graph.inputs}
    times = []
    for _ in range(CALLS):
        start = time.process_time()
        session._session.run(list(session.outputs), feeds)
        times.append(time.process_time() - start)
    return float(np.median(times))


def configuration(
    layers: int = 30, words: int = 49_152, image_size: int = IMAGE_SIZE, patch: int = PATCH, positions: int = 2048
) -> LlavaConfig:
    """SmolLM2-135M's decoder, and next to no vision."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    text = LlamaConfig(
        vocab_size=words,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=patch,
        projection_dim=32,
    )
    return LlavaConfig(  # type: ignore[call-arg]  # image_token_id is an alias
        vision_config=vision,
        text_config=text,
        image_token_id=4,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(image_size // patch) ** 2,
        tie_word_embeddings=True,
    )


def checkpoint(folder: Path, config: LlavaConfig) -> Path:
    """Random weights, with the demo model's tokenizer and as many more words as it takes."""
    import random_checkpoint
    from demo_vlm.saving import build_processor

    vision = config.to_dict()["vision_config"]
    return random_checkpoint.save(folder, config, build_processor(vision["image_size"], vision["patch_size"]))


def build(folder: Path, config: LlavaConfig | None = None) -> Path:
    """The bundle of a random checkpoint, in `folder`."""
    model = checkpoint(folder / "checkpoint", config or configuration())
    line = [sys.executable, ROOT / "export" / "build.py", model, "--recipe", "off", "--buckets", 96, "--jobs", 1]
    line += ["--out", folder / "bundle"]
    code = subprocess.run([str(part) for part in line], stdout=2).returncode
    check_exit(code, f"the bundle could not be built (exit code {code}): see above")
    return folder / "bundle"


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["how tokens are chosen", "steps", "step, ms", "loop, µs", "handing over, µs", "overhead, %"]]
    for row in rows:
        times = f"{1e3 * row.step:.1f}", f"{1e6 * row.loop:.0f}", f"{1e6 * row.handing:.0f}"
        lines.append([row.way, str(row.steps), *times, f"{100 * row.overhead:.2f}"])
    return lines


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "bundle", nargs="?", type=Path, help="default: a random decoder of SmolLM2-135M's size is built"
    )
    parser.add_argument("--level", help="of the bundle; default: its own")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="build there, and leave it, for a next time")
    parser.add_argument("--tokens", type=positive, default=60, metavar="N", help="generated each time; default: 60")
    json_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.bundle and arguments.keep:
        raise UserError("--keep is for a bundle that is built: leave it out, or the bundle")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        path = arguments.bundle or build(arguments.keep or Path(temporary))
        rows = measure(path, arguments.level, arguments.tokens)
    seconds = {"seconds": [asdict(row) for row in rows]}
    panel = Panel("the runtime's own share of a step", "", "%", {row.way: [[100 * row.overhead]] for row in rows})
    Figures(typed("bench_overhead.py", argv), {"": table(rows)}, [NOTE], seconds, [panel]).report(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
