from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engines.cuda import CudaError
from engines.errors import BackendError, Parser, UserError, check_exit, command, one_line

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run(error: BaseException | None, result: int | None = None) -> int:
    @command
    def main() -> int | None:
        if error is not None:
            raise error
        return result

    return main()


def test_result_is_the_exit_code() -> None:
    assert run(None) == 0
    assert run(None, 3) == 3


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("two\nlines  and\tmore"), 2, "error: two lines and more\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 2, "free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2, "free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "/x'"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), 2, "choose another place"),
        (OSError(errno.EIO, "Input/output error", "/x"), 2, "Input/output error: '/x'"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 2, ". .venv/bin/activate"),
        (KeyboardInterrupt(), 130, "error: interrupted; nothing was written\n"),
        (KeyboardInterrupt("interrupted: it goes on"), 130, "error: interrupted: it goes on\n"),
        (BackendError("decode:\nfailed"), 2, "error: decode: failed: try again, or choose another backend or device\n"),
        (CudaError("cudaMemcpyAsync: an illegal memory access"), 2, "an illegal memory access: try again, or choose"),
        (MemoryError("Unable to allocate 9 TiB"), 2, "error: no memory is left (Unable to allocate 9 TiB): ask for"),
    ],
)
def test_users_mistake_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("end", "code"), [("true", 0), ("exit 3", 2), ("exit 130", 130), ("kill -INT $$", 130)])
def test_what_a_child_ended_with(end: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Who runs an interrupted child was interrupted, too; one that fails is a mistake of the user's."""

    @command
    def main() -> None:
        check_exit(subprocess.run(["bash", "-c", end]).returncode, "it failed: see above")

    assert main() == code
    told = {0: "", 2: "error: it failed: see above\n", 130: "error: interrupted; nothing was written\n"}
    assert capsys.readouterr().err == told[code]


@pytest.fixture
def signals() -> Iterator[None]:
    known = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
    before = [signal.getsignal(number) for number in known]
    yield
    for number, handler in zip(known, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("error", [UserError("pip install onnxruntime"), ImportError("initialization failed")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_command_though_its_exception_is_lost(
    number: signal.Signals, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def main() -> None:
        try:
            os.kill(os.getpid(), number)
        except BaseException:  # as an extension does whose import is interrupted
            raise error from None

    if number == signal.SIGINT:
        assert main() == 130
    else:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 128 + number
    assert "onnxruntime" not in capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_a_signal_that_nohup_ignores_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert command(lambda: os.kill(os.getpid(), signal.SIGHUP))() == 0


@pytest.mark.parametrize("error", [ValueError("bug"), ImportError("bug"), KeyError("bug")])
def test_our_mistake_keeps_its_trace(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(error)


def test_one_line_is_never_empty() -> None:
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError(" a\n b ")) == "a b"


def test_parser_complains_in_one_line() -> None:
    parser = Parser(prog="tool")
    parser.add_subparsers(required=True, metavar="COMMAND").add_parser("go").add_argument("--n", type=int)
    with pytest.raises(UserError, match="invalid int value: 'x': see  tool go --help"):
        parser.parse_args(["go", "--n", "x"])
    with pytest.raises(UserError, match=r"COMMAND.*see  tool --help"):
        parser.parse_args([])


def test_reader_that_has_had_enough() -> None:
    """`command | head -1` ends without a trace."""
    code = "from engines.errors import command\nimport sys\n"
    code += "sys.exit(command(lambda: [print('line ' * 100) for _ in range(10000)] and 0)())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


def test_output_that_finds_no_room_is_one_line() -> None:
    code = "from engines.errors import command; import sys; sys.exit(command(lambda: print('out'))())"
    line = ["bash", "-c", '"$0" -c "$1" >/dev/full', sys.executable, code]
    done = subprocess.run(line, capture_output=True, text=True, env=BUFFERED)
    told = "error: what is printed cannot be written: [Errno 28] No space left on device: free some space"
    assert (done.returncode, done.stderr) == (2, f"{told} or choose another place\n")


def test_a_line_in_a_pipe_comes_at_once() -> None:
    code = "import sys; from engines.errors import command; command(lambda: (print('x'), sys.stdin.read()) and 0)()"
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=BUFFERED) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20)[0]
        process.kill()


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_stream_is_no_crash_and_not_the_other_stream(closed: str) -> None:
    code = "from engines.errors import command; import sys; "
    code += "sys.exit(command(lambda: print('out') or print('err', file=sys.stderr))())"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert (done.stdout, done.stderr) == (("", "err\n") if closed == ">&-" else ("out\n", ""))
