"""Are the CUDA kernels right on this GPU, how fast are they, and does a bundle run on it?

    python scripts/gpu_check.py
    python scripts/gpu_check.py --bundle BUNDLE --heads 28 --kv-heads 4 --head-dim 128
    python scripts/gpu_check.py --host          # the same checks on the kernels' host build: no GPU, nothing timed

Needs an NVIDIA GPU, PyTorch for it and nvcc; TensorRT, compute-sanitizer and onnxruntime-gpu are used where they are.
Every part says passed, failed, or skipped and why; gpu_check.json has all of it. Exit code: 0 where nothing failed, 1
where something did, 3 where there is no CUDA device and so nothing was checked.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import ctypes
import dataclasses
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gpu_timing
import runtime
from demo_vlm.data import make_page
from engines import bundle as bundles
from engines import cuda, ort, trt
from engines.bundle import Bundle
from engines.errors import Parser, UserError, command, one_line, positive
from engines.plugins import cuda_library, host_library
from engines.plugins.roofline import Device
from engines.trt_worker import gpu
from export.kernel_check import AttentionCase, check_attention, check_topk_gather
from gpu_timing import Timing
from reporting import new_file, write
from runtime import backends

NO_DEVICE = 3  # exit code
BUNDLE = Path(__file__).resolve().parents[1] / "build" / "demo-vlm"
SEEDS = 3
SLOTS = (1024, 4096, 16384, 65536)
LONG = {"cuda": 8_000, "cpu": 300}  # slots of the longest attention that is checked
MANY = {"cuda": 131_072, "cpu": 5_000}  # tokens of the longest selection
WINDOW = 128  # as in ROOFLINE.md
TOOLS = ("memcheck", "racecheck")
SANITIZED_CASES, SANITIZER_SECONDS, FOUND = 6, 1800, 9  # FOUND: its exit code where it found something
TOKENS = 40  # of an answer: enough that decoding is captured and the window compacted
QUESTION = "what is the number in row 1 column 1 ?"
WIDTH = 160
STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}


class Skipped(Exception):
    """A part that cannot run here, and why."""


@dataclass(frozen=True)
class Part:
    name: str
    state: str  # passed, failed or skipped
    detail: str


@dataclass
class Check:
    """One run of everything.

    Attributes:
        device: where the kernels run: "cuda", or "cpu" for their host build.
    """

    arguments: argparse.Namespace
    device: str
    folder: Path
    library: ctypes.CDLL | None = None
    parts: list[Part] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    gpu: Device | None = None

    def part(self, name: str, run: Callable[[], str]) -> None:
        try:
            self.parts.append(Part(name, "passed", run()))
        except Skipped as reason:
            self.parts.append(Part(name, "skipped", str(reason)))
        except Exception as error:  # whatever a driver, PyTorch or TensorRT comes up with is this part's failure
            self.parts.append(Part(name, "failed", one_line(error)))

    def run(self) -> None:
        arguments = self.arguments
        self.part("kernels build", self.build)
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            self.part(f"QuantKVAttention, seed {seed}", partial(self.attention, seed))
            self.part(f"TopKGather, seed {seed}", partial(self.topk_gather, seed))
        if arguments.library is None:
            self.part("kernels timed", self.time)
            for tool in TOOLS:
                self.part(tool, partial(self.sanitize, tool))
            self.part("arrays in GPU memory", self.arrays)
            self.part("bundle: ONNX Runtime", self.onnx_runtime)
            for backend in trt.BACKENDS:
                self.part(f"bundle: {backend} plans", partial(self.plans, backend))

    @property
    def built(self) -> Path:
        return self.arguments.library or self.folder / (
            host_library.NAME if self.device == "cpu" else cuda_library.NAME
        )

    def build(self) -> str:
        if self.arguments.library is not None:
            what = "as given"
        elif self.device == "cpu":
            host_library.build(self.built, self.arguments.define)
            what = "for the host: one thread after another, no GPU"
        else:
            what = build_for_gpu(self.built, self.arguments.define)
        self.library = ctypes.CDLL(str(self.built.resolve()))
        return f"{self.built.name}, {what}"

    def kernels(self) -> ctypes.CDLL:
        if self.library is None:
            raise Skipped("the kernels were not built")
        return self.library

    def attention(self, seed: int) -> str:
        cases, slots = self.arguments.cases, LONG[self.device]
        worst = check_attention(self.kernels(), cases, seed, self.device, slots)
        return f"{cases} cases, up to {slots:,} slots; the largest error is {worst:.0%} of what is allowed"

    def topk_gather(self, seed: int) -> str:
        cases, tokens = self.arguments.cases, MANY[self.device]
        check_topk_gather(self.kernels(), cases, seed, self.device, tokens)
        return f"{cases} cases, up to {tokens:,} tokens, byte for byte"

    def time(self) -> str:
        library = self.kernels()
        if self.device == "cpu":
            raise Skipped("no GPU: the host build's times mean nothing")
        arguments = self.arguments
        like = AttentionCase(
            slots=0,
            window=WINDOW,
            kv_heads=arguments.kv_heads,
            group=arguments.heads // arguments.kv_heads,
            head_dim=arguments.head_dim,
        )
        self.gpu = gpu_timing.this_gpu(gpu_timing.RUNS)
        bench = gpu_timing.Bench(self.device, self.gpu)
        for slots in arguments.slots:
            self.timings += [gpu_timing.attention(library, slots, bits, like, bench) for bits in (8, 4)]
            self.timings.append(gpu_timing.topk_gather(library, slots, like, bench))
        return f"a copy moves {self.gpu.bandwidth / 1e9:,.0f} GB/s"

    def sanitize(self, tool: str) -> str:
        self.kernels()
        if self.device == "cpu":
            raise Skipped("no GPU")
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            raise Skipped("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
        child = [
            sys.executable,
            __file__,
            "--library",
            str(self.built),
            "--cases",
            str(SANITIZED_CASES),
            "--seeds",
            "1",
        ]
        asked = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *child, "--out", str(self.folder / tool)]
        # Without PyTorch's own pool every tensor is an allocation, and what is written behind one is seen.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=SANITIZER_SECONDS, env=environment)
        except subprocess.TimeoutExpired as late:
            raise UserError(f"{tool} took longer than {late.timeout:.0f} s") from late
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "=====" in line or "error" in line]
            raise UserError(f"{tool} ended with {done.returncode}: {' | '.join(lines[-4:])}")
        return f"nothing found in {SANITIZED_CASES} cases of each kernel"

    def bundle(self) -> Bundle:
        path = self.arguments.bundle or BUNDLE
        if self.arguments.bundle is None and not path.exists():
            raise Skipped(f"there is no {path.name}: build it with  python export/build.py , or name one with --bundle")
        return bundles.read(path)

    def onnx_runtime(self) -> str:
        """The same question on the GPU and on the CPU."""
        bundle = self.bundle()
        if ort.providers()[0] == "CPUExecutionProvider":
            raise Skipped("this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu")
        answer = ask(bundle, "ort")
        if answer[0] == "CPUExecutionProvider":
            raise UserError("ONNX Runtime has a CUDA provider and did not use it: it lacks a library that it needs")
        where = "" if ort.device() else f"; tensors passed through the host: {ort.why_host()}"
        return like_the_cpu(bundle, answer) + where

    def plans(self, backend: str) -> str:
        """The same question by the plans, with enough tokens that CUDA graphs are captured and the window compacted."""
        bundle = self.bundle()
        known = backends.status(backend, bundle)
        if not known.available:
            raise Skipped(known.reason)
        return like_the_cpu(bundle, ask(bundle, backend))

    def arrays(self) -> str:
        """Slices and writes of arrays in GPU memory, as a state needs them, against numpy."""
        if self.device == "cpu":
            raise Skipped("no GPU")
        try:
            gpu = cuda.device()
        except UserError as error:
            raise Skipped(str(error)) from error
        random = np.random.default_rng(self.arguments.seed)
        for _ in range(self.arguments.cases):
            heads, window, width = (int(number) for number in random.integers(1, 40, 3))
            mirror = random.normal(size=(2, heads, window, width)).astype(np.float16)
            array = gpu.send({"it": mirror})["it"]
            first, last = sorted(int(number) for number in random.integers(0, window + 1, 2))
            new = random.normal(size=(2, heads, window, width)).astype(np.float16)
            array[:, :, first:last] = gpu.send({"it": new})["it"][:, :, first:last]
            mirror[:, :, first:last] = new[:, :, first:last]
            array[1, :, 0], mirror[1, :, 0] = 7, 7
            if not np.array_equal(np.asarray(array), mirror):
                raise UserError(f"rows {first} to {last} of {list(mirror.shape)} are not as numpy writes them")
        return f"{self.arguments.cases} windows, byte for byte"


def build_for_gpu(out: Path, defines: Sequence[str]) -> str:
    """The plugin library where TensorRT's headers are, else, or with macros, the kernels alone."""
    major, minor = torch.cuda.get_device_capability()
    architecture, nvcc = f"sm_{major}{minor}", cuda_library.find_nvcc()
    try:
        cuda_library.find_headers()
        plugins = not defines
    except UserError:
        plugins = False
    if plugins:
        cuda_library.build(out, [architecture])
        return f"for {architecture}, with the TensorRT plugins"
    command = [nvcc, "-shared", "-O3", "-std=c++17", "-Xcompiler=-fPIC", f"-arch={architecture}", "-cudart=static"]
    command += [*(f"-D{define}" for define in defines), *map(str, host_library.kernels()), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"nvcc cannot compile the kernels: {done.stderr or done.stdout}")
    return f"for {architecture}, the kernels alone, without plugins"


