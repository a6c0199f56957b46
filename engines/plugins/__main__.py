"""Compile the operators' kernels on this machine, or trust those that a bundle ships.

python -m engines.plugins build              what can be compiled here: for ONNX Runtime (a C++ compiler), and for
                                             TensorRT (nvcc and TensorRT's headers)
python -m engines.plugins build --arch 87    TensorRT plugins for one GPU: 87 is Jetson Orin
python -m engines.plugins trust BUNDLE       load this bundle's kernels from now on
python -m engines.plugins list               what is here
"""

from __future__ import annotations

if __name__ == "__main__":
    import engines.interruption  # noqa: F401

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from engines import bundle as bundles
from engines.errors import Parser, UserError, command
from engines.plugins import cpu_library, cuda_library, store


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m engines.plugins", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="compile the kernels; nothing is done where they are up to date")
    build.set_defaults(run=_build)
    build.add_argument("--only", choices=("cpu", "cuda"), help="the library for ONNX Runtime, or that for TensorRT")
    known = " ".join(name.removeprefix("sm_") for name in cuda_library.ARCHITECTURES)
    build.add_argument(
        "--arch",
        type=_architecture,
        nargs="+",
        metavar="N",
        help=f"compute capabilities of the TensorRT plugins, for example 87 (default: {known})",
    )
    build.add_argument("--out", type=Path, metavar="DIR", help="also put the libraries into this folder")

    trust = commands.add_parser("trust", help="take over a bundle's libraries: they are native code, and will run")
    trust.set_defaults(run=_trust)
    trust.add_argument("bundle", type=Path, help="folder that export/build.py wrote")

    listing = commands.add_parser("list", help="the libraries of this machine")
    listing.set_defaults(run=_list)
    return parser


def _architecture(text: str) -> str:
    digits = text.removeprefix("sm_").replace(".", "")
    if not digits.isdecimal() or len(digits) not in (2, 3):
        raise argparse.ArgumentTypeError(f"must be a compute capability such as 87, got {text}")
    return f"sm_{digits}"


def _build(arguments: argparse.Namespace) -> None:
    if arguments.arch and arguments.only == "cpu":
        raise UserError("--arch is for the TensorRT plugins: leave out --only cpu")
    if arguments.out:
        bundles.check_outside(arguments.out / cpu_library.NAME)
    architectures = sorted({*(arguments.arch or cuda_library.ARCHITECTURES)}, key=lambda name: int(name[3:]))
    asked = arguments.only or ("cuda" if arguments.arch else None)
    makers: dict[str, tuple[str, Callable[[], store.Stored]]] = {
        "cpu": (cpu_library.NAME, store.cpu),
        "cuda": (cuda_library.NAME, lambda: store.cuda(architectures)),
    }
    for kind, (name, make) in makers.items():
        if arguments.only not in (None, kind):
            continue
        print(f"{name}: compiling ...", end=" ", flush=True)
        try:
            built = make()
        except UserError as error:
            print("no")
            if kind == asked:
                raise
            print(f"  skipped: {error}")
            continue
        print(f"{', '.join(built.architectures)}\n  {built.path}")
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(built.path, arguments.out / name)
            print(f"  {arguments.out / name}")


def _trust(arguments: argparse.Namespace) -> None:
    for path in store.trust(bundles.read(arguments.bundle)):
        print(path)


def _list(arguments: argparse.Namespace) -> None:
    for library in store.stored():
        print(f"{library.path}  {', '.join(library.architectures)}")


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
