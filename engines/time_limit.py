"""An end to what a checkpoint's own program computes, its chat template, which may loop without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any

from engines.errors import UserError

TEMPLATE = "<template>"  # the file, as jinja2 calls it
SECONDS = 5.0  # of a processor; a template takes thousandths of one
STEPS = 256  # to ask for the time takes longer than they do


@contextmanager
def time_limit(what: str = "the chat template", seconds: float = SECONDS) -> Iterator[None]:
    """Ends what runs in it after so many seconds of this thread's own, however busy the machine is.

    Its clock is read every so many lines of a template and calls: a signal would be heard in the main thread only.

    Raises:
        UserError: they are over.
    """
    end, steps = time.thread_time() + seconds, count(1)

    def step(frame: FrameType, *_: Any) -> Any:
        if next(steps) % STEPS == 0 and time.thread_time() > end:
            raise UserError(f"{what} computes for more than {seconds:g} s, as if it had no end: mend or replace it")
        return step if frame.f_code.co_filename == TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)