def ask(bundle: Bundle, backend: str) -> tuple[str, list[int]]:
    """The provider that ran, and the tokens of an answer about a drawn page."""
    page = make_page(np.random.default_rng(0))[0]
    result = runtime.open(bundle.path, backend).generate(QUESTION, [page], max_new_tokens=TOKENS, ignore_eos=True)
    return result.stats.provider, result.tokens


def like_the_cpu(bundle: Bundle, answer: tuple[str, list[int]]) -> str:
    """Raises UserError where an answer is not ONNX Runtime's on the CPU; behind its end rounding may differ."""
    with patch.object(ort, "PREFERRED", ("CPUExecutionProvider",)):
        _, expected = ask(bundle, "ort")
    ends = [i for i, token in enumerate(expected) if token in bundle.manifest.model.eos_token_ids]
    length = ends[0] + 1 if ends else len(expected)
    provider, tokens = answer
    if tokens[:length] != expected[:length]:
        raise UserError(f"{provider} answers {tokens[:length]}, the CPU {expected[:length]}")
    return f"{provider} gives the CPU's {length} tokens, and went on to {len(tokens)}"


def no_device() -> str | None:
    """Why no kernel can run on a GPU here."""
    if torch.cuda.is_available():
        return None
    if (capability := gpu()) is None:
        return "there is no NVIDIA GPU on this machine, or no driver for it"
    build = f"PyTorch {torch.__version__} is built without CUDA" if torch.version.cuda is None else "PyTorch sees none"
    return f"there is a GPU ({capability}), but {build}: install a PyTorch for it, see pytorch.org"


