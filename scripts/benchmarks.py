"""BENCHMARKS.md: every benchmark measured one after another on this machine, and written down with its command.

    python scripts/benchmarks.py                        what has no figures yet, then BENCHMARKS.md
    python scripts/benchmarks.py prefill load           these anew
    python scripts/benchmarks.py --render               BENCHMARKS.md from the figures that are there

Figures are kept as JSON in benchmarks/, one file a benchmark; one that is interrupted leaves the others. Bundles that
are measured are built in build/benchmarks. All together it takes hours: keep the machine quiet meanwhile.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
from engines.errors import Parser, check_exit, command
from figures import Figures
from reporting import choice, markdown, write

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("build/benchmarks")
FOLDER, FILE = Path("benchmarks"), Path("BENCHMARKS.md")
COLUMNS = "target", "wanted", "measured", "met"
HEAD = """\
# Benchmarks

Written by `python scripts/benchmarks.py` from the figures in [benchmarks](benchmarks), not by hand. Ratios are of runs
side by side in one go; absolute times are those of the machine that each section names.
"""


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder.

    Attributes:
        options: what it is run with.
        needs: folders in `WORK` that it measures, of `MADE`.
    """

    title: str
    script: str
    options: Sequence[str | Path] = ()
    needs: Sequence[str] = ()


@dataclass(frozen=True)
class Target:
    """What a figure is to be.

    Attributes:
        least: whether `wanted` is the least that it may be; else the most.
        found: from the benchmark's values; raises LookupError where they do not have it.
    """

    what: str
    benchmark: str
    wanted: float
    least: bool
    found: Callable[[dict[str, Any]], float]

    def row(self, known: Mapping[str, Figures]) -> list[str]:
        wanted = f"{'≥' if self.least else '≤'} {self.wanted:g}"
        try:
            found = self.found(known[self.benchmark].values)
        except LookupError:
            return [self.what, wanted, "not measured", ""]
        met = found >= self.wanted if self.least else found <= self.wanted
        return [self.what, wanted, f"{found:.3g}", "yes" if met else "no"]


