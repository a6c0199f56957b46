"""The lean runtime: open a bundle, ask it about images. numpy, Pillow, tokenizers, jinja2 and one backend.

>>> import runtime
>>> vlm = runtime.open("build/demo-vlm")
>>> print(vlm.generate("what color is the shape?", images=["shape.png"]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.model import VLM

__all__ = ["open"]


def open(
    path: str | Path,
    backend: str = "auto",
    level: str | None = None,
    threads: int | None = None,
    kernels: bool = True,
    memory_budget: str | int | None = None,
) -> VLM:
    """Open a bundle: check every byte of it, choose a backend and a compression level.

    Args:
        path: the folder that export/build.py wrote.
        backend: `auto`, `ort`, `trt-rtx` or `trt`.
        level: one of the bundle's compression levels; None takes its default.
        threads: CPU threads; None lets the backend choose.
        kernels: load the compiled kernels that this machine has (`python -m engines.plugins build`).
        memory_budget: bytes, or a text like "2GiB", that this process never exceeds: each request is let in at a level
            that fits, or refused before anything is allocated. Linux, on the CPU.

    Raises:
        UserError: the bundle is damaged or foreign, the backend cannot run it here, it has no such level, or the budget
            is too small.
    """
    from runtime.model import VLM  # here, so that `import runtime` stays quick

    return VLM.open(path, backend, level, threads, kernels, memory_budget)
