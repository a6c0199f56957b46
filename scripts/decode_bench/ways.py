"""The ways to decode that are compared, and the processes that do it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from decode_bench import models
from decode_bench.models import ROOT, Model
from engines.errors import UserError

LEVELS = ("off", "light", "balanced", "extreme")
REFERENCE = "transformers eager"  # what others are compared with
PEERS, LLAMA = Path("build/peers"), Path("build/llama-cpp")
INSTALL = {
    PEERS: "python -m venv {0} && {0}/bin/pip install -r scripts/decode_bench/peers.txt",
    LLAMA: "python -m venv {0} && {0}/bin/pip install -r scripts/decode_bench/llama-cpp.txt",
}
# How alike a way's logits must be to the reference's, as a correlation: of floats, and of numbers in fewer bits.
ALIKE = {True: 0.9999, False: 0.8}


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        module: of this package, that runs in the process.
        weights: float32, int8 or int4.
        exact: neither weights nor the cache have fewer bits, and no token is dropped.
        package: that the process needs, as it is imported.
        folder: of the environment that should have it.
        options: of the process.
    """

    name: str
    module: str
    weights: str = "float32"
    exact: bool = False
    package: str = "onnxruntime"
    folder: Path = PEERS
    options: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def level(self) -> str:
        return self.options.get("level", "")


def ours(level: str, weights: str) -> Way:
    name = f"ours {level}" + (f", {weights} weights" if weights != "float32" else "")
    return Way(name, "ours", weights, level == "off" and weights == "float32", options={"level": level})


def huggingface(name: str, attention: str, cache: str) -> Way:
    package = "optimum.quanto" if cache == "quantized" else "transformers"
    options = {"attention": attention, "cache": cache}
    return Way(f"transformers {name}", "huggingface", "float32", cache != "quantized", package, options=options)


def genai(precision: str, kv: str) -> Way:
    weights = {"fp32": "float32"}.get(precision, precision)
    name = "genai " + ", ".join([*([f"{precision} weights"] if precision != "fp32" else []), f"{kv} KV"])
    options = {"precision": precision, "kv": "none" if kv == "fp32" else kv}
    return Way(name, "genai", weights, precision == kv == "fp32", "onnxruntime_genai", options=options)


def llama(kv: str) -> Way:
    return Way(f"llama.cpp Q4_1 weights, {kv} KV", "llama", "int4", False, "llama_cpp", LLAMA, {"kv": kv})


WAYS = [
    *(ours(level, "float32") for level in LEVELS),
    *(ours(level, weights) for weights in ("int8", "int4") for level in ("off", "balanced")),
    huggingface("eager", "eager", "dynamic"),
    huggingface("SDPA", "sdpa", "dynamic"),
    huggingface("static cache", "sdpa", "static"),
    huggingface("4-bit cache", "sdpa", "quantized"),
    *(genai(precision, kv) for precision in ("fp32", "int4") for kv in ("fp32", "int8", "int4")),
    *(llama(kv) for kv in ("f16", "q8_0", "q4_0")),
]


def interpreter(way: Way) -> Path | None:
    """The Python that has what the way needs: that of its environment, or this one; None: it is not installed."""
    if way.module == "ours":
        return Path(sys.executable)
    own, part = ROOT / way.folder, way.package.replace(".", "/")
    if any(own.glob(f"lib/python*/site-packages/{part}")):
        return own / "bin" / "python"
    here = [Path(folder) / part for folder in sys.path if folder.endswith("site-packages")]
    return Path(sys.executable) if any(folder.is_dir() for folder in here) else None


def missing(way: Way, model: Model) -> str:
    """Why it is left out; empty if it is not."""
    if way.module == "llama" and model.name != "smollm2":
        return "there is no GGUF file of this model"
    if interpreter(way) is None:
        return f"{way.package} is not installed: {INSTALL[way.folder].format(way.folder)}"
    return ""


def command(
    way: Way, model: Model, context: int, threads: int, home: Path, prompt: Sequence[int], built: Path | None
) -> list[str]:
    """What starts the process; what it needs is made first.

    Args:
        prompt: tokens that scales are measured on.
        built: our bundle.
    """
    python = str(interpreter(way))
    line = [python, "-m", f"decode_bench.{way.module}"]
    if way.module == "ours":
        line += [str(built), "--level", way.level]
    elif way.module == "huggingface":
        line += [str(models.checkpoint(model, home)), *_options(way)]
    elif way.module == "genai":
        name = f"genai-{way.options['precision']}-{way.options['kv']}"
        given = models.checkpoint(model, home)

        def make(folder: Path) -> None:
            build = [*line, str(folder), "--build", str(given), "--prompt", ",".join(map(str, prompt)), *_options(way)]
            with tempfile.TemporaryFile("w+") as log:
                if subprocess.run(build, env=environment(), stdout=log, stderr=log).returncode:
                    log.seek(0)
                    raise UserError(f"its builder failed: {_last_line(log)}")

        line += [str(models.into(home / model.name / name, make)), "--kv", way.options["kv"]]
    else:
        import importlib.util

        import smollm2

        spec = importlib.util.find_spec(smollm2.PACKAGE)
        assert spec and spec.submodule_search_locations
        file = Path(spec.submodule_search_locations[0]) / smollm2.FILE
        line += [str(file), *_options(way), "--context", str(context)]
    return [*line, "--threads", str(threads)]


def _options(way: Way) -> list[str]:
    return [part for name, value in way.options.items() for part in (f"--{name}", value)]


def environment() -> dict[str, str]:
    """As many threads as a process is told, and no network."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Process:
    """One way, running."""

    def __init__(self, line: list[str], threads: int, patience: float) -> None:
        """
        Args:
            patience: seconds that an order may take.
        """
        self.log, self.patience = tempfile.TemporaryFile("w+"), patience  # noqa: SIM115  # closed with the process
        settings = environment() | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen(line, env=settings, cwd=ROOT, **pipes)
        self.versions: dict[str, str] = self._answer()["versions"]

    def order(self, what: str, **given: Any) -> dict[str, Any]:
        """
        Raises:
            UserError: it cannot.
        """
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"order": what, **given}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise UserError(f"it ended: {self._said()}") from None
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], self.patience)[0]:
            self.process.kill()
            raise UserError(f"it took more than {self.patience:.0f} s: give more --patience")
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended: {self._said()}"}
        if "error" in answer:
            raise UserError(answer["error"])
        return answer

    def _said(self) -> str:
        return _last_line(self.log)


def _last_line(log: Any) -> str:
    log.seek(0)
    return str((log.read().strip().splitlines() or ["without a word"])[-1][:300])


def alike(logits: Sequence[float], reference: Sequence[float]) -> float:
    """Correlation of two ways' logits; 0 where one is not finite."""
    return float(np.nan_to_num(np.corrcoef(logits, reference)[0, 1]))
