"""python -m runtime chat BUNDLE: questions line by line, answers as they come."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from engines.errors import UserError, one_line
from runtime.preprocess import measure
from runtime.session import Session

if TYPE_CHECKING:
    from runtime.generate import TextStream
    from runtime.model import VLM
    from runtime.sampling import Sampling

HELP = """Type a question. An answer is broken off with Ctrl-C.
/image FILE   give an image with the next question; repeat it for several
/save FILE    write the chat to a file
/load FILE    go on with a chat that was written; like /reset, it drops images that were not asked about
/reset        begin anew
/info         what the chat takes
/quit         or the end of the input"""
KIB = 1024


class Chat:
    """A session, and the images for the next question."""

    def __init__(self, vlm: VLM, max_new_tokens: int, sampling: Sampling, room: int | None = None) -> None:
        self.vlm, self.max_new_tokens, self.sampling, self.room = vlm, max_new_tokens, sampling, room
        self.session, self.images = Session(vlm, room), list[str]()

    def run(self, lines: TextIO) -> None:
        """Answer every line, until they end."""
        asks = lines.isatty()
        if asks:
            print(f"backend {self.vlm.backend}: {self.vlm.why}")
            print(f"level {self.session.level}; /help tells what else can be typed")
        while True:
            if asks:
                print("> ", end="", flush=True)
            if not (line := lines.readline()) or line.split()[:1] == ["/quit"]:
                break
            try:
                self.take(line.strip())
            except UserError as error:
                print(f"error: {one_line(error)}", file=sys.stderr, flush=True)

    def take(self, line: str) -> None:
        """One line: a command, or a question."""
        command, _, argument = line.partition(" ")
        if command.startswith("/"):
            known = {"/image": self._image, "/save": self._save, "/load": self._load}
            plain = {"/reset": self._reset, "/info": self._info, "/help": lambda: print(HELP)}
            if command in plain:
                plain[command]()
            elif command not in known:
                raise UserError(f"unknown command {command}: {', '.join((*known, *plain, '/quit'))}")
            elif not argument.strip():
                raise UserError(f"{command} needs a file:  {command} FILE")
            else:
                known[command](argument.strip())
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        images, self.images = self.images, []
        try:
            stream = self.session.stream(question, images, self.max_new_tokens, sampling=self.sampling)
            with _interruptible(stream):
                for piece in stream:
                    print(piece, end="", flush=True)
        except UserError as error:
            dropped = f"; its images are dropped: {', '.join(images)}" if images else ""
            raise UserError(f"{error}{dropped}") from error
        print(flush=True)

    def _image(self, file: str) -> None:
        measure(file)  # a mistake in its header is told here; room to decode it is the question's
        self.images.append(file)

    def _save(self, file: str) -> None:
        self.session.save(file)

    def _load(self, file: str) -> None:
        before = self.session.level
        self.session, self.images = Session.load(self.vlm, file), []
        if self.session.level != before:
            print(f"level {self.session.level}, as it was written, in place of {before}", flush=True)

    def _reset(self) -> None:
        self.session, self.images = Session(self.vlm, self.room), []

    def _info(self) -> None:
        context = self.session.context
        if context is None:
            print(f"level {self.session.level}; nothing read yet")
            return
        state, fp16 = context.state, self.vlm.model.kv_bytes(context.position)
        print(
            f"level {self.session.level}; {context.position} tokens read; KV {state.nbytes / KIB:.0f} KiB, "
            f"uncompressed {fp16 / KIB:.0f} KiB; window {state.count} of {state.window}, "
            f"{state.compactions} compactions",
            flush=True,
        )


@contextmanager
def _interruptible(stream: TextStream) -> Iterator[None]:
    """Within the block Ctrl-C ends the answer, not the program, and leaves the session whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