def machine(device: str) -> dict[str, Any]:
    here: dict[str, Any] = {"platform": platform.platform(), "python": platform.python_version()}
    here |= {"torch": torch.__version__, "onnxruntime": ort.ort_status().reason}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        here |= {name: getattr(properties, name) for name in ("name", "total_memory", "L2_cache_size")}
        here |= {"capability": f"sm_{properties.major}{properties.minor}", "cuda": torch.version.cuda}
    return here


def report(console: Console, check: Check) -> None:
    table = Table("part", "", "", box=box.MARKDOWN)
    for part in check.parts:
        table.add_row(part.name, f"[{STYLES[part.state]}]{part.state}", escape(part.detail))
    console.print(table)
    if check.timings:
        table = Table("kernel", "bits", "tokens", "µs", "/ roofline", "of a copy", "PyTorch / ours", box=box.MARKDOWN)
        for row in check.timings:
            table.add_row(
                *(row.kernel, str(row.bits), f"{row.tokens:,}", f"{1e6 * row.seconds:,.1f}"),
                *(f"{row.seconds / row.predicted:.2f}", f"{row.of_copy:.0%}"),
                f"{row.peer_seconds / row.seconds:.1f}",
            )
        console.print(table)
        console.print(
            "/ roofline: over the floor of engines/plugins/roofline.py at a copy's bandwidth. of a copy: share of that "
            "bandwidth. PyTorch: SDPA in float16; topk, sort and gather."
        )


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="default: build/demo-vlm, if it is there")
    parser.add_argument(
        "--cases", type=positive, default=100, metavar="N", help="of each kernel and seed; default: 100"
    )
    parser.add_argument("--seeds", type=positive, default=SEEDS, metavar="N", help=f"default: {SEEDS}")
    parser.add_argument("--seed", type=int, metavar="N", help="the first one; default: a new one each time")
    parser.add_argument("--slots", type=_numbers, default=SLOTS, metavar="N,N", help="timed; default: 1024 to 65536")
    parser.add_argument("--heads", type=positive, default=32, metavar="N", help="query heads, timed; default: 32")
    parser.add_argument("--kv-heads", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--head-dim", type=positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--host", action="store_true", help="check the kernels' build for the host: needs no GPU")
    parser.add_argument("--library", type=Path, metavar="FILE", help="check this one, already built, and nothing else")
    parser.add_argument(
        "--define", action="append", default=[], metavar="MACRO", help="for the kernels, such as a planted fault"
    )
    parser.add_argument(
        "--out", type=new_file("--out"), default="gpu_check.json", metavar="FILE", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    if arguments.heads % arguments.kv_heads:
        raise UserError(f"--heads {arguments.heads} is no multiple of --kv-heads {arguments.kv_heads}")
    if arguments.library is not None and not arguments.library.is_file():
        raise UserError(f"--library {arguments.library}: there is no such file")
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(2**31)
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if not arguments.host and (reason := no_device()) is not None:
        print(f"no CUDA device: {reason}; nothing was checked (--host checks the kernels' build for the host)")
        return NO_DEVICE
    with tempfile.TemporaryDirectory() as folder:
        check = Check(arguments, "cpu" if arguments.host else "cuda", Path(folder))
        check.run()
    values = {
        "command": ["scripts/gpu_check.py", *(sys.argv[1:] if argv is None else argv)],
        "device": "none: the kernels ran as host code" if arguments.host else "cuda",
        "machine": machine(check.device),
        "seed": arguments.seed,
        "parts": [dataclasses.asdict(part) for part in check.parts],
        "gpu": check.gpu and dataclasses.asdict(check.gpu),
        "timings": [dataclasses.asdict(row) for row in check.timings],
    }
    write(arguments.out, json.dumps(values, indent=1) + "\n")
    report(Console(width=WIDTH), check)
    return int(any(part.state == "failed" for part in check.parts))


if __name__ == "__main__":
    sys.exit(main())
