"""export/memory.py: what was freed is the system's again."""

from __future__ import annotations

import subprocess
import sys

# The first block teaches glibc to take blocks of its size from the heap, the small ones keep the heap from shrinking.
FREED = """
import numpy as np
from export.memory import return_large_blocks

def own():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))


return_large_blocks()
del (first := [np.ones(2**24, np.uint8)])[:]
before, large, small = own(), [], []
for _ in range(32):
    large.append(np.ones(2**22, np.uint8))
    small.append(np.ones(2**10, np.uint8))
held = own() - before
del large[:]
print(held, own() - before)
"""


def test_large_blocks_do_not_stay_behind() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 100 * 1024
    assert left < held / 10
