"""Time to the first token, by images in the prompt and by the share of visual tokens that is pruned.

    python scripts/bench_prefill.py
    python scripts/bench_prefill.py --keep build/prefill --images 1,8 --json prefill.json
    python scripts/bench_prefill.py build/prefill/bundle

Without a bundle, one is built of random weights: the decoder of SmolLM2-135M behind a small vision encoder of 256
tokens an image, so that eight images are 2,048, and a level for each share (--pruned). That takes some minutes and 2 GB
of disk. Levels differ in nothing but how many visual tokens they keep; all keep every key and value in float32. One
thread, all levels in turn; ratios are of the same turn.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import Progress

import bench_overhead
import runtime
from engines import bundle as bundles
from engines.errors import Parser, UserError, check_exit, command, positive
from figures import Figures, typed
from plots import Panel
from reporting import json_option
from runtime.model import VLM

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "what is the number in row 1 column 1 ?"
IMAGE_SIZE, PATCH = 256, 16  # 256 tokens an image
POSITIONS = 4096
IMAGES, PRUNED = [1, 2, 4, 8], [0, 25, 50, 75, 89]
QUICK_IMAGES, QUICK_PRUNED = [1], [0, 75]
QUICK_SIZES = {"layers": 1, "words": 300, "image_size": 64}  # 16 tokens an image
HEADER = (
    "images",
    "pruned, %",
    "visual tokens",
    "bucket",
    "vision, ms",
    "selecting, ms",
    "prefill, ms",
    "first token, ms",
)
RATIOS = "prefill, x", "first token, x", "selecting, % of prefill"
NOTE = (
    "Medians of {times} turns, one thread. First token: images decoded, vision, prefill. x: times as fast as with "
    "nothing pruned, in the same turn. Selecting: the vision graph beside one that keeps all; its share is of both."
)
RECIPE = """\
[perception]
method = "diversity"
keep = {keep}

[budget]
keep = 1.0
shallow_rate = 0.0
deep_rate = 0.0

[quantize]
method = "float32"

