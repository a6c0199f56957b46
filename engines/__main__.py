"""python -m engines plans BUNDLE --backend trt  |  python -m engines triton BUNDLE --out DIR"""

from __future__ import annotations

if __name__ == "__main__":
    import engines.interruption  # noqa: F401

import argparse
import sys
from pathlib import Path

from engines import plans, triton, trt
from engines.errors import Parser, command, positive


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m engines",
        description="Build a bundle's plans where they will run, or put it where other servers look for models.",
        epilog="The kernels have a command of their own:  python -m engines.plugins --help",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    built = commands.add_parser(
        "plans",
        help="build TensorRT plans of a bundle's graphs, on the machine that will run them",
        description="Build TensorRT plans of a bundle's graphs and put them into it, in the place of older ones. Needs "
        "neither the checkpoint nor PyTorch: build the bundle anywhere, copy it to the device, and type this there.",
        epilog="example:  python -m engines plans build/demo-vlm --backend trt",
    )
    built.set_defaults(run=lambda arguments: plans.command(arguments.bundle, arguments.backend, arguments.bodies))
    built.add_argument("bundle", type=Path, help="folder that export/build.py wrote; it is replaced when all is built")
    built.add_argument("--backend", choices=[*trt.BACKENDS], default="trt", help="default: trt")
    built.add_argument("--bodies", action="store_true", help="build the operators' bodies of standard operators, for "
                       "which no plugin library is needed")  # fmt: skip
    made = commands.add_parser(
        "triton",
        help="write a model repository for NVIDIA Triton Inference Server",
        description="Write a model repository for NVIDIA Triton Inference Server: one model, which its Python backend "
        "runs with this package's runtime, and streams. Install the package in the server's container.",
        epilog="example:  python -m engines triton build/demo-vlm --out build/triton --instances 2",
    )
    made.set_defaults(run=_triton)
    made.add_argument("bundle", type=Path, help="folder that export/build.py wrote")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="the repository's folder; must not exist")
    made.add_argument("--name", help="the model's (default: that of the bundle's folder)")
    made.add_argument("--instances", type=positive, default=1, metavar="N", help="processes that answer side by side, "
                      "each with its own weights (default: 1)")  # fmt: skip
    made.add_argument("--link", action="store_true", help="link to the bundle's folder instead of copying its files: "
                      "a container must have it at the same place")  # fmt: skip
    made.add_argument("--level", help="compression level (default: the bundle's)")
    made.add_argument("--backend", help="auto, ort, trt-rtx or trt (default: auto)")
    made.add_argument("--threads", type=positive, metavar="N", help="CPU threads of an instance (default: as many as "
                      "there are)")  # fmt: skip
    return parser


def _triton(arguments: argparse.Namespace) -> None:
    a = arguments
    name = triton.write(a.bundle, a.out, a.name, a.instances, a.link, a.level, a.backend, a.threads)
    print(f"wrote {a.out}: start it with  tritonserver --model-repository {a.out}   (model {name})")


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