def where(rows: Sequence[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The first of the rows that has these values.

    Raises:
        LookupError: none has.
    """
    for row in rows:
        if all(row[name] == value for name, value in values.items()):
            return row
    raise LookupError(values)


def _attention(values: dict[str, Any], bits: int) -> dict[str, Any]:
    return where(values["seconds"], peer=f"ours int{bits}", threads=1, slots=16_384)


def _rest(values: dict[str, Any]) -> float:
    """MiB of the runtime's peak that are neither weights nor cache."""
    return max(row["rest"] for row in values["rows"] if row["who"] == "runtime") / 2**20


def _decoded(values: dict[str, Any], name: str) -> float:
    """How many times as fast SmolLM2 is decoded, of float32 weights, by one thread."""
    group = where(values["groups"], model="smollm2", context=4096, threads=1)
    return float(where(group["aims"], name=name, weights="float32")["found"])


def _compacted(values: dict[str, Any]) -> float:
    """Compactions of SmolLM2 at `balanced`, % of its decoding."""
    group = where(values["groups"], model="smollm2", context=4096, threads=1)
    cell = where(group["cells"], way="ours balanced")
    if not cell["every"]:
        raise LookupError("every")
    return float(100 * cell["compaction"] / cell["every"] / cell["p50"])


def _built(values: dict[str, Any], name: str, what: str) -> float:
    return float(where(values["rows"], name=name)[what])


def _flat(values: dict[str, Any]) -> float:
    """The longest step of a long conversation over a fresh one's."""
    known = [cell["flat"] for group in values["groups"] for cell in group["cells"] if cell["flat"] is not None]
    if not known:
        raise LookupError("flat")
    return float(max(known))


MADE: dict[str, list[str]] = {
    "demo": ["export/build.py", "--out"],
    "smollm2-checkpoint": ["scripts/smollm2.py"],
}
BENCHMARKS = {
    "attention": Benchmark("Attention over the cache", "bench_attention.py", ["--slots", "1024,4096,16384"]),
    "prefill": Benchmark("Time to the first token", "bench_prefill.py", ["--keep", WORK / "prefill"]),
    "compact": Benchmark("Compaction", "bench_compact.py", [WORK / "demo"], ["demo"]),
    "load": Benchmark("Cold start", "bench_load.py", [WORK / "demo", "--checkpoint", "models/demo-vlm"], ["demo"]),
    "decode": Benchmark("Decoding", "bench_decode.py", ["--home", WORK / "decode"]),
    "overhead": Benchmark("The runtime's own time", "bench_overhead.py", ["--keep", WORK / "overhead"]),
    "latency": Benchmark(
        "ONNX Runtime and TensorRT", "compare_latency.py", [WORK / "demo", "--threads", "1"], ["demo"]
    ),
    "export": Benchmark(
        "Building a bundle", "bench_export.py", ["smolvlm-256m,qwen2-vl-2b", "--keep", WORK / "export"]
    ),
}
TARGETS = [
    Target("attention over an int8 store of 16k slots, one thread, of the memory floor", "attention", 1.5, False,
           lambda values: float(_attention(values, 8)["least_over_floor"])),
    Target("int4 there, of int8's time", "attention", 1.0, False,
           lambda values: float(_attention(values, 4)["least"] / _attention(values, 8)["least"])),
    Target("prefill with 75 % of 2,048 visual tokens pruned, times as fast", "prefill", 2.5, True,
           lambda values: float(where(values["rows"], images=8, pruned=75)["prefill_ratio"])),
    Target("selecting them, % of prefill", "prefill", 5.0, False,
           lambda values: 100 * where(values["rows"], images=8, pruned=75)["share"]),
    Target("decoding at 4k tokens, SmolLM2-135M, `off`, times as fast as onnxruntime-genai", "decode", 1.0, True,
           lambda values: _decoded(values, "off over genai")),
    Target("`balanced` there, as onnxruntime-genai with its best KV setting", "decode", 1.5, True,
           lambda values: _decoded(values, "balanced over genai")),
    Target("`balanced` there, as transformers' eager attention", "decode", 5.0, True,
           lambda values: _decoded(values, "balanced over eager")),
    Target("a step once the window was full, of a fresh conversation's", "decode", 1.1, False, _flat),
    Target("compactions of SmolLM2-135M, `balanced`, % of decoding", "decode", 3.0, False, _compacted),
    Target("runtime's peak memory without weights and KV cache, MiB", "load", 150.0, False, _rest),
    Target("the runtime's own share of a step, %", "overhead", 5.0, False,
           lambda values: 100 * max(row["overhead"] for row in values["seconds"])),
    Target("building a bundle of SmolVLM-256M's size, seconds", "export", 120.0, False,
           lambda values: _built(values, "smolvlm-256m", "seconds")),
    Target("of Qwen2-VL-2B's size, seconds", "export", 600.0, False,
           lambda values: _built(values, "qwen2-vl-2b", "seconds")),
    Target("its memory, of the checkpoint's weights", "export", 1.5, False,
           lambda values: _built(values, "qwen2-vl-2b", "share")),
]  # fmt: skip


def make(name: str) -> None:
    """A folder that is measured, unless it is there.

    Raises:
        UserError: it could not be made.
    """
    if not (out := WORK / name).exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        script, *options = MADE[name]
        run([script, *options, str(out)])


def run(line: Sequence[str]) -> None:
    print(shlex.join(["$ python", *line]), file=sys.stderr)
    code = subprocess.run([sys.executable, *line], cwd=ROOT).returncode
    check_exit(code, f"{line[0]} ended with {code}, see above; what was measured before is kept in {FOLDER}")


def render(known: Mapping[str, Figures]) -> str:
    """BENCHMARKS.md."""
    parts = [HEAD, "## Targets\n", "\n".join(markdown([list(COLUMNS), *(target.row(known) for target in TARGETS)]))]
    for name, benchmark in BENCHMARKS.items():
        parts.append(f"\n## {benchmark.title}\n")
        if name in known:
            parts.append(f"```\n{known[name].command}\n```\n\n{known[name].text()}".rstrip("\n"))
        else:
            parts.append(f"Not measured:  python scripts/benchmarks.py {name}")
        if name in known and known[name].panels:
            parts.append(f"\n![{benchmark.title}]({(FOLDER / name).as_posix()}.svg)")
    return "\n".join(parts) + "\n"


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    arguments = parser.parse_args(argv)
    os.chdir(ROOT)
    names = choice(",".join(arguments.names), list(BENCHMARKS), "benchmark") if arguments.names else []
    FOLDER.mkdir(exist_ok=True)
    for name in [] if arguments.render else names or BENCHMARKS:
        file, benchmark = FOLDER / f"{name}.json", BENCHMARKS[name]
        if names or not file.exists():
            for folder in benchmark.needs:
                make(folder)
            run([f"scripts/{benchmark.script}", *map(str, benchmark.options), "--json", str(file)])
    known = {name: figures.read(file) for name in BENCHMARKS if (file := FOLDER / f"{name}.json").exists()}
    for name, each in known.items():
        each.draw(FOLDER / f"{name}.svg")
    write(FILE, render(known))
    print(f"wrote {FILE}")


if __name__ == "__main__":
    sys.exit(main())