[window]
least = 32
most = 32
recent = 0.0
chunk = 1
compact = false
dtype = "float32"
"""


@dataclass(frozen=True)
class Turn:
    """Seconds of one prompt at one level, up to its first token."""

    vision: float
    prefill: float
    first: float


@dataclass(frozen=True)
class Row:
    """A number of images at a level: medians, seconds; ratios to the level that prunes nothing, turn by turn."""

    images: int
    pruned: int
    tokens: int
    bucket: int
    vision: float
    selecting: float
    prefill: float
    first: float
    prefill_ratio: float
    first_ratio: float

    @property
    def share(self) -> float:
        """Selecting, of selecting and prefill."""
        return self.selecting / (self.selecting + self.prefill)


def level_of(pruned: int) -> str:
    return f"pruned-{pruned}"


def pruned_of(level: str) -> int:
    return int(level.removeprefix("pruned-"))


def build(folder: Path, images: Sequence[int], pruned: Sequence[int], quick: bool = False) -> Path:
    """A bundle of random weights with a level for each share.

    Args:
        quick: tiny, and without kernels.

    Raises:
        UserError: it could not be built.
    """
    sizes = {"image_size": IMAGE_SIZE, "patch": PATCH, "positions": POSITIONS} | (QUICK_SIZES if quick else {})
    config = bench_overhead.configuration(**sizes)
    checkpoint = bench_overhead.checkpoint(folder / "checkpoint", config)
    line = [sys.executable, ROOT / "export" / "build.py", checkpoint, "--out", folder / "bundle", "--guard", "off"]
    line += ["--jobs", 1, "--no-report", *(["--kernels", "never"] if quick else []), "--images", *images]
    for share in pruned:
        recipe = folder / f"{level_of(share)}.toml"
        recipe.write_text(RECIPE.format(keep=1 - share / 100))
        line += ["--recipe", recipe]
    code = subprocess.run([str(part) for part in line], stdout=2).returncode
    check_exit(code, f"the bundle could not be built (exit code {code}): see above")
    return folder / "bundle"


def ask(vlm: VLM, images: list[np.ndarray]) -> tuple[Turn, int, int]:
    """-> the times, visual tokens, bucket."""
    stats = vlm.generate(QUESTION, images, 1, ignore_eos=True).stats
    seconds = {part: stats.seconds.get(part, 0.0) for part in ("images", "vision", "prefill", "extend")}
    if seconds["extend"]:
        raise UserError(
            f"level {vlm.level} has no bucket for {len(images)} images: build it with --images {len(images)}"
        )
    return Turn(seconds["vision"], seconds["prefill"], sum(seconds.values())), stats.visual_tokens, stats.bucket


def measure(path: Path, counts: Sequence[int], times: int) -> list[Row]:
    manifest = bundles.read(path).manifest
    levels = sorted(manifest.levels, key=pruned_of)
    layout = manifest.model.layouts[0]
    draw = np.random.default_rng(0)
    rows = []
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("reading prompts", total=len(counts) * (times + 1) * len(levels))
        for count in counts:
            images = [draw.integers(0, 256, (layout.height, layout.width, 3), np.uint8) for _ in range(count)]
            vlms = {level: runtime.open(path, "ort", level, threads=1) for level in levels}
            turns: dict[str, list[Turn]] = {level: [] for level in levels}
            sizes = {}
            for again in range(times + 1):  # the first loads the graphs
                for level, vlm in vlms.items():
                    turn, *sizes[level] = ask(vlm, images)
                    if again:
                        turns[level].append(turn)
                    progress.advance(task)
            rows += [row(count, level, sizes[level], turns[level], turns[levels[0]]) for level in levels]
    return rows


def row(count: int, level: str, sizes: list[int], turns: list[Turn], whole: list[Turn]) -> Row:
    """
    Args:
        whole: the same turns of the level that prunes nothing.
    """
    pairs = list(zip(turns, whole, strict=True))
    middle = [median(getattr(turn, part) for turn in turns) for part in ("prefill", "first")]
    ratios = [median(getattr(b, part) / getattr(a, part) for a, b in pairs) for part in ("prefill", "first")]
    vision, selecting = median(turn.vision for turn in turns), median(a.vision - b.vision for a, b in pairs)
    return Row(count, pruned_of(level), sizes[0], sizes[1], vision, max(selecting, 0.0), *middle, *ratios)


def cells(row: Row) -> list[str]:
    times = [f"{1e3 * second:,.1f}" for second in (row.vision, row.selecting, row.prefill, row.first)]
    ratios = [f"{row.prefill_ratio:.2f}", f"{row.first_ratio:.2f}", f"{100 * row.share:.1f}"]
    return [str(row.images), str(row.pruned), f"{row.tokens:,}", f"{row.bucket:,}", *times, *ratios]


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _shares(text: str) -> list[int]:
    shares = sorted({int(part) for part in text.split(",")} | {0})
    if not 0 <= shares[0] <= shares[-1] < 100:
        raise argparse.ArgumentTypeError(f"shares are from 0 to 99, got {text}")
    return shares


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path, help="default: one of random weights is built")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="build there, and leave it, for a next time")
    parser.add_argument("--images", type=_numbers, metavar="N,N", help="in a prompt; default: 1,2,4,8")
    parser.add_argument("--pruned", type=_shares, metavar="P,P", help="percent; default: 0,25,50,75,89")
    parser.add_argument("--times", type=positive, metavar="N", help="turns; default: 5")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, few images, one turn: does it run at all")
    json_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.bundle and arguments.keep:
        raise UserError("--keep is for a bundle that is built: leave it out, or the bundle")
    quick = arguments.quick
    arguments.images = arguments.images or (QUICK_IMAGES if quick else IMAGES)
    arguments.pruned = arguments.pruned or (QUICK_PRUNED if quick else PRUNED)
    arguments.times = arguments.times or (1 if quick else 5)
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        path = arguments.bundle or build(folder, arguments.images, arguments.pruned, arguments.quick)
        if not all(level.startswith(level_of(0)[:-1]) for level in bundles.read(path).manifest.levels):
            raise UserError(f"{path} was not built by this script: leave it out, or give the one of --keep")
        rows = measure(path, arguments.images, arguments.times)
    table, note = {"": [[*HEADER, *RATIOS], *map(cells, rows)]}, NOTE.format(times=arguments.times)
    lines: dict[str, list[list[float]]] = {}
    for each in rows:
        lines.setdefault(f"ours, {each.images} images", []).append([each.pruned, each.first])
    panel = Panel("until the first token", "visual tokens that are pruned, %", "seconds", lines)
    values = {"rows": [asdict(row) | {"share": row.share} for row in rows]}
    Figures(typed("bench_prefill.py", argv), table, [note], values, [panel]).report(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
