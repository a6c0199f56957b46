"""What `python export/build.py` can be told."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from engines.errors import Parser, positive

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo-vlm"
DEFAULT_RECIPES = ("off", "balanced", "extreme")
DEFAULT_IMAGES = (1, 4, 8)
DEFAULT_TEXT = {True: (24,), False: (232, 1000)}  # tokens of question, by whether the model takes images


def image_size(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no HEIGHTxWIDTH in pixels, as 448x672")
    height, width = map(int, text.split("x"))
    return height, width


def arguments(description: str | None) -> argparse.ArgumentParser:
    presets = ", ".join(sorted(p.stem for p in (ROOT / "export" / "recipes").glob("*.toml")))
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="export/build.py", description=description, formatter_class=form)
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        default=DEMO,
        help="Hugging Face checkpoint folder (default: the demo model)",
    )
    parser.add_argument(
        "--out", type=Path, help="the bundle's folder; a bundle that is there is replaced (default: build/NAME)"
    )
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="NAME|FILE",
        help=f"a compression level: {presets}, or a .toml file; repeat for several levels in one bundle, lightest "
        f"first (default: {', '.join(DEFAULT_RECIPES)}). CHECKPOINT/recipes/NAME.toml is taken before a preset",
    )
    parser.add_argument(
        "--level", help="level used when the caller names none (default: balanced if it is there, else the first)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=("ort", "trt-rtx", "trt"),
        help="ort: ONNX Runtime; trt-rtx: plans by TensorRT-RTX, built without a GPU; trt: plans by TensorRT on this "
        "device; repeat for several (default: ort, which every bundle has)",
    )
    parser.add_argument(
        "--weights",
        choices=("float32", "float16", "int8", "int4"),
        default="float32",
        help="how the decoder's weights are stored, for all levels: int8 and int4 are whole numbers with a scale for "
        "every --group of them, computed with as such by ONNX Runtime; the head and the embedding table are int8 then. "
        "float16 holds the vision encoder's too, and TensorRT computes in it (default: float32)",
    )
    parser.add_argument(
        "--group",
        type=int,
        choices=(32, 64, 128),
        help="weights of a row that share a scale: more of them are smaller, fewer are more accurate (default: 32 with "
        "int4, 128 with int8)",
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "always", "never"),
        default="auto",
        help="compiled kernels of the operators, for ONNX Runtime (a C++ compiler) and, as plugins, for TensorRT "
        "(nvcc): auto ships what can be compiled here, always insists, never leaves all to the graphs' own function "
        "bodies (default: auto)",
    )
    parser.add_argument(
        "--image-sizes",
        type=image_size,
        nargs="+",
        default=(),
        metavar="HxW",
        help="sizes in pixels that images are brought to, each with a vision graph and tokens of its own; a picture "
        "gets the one that is nearest in shape and area. The first is what calibration works with (default: the "
        "checkpoint's own size; 448x448 where its processor takes any)",
    )
    parser.add_argument(
        "--images",
        type=positive,
        nargs="+",
        metavar="N",
        help="images per prompt to make a bucket for (default: those of 1 4 8 that fit the model's positions)",
    )
    parser.add_argument(
        "--text-tokens",
        type=positive,
        metavar="T",
        help="tokens of question to leave room for (default: 24; if the model takes no images 232, and 1000)",
    )
    parser.add_argument(
        "--buckets",
        type=positive,
        nargs="+",
        metavar="S",
        help="prompt lengths to build for, after visual-token pruning, instead of --images and --text-tokens",
    )
    parser.add_argument(
        "--samples",
        type=Path,
        help="folder with samples.jsonl and its images, to calibrate quantization with, but for a quarter that levels "
        "are judged by (default: CHECKPOINT/samples; pydoc, Python's documentation, for a model without images)",
    )
    parser.add_argument("--held-out", metavar="DIR", help="judge by these samples, calibrate with all of --samples")
    parser.add_argument(
        "--guard",
        choices=("auto", "lighten", "refuse", "warn", "off"),
        default="auto",
        help="what becomes of a level that costs more on held-out samples than its recipe's [guard] allows: lighten "
        "keeps more tokens and bits until it holds, and tells what; refuse ends the build; warn builds it as it is; "
        "off does not look. auto lightens recipes called by name and refuses .toml files (default: auto)",
    )
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="B", help="requests that are decoded at once, at most (default: 1)"
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="graphs exported side by side (default: one a core, 4 at most; 1 for a large model in int8 or int4)",
    )
    parser.add_argument(
        "--no-report",
        dest="report",
        action="store_false",
        help="leave report.html out: what the model looks at, what each level keeps of it and what that costs",
    )
    parser.add_argument("--verbose", action="store_true", help="also print every graph's size, time and largest error")
    return parser
