"""The one exception a user may see: what was wrong, where, and the next thing to type."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

MISSING_PACKAGE = (
    "activate the environment that scripts/quickstart.sh makes (. .venv/bin/activate), or install what is missing "
    "(pip install -e '.[export,scripts]')"
)
INTERRUPTED = 128 + signal.SIGINT  # exit code


class UserError(Exception):
    """A mistake the user can mend. Printed as one line; the command ends with exit code 2."""


class BackendError(RuntimeError):
    """What runs a graph failed in the middle of it: no mistake of a request's, so that a server answers 500.

    A command ends as with a `UserError`.
    """


def one_line(error: BaseException) -> str:
    """The message of `error` folded into a single line."""
    return " ".join(str(error).split()) or type(error).__name__


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, like every other mistake's."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see  {self.prog} --help")


def positive(text: str) -> int:
    """A whole number from 1, as the `type` of a command line's option."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def check_exit(code: int, failed: str) -> None:
    """What became of a command that this one ran and waited for.

    Raises:
        KeyboardInterrupt: it was interrupted; so is this one, which a terminal or a supervisor may not have told.
        UserError: it failed.
    """
    if code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        raise UserError(failed)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Signals end the block by an exception, so that what is half-written is removed; also where that is lost on its
    way and another error follows: an extension's import makes an ImportError of it.
    """
    came: list[BaseException] = []

    def end(number: int, _: object) -> NoReturn:
        came.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise came[-1]

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, end)
    try:
        yield
    except Exception as error:
        if came:
            raise came[0] from error
        raise


def _print_no_more() -> None:
    """Python flushes what is left at its end, and would fail anew."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def without_names(error: OSError) -> str:
    """Why, without the names of temporary files."""
    return error.strerror or one_line(error)


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate a command's entry: a user's mistake, a backend that fails, memory or a disk that is full become one
    line on standard error and exit code 2; an interruption, 130.
    """

    @functools.wraps(main)
    def wrapped(*args, **kwargs) -> int:
        # Started with a closed stream (`>&-`), Python has None there, and print() would take the other stream.
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # in a pipe or a log, too, a line is told when it is true
        try:
            with _ended_by_signals():
                code = main(*args, **kwargs) or 0
            sys.stdout.flush()
            return code
        except UserError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
        except BackendError as error:
            print(f"error: {one_line(error)}: try again, or choose another backend or device", file=sys.stderr)
        except MemoryError as error:
            print(f"error: no memory is left ({one_line(error)}): ask for less, or end what else runs", file=sys.stderr)
        except BrokenPipeError:  # the reader, `head` for example, has had enough
            _print_no_more()
            return 141
        except ModuleNotFoundError as error:
            print(f"error: {one_line(error)}: {MISSING_PACKAGE}", file=sys.stderr)
        except OSError as error:
            advice = {
                errno.ENOSPC: ": free some space or choose another place",
                errno.EDQUOT: ": free some space or choose another place",
                errno.EACCES: ": change its permissions or choose another place",
                errno.EROFS: ": choose another place",
            }
            try:
                sys.stdout.flush()
                what = one_line(error)
            except OSError:
                what = f"what is printed cannot be written: {one_line(error)}"
                _print_no_more()
            print(f"error: {what}{advice.get(error.errno or 0, '')}", file=sys.stderr)
        except KeyboardInterrupt as error:
            told = one_line(error) if error.args else "interrupted; nothing was written"
            print(f"error: {told}", file=sys.stderr)
            return INTERRUPTED
        return 2

    return wrapped
