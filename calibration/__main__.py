"""python -m calibration COMMAND: what layers look at, the tokens and bits they need, what a recipe costs, what fits."""

from __future__ import annotations

if __name__ == "__main__":
    import engines.interruption  # noqa: F401

import sys
from collections.abc import Sequence

from calibration.commands import COMMANDS
from engines import releases
from engines.errors import Parser, command


@command
def main(argv: Sequence[str] | None = None) -> int | None:
    parser = Parser(prog="python -m calibration", description="Fit compression to a checkpoint.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    arguments = parser.parse_args(argv)
    releases.check_installed()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
