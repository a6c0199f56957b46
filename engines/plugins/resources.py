"""What nvcc gives each kernel on each GPU architecture: registers, shared memory, spills.

python -m engines.plugins.resources    prints the table of ROOFLINE.md
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import UserError
from engines.plugins.cuda_library import ARCHITECTURES, find_nvcc
from engines.plugins.host_library import kernels

REGISTERS = 65536  # of a multiprocessor, on every architecture here; a warp takes them in units of 256
WARP, MOST_WARPS, UNIT = 32, {"sm_80": 64, "sm_86": 48, "sm_87": 48, "sm_90": 64}, 256
THREADS = {"attend_part": 128, "combine_parts": 256, "select_best": 1024, "gather_rows": 256}  # of a block
KERNEL = re.compile(
    r"Compiling entry function '(?P<mangled>\w+)' for '(?P<architecture>sm_\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers a thread, bytes of shared memory a block, bytes of stack and of spills a thread."""

    kernel: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spilled: int

    @property
    def warps(self) -> int:
        """Warps that a multiprocessor has at a time, by registers."""
        block = THREADS[self.kernel.split("<")[0]] // WARP
        of_warp = -(-self.registers * WARP // UNIT) * UNIT
        return min(REGISTERS // of_warp, MOST_WARPS[self.architecture]) // block * block


def parse(output: str) -> list[Resources]:
    """What `ptxas -v` says of each kernel."""
    return [
        Resources(
            _name(found["mangled"]),
            found["architecture"],
            int(found["registers"]),
            int(shared[1]) if (shared := re.search(r"(\d+) bytes smem", found["rest"])) else 0,
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
        )
        for found in KERNEL.finditer(output)
    ]


def _name(mangled: str) -> str:
    """attend_partILj4ELb1EE -> attend_part<4, true>: unsigned and bool template arguments, as kernels here have."""
    name = next(name for name in THREADS if name in mangled)
    arguments = re.match(r"I((?:L[jb]\d+E)+)E", mangled[mangled.index(name) + len(name) :])
    if not arguments:
        return name
    values = re.findall(r"L([jb])(\d+)E", arguments[1])
    return f"{name}<{', '.join(value if kind == 'j' else str(value == '1').lower() for kind, value in values)}>"


def measure(source: Path, architecture: str) -> list[Resources]:
    """Compile a kernel's source for one architecture.

    Raises:
        UserError: nvcc is missing, or refuses it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [find_nvcc(), "-std=c++17", "-O3", f"-arch={architecture}", "-Xptxas", "-v"]
        command += ["-Werror", "all-warnings", "-cubin", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"nvcc could not compile {source.name} for {architecture}: {done.stderr.strip()}")
    return parse(done.stderr)


def table(found: Sequence[Resources]) -> str:
    """In Markdown: a row a kernel; registers a thread, bytes of shared memory a block, warps a multiprocessor."""
    architectures = [each for each in ARCHITECTURES if any(x.architecture == each for x in found)]
    rows = ["| kernel | " + " | ".join(architectures) + " |", "|---" * (len(architectures) + 1) + "|"]
    for kernel in dict.fromkeys(x.kernel for x in found):
        own = {x.architecture: x for x in found if x.kernel == kernel}
        cells = [f"{own[each].registers} / {own[each].shared} / {own[each].warps}" for each in architectures]
        rows.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    try:
        found = [x for source in kernels() for each in ARCHITECTURES for x in measure(source, each)]
    except UserError as error:
        sys.exit(f"error: {error}")
    print(table(found))
    print("spills and stack frames:", sum(x.spilled + x.stack for x in found), "bytes")


if __name__ == "__main__":
    main()
