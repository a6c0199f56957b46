"""The command `chat`, driven as a person drives it: by lines."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import runtime
from engines.errors import UserError, command
from runtime.__main__ import main
from runtime.chat import Chat
from runtime.sampling import GREEDY
from runtime.session import Session
from tests.runtime.asking import image


def saved_image(folder: Path, seed: int) -> Path:
    path = folder / f"{seed}.png"
    Image.fromarray(image(seed)).save(path)
    return path


def chat(lines: list[str], bundle: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    main(["chat", str(bundle), "--level", "tight", "--threads", "1", "--max-new-tokens", "6", *options])


def test_lines_in_answers_out(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, file = saved_image(tmp_path, 0), saved_image(tmp_path, 1), tmp_path / "a chat"
    session = Session(runtime.open(bundle_path, level="tight", threads=1))
    want = [
        session.ask("what is it", [first], 6).text,
        session.ask("how many red", [second, first], 6).text,
    ]
    session.save(tmp_path / "other")
    want += [session.ask("big", max_new_tokens=6).text]
    want += [Session(session.vlm).ask("big", max_new_tokens=6).text]
    want += [Session.load(session.vlm, tmp_path / "other").ask("is it", max_new_tokens=6).text]
    lines = [
        f"/image {first}", "what is it", "", f"/image {second}", f"/image {first}", "how many red", f"/save {file}",
        "big", "/reset", "big", f"/load {file}", "is it", "/quit", "never asked",
    ]  # fmt: skip
    chat(lines, bundle_path, monkeypatch)
    out, err = capsys.readouterr()
    assert out.splitlines() == want
    assert err == ""


def test_mistakes_are_one_line_and_the_chat_goes_on(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no session")
    lines = [
        "/image nowhere.png", "/save", f"/save {tmp_path / 'early'}", f"/load {tmp_path / 'text'}", "/what",
        "what is <image>", "is it", "/info",
    ]  # fmt: skip
    chat(lines, bundle_path, monkeypatch)
    out, err = capsys.readouterr()
    session = Session(runtime.open(bundle_path, level="tight", threads=1))
    answer = session.ask("is it", max_new_tokens=6).text
    assert out.startswith(f"{answer}\nlevel tight; ")
    assert session.context
    assert f"; {session.context.position} tokens read; KV " in out
    told = ("nowhere.png: no such file", "/save needs a file", "nothing to save", "no session, or damaged",
            "unknown command /what: /image, /save, /load, /reset", "1 image placeholder")  # fmt: skip
    assert len(err.splitlines()) == len(told)
    for line, part in zip(err.splitlines(), told, strict=True):
        assert line.startswith("error: ")
        assert part in line
    assert not (tmp_path / "early").exists()


def test_a_chat_of_another_level_says_which(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(runtime.open(bundle_path, level="loose", threads=1))
    session.ask("is it", max_new_tokens=6)
    session.save(tmp_path / "loose")
    chat([f"/load {tmp_path / 'loose'}", f"/load {tmp_path / 'loose'}"], bundle_path, monkeypatch)
    assert capsys.readouterr().out == "level loose, as it was written, in place of tight\n"


def test_an_image_that_does_not_fit_is_dropped_and_the_chat_goes_on(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = saved_image(tmp_path, 0), tmp_path / "a chat"
    lines = ["is it", f"/save {file}", f"/image {path}", "red " * 120, "big", f"/image {path}", f"/load {file}", "big"]
    chat(lines, bundle_path, monkeypatch)
    out, err = capsys.readouterr()
    session = Session(runtime.open(bundle_path, level="tight", threads=1))
    want = [session.ask(question, max_new_tokens=6).text for question in ("is it", "big")]
    assert out.splitlines() == [*want, want[1]]
    (line,) = err.splitlines()
    assert line.endswith(f"begin anew; its images are dropped: {path}")


def test_room_takes_a_longer_bucket(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runtime.chat.KIB", 1)  # the toy has few
    told = []
    for options in ([], ["--room", "40"]):
        chat(["is it", "/info", "/reset", "is it", "/info"], bundle_path, monkeypatch, *options)
        _, info, _, again = capsys.readouterr().out.splitlines()
        assert info == again
        told.append(int(info.partition("KV ")[2].split()[0]))
    assert told[0] < told[1]
    for wrong in ("a", "-5", "0", "1.5"):
        assert command(main)(["chat", str(bundle_path), "--room", wrong]) == 2
        assert "--room" in capsys.readouterr().err


def test_info_and_help_before_anything_is_asked(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(["/info", "/help"], bundle_path, monkeypatch)
    out = capsys.readouterr().out
    assert out.startswith("level tight; nothing read yet\nType a question.")
    assert all(command in out for command in ("/image", "/save", "/load", "/reset", "/quit"))


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vlm = runtime.open(bundle_path, level="tight", threads=1)
    talk = Chat(vlm, 90, GREEDY)
    step, steps, before = vlm._step, 0, signal.getsignal(signal.SIGINT)

    def interrupting(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        step(*arguments)

    monkeypatch.setattr(vlm, "_step", interrupting)
    talk.take("left right what")
    talk.take("big")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert len(out[0].split()) == 4  # three steps, and the token that prefill had given
    assert talk.session.messages[1]["content"] == out[0]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command_reads_a_pipe(bundle_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runtime", "chat", str(bundle_path), "--max-new-tokens", "3", "--threads", "1"]
    lines = f"/image {saved_image(tmp_path, 0)}\nwhat is it\n/info\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    answer, info = done.stdout.splitlines()
    session = Session(runtime.open(bundle_path, threads=1))
    assert answer == session.ask("what is it", [tmp_path / "0.png"], 3).text
    assert info.startswith("level loose; ")


def test_bytes_that_are_no_text_are_told_and_the_chat_goes_on(bundle_path: Path, tmp_path: Path) -> None:
    """But they may name a file."""
    named = os.fsencode(tmp_path) + b"/caf\xe9.png"
    saved_image(tmp_path, 0).rename(os.fsdecode(named))
    command = [sys.executable, "-m", "runtime", "chat", str(bundle_path), "--max-new-tokens", "3", "--threads", "1"]
    lines = b"what \xff is\nis it\n/image " + named + b"\nwhat is it\n"
    done = subprocess.run(command, input=lines, capture_output=True, check=False, env=os.environ | {"PYTHONUTF8": "0"})
    session = Session(runtime.open(bundle_path, threads=1))
    want = [session.ask("is it", max_new_tokens=3).text, session.ask("what is it", [image(0)], 3).text]
    assert done.stdout.decode().splitlines() == want
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: the question is not valid Unicode text")
    assert done.returncode == 0


def test_wrong_options_are_told_before_the_chat(bundle_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, told in ((["--max-new-tokens", "0"], "max_new_tokens"), (["--top-k", "3"], "--temperature 1")):
        assert command(main)(["chat", str(bundle_path), *options]) == 2
        assert told in capsys.readouterr().err


def test_an_image_is_decoded_where_its_question_has_room_for_it(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Chat(runtime.open(bundle_path, level="tight", threads=1), 2, GREEDY)
    monkeypatch.setattr("runtime.pictures.preprocess", lambda *_: pytest.fail("it is decoded"))
    talk.take(f"/image {(path := saved_image(tmp_path, 0))}")
    assert talk.images == [str(path)]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match="not a readable image"):
        talk.take(f"/image {path}")
