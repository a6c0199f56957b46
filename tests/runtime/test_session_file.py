"""Sessions' files: what was saved goes on as it was, whole or not at all, and what is none is told."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import runtime
from engines.errors import UserError
from runtime import tensors
from runtime.model import VLM
from runtime.session import Session
from tests.runtime import toy
from tests.runtime.asking import image


@pytest.fixture(scope="module", params=["loose", "tight"])
def vlm(request: pytest.FixtureRequest, bundle_path: Path) -> VLM:
    return runtime.open(bundle_path, level=request.param, threads=1)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_saved_session_goes_on_as_the_one_it_was(prefix: bool, vlm: VLM, tmp_path: Path) -> None:
    session, path = Session(vlm), tmp_path / "chat.safetensors"
    if prefix:
        session.read([{"role": "user", "content": [{"type": "image"}]}], [image(0)])
    else:
        session.ask("what is it", [image(0)], 4, ignore_eos=True)
    session.save(path)
    loaded = Session.load(runtime.open(vlm.bundle.path, level=vlm.level, threads=1), path)
    assert loaded.messages == session.messages
    turns = [(s.ask("big", max_new_tokens=5, ignore_eos=True).tokens, s.messages) for s in (session, loaded)]
    assert turns[0] == turns[1]
    with pytest.raises(UserError, match=r"lies in the bundle .*: choose a place outside"):
        session.save(vlm.bundle.path / "chat.safetensors")
    with pytest.raises(UserError, match="nothing yet: there is nothing to save"):
        Session(vlm).save(path)


def test_the_file_is_what_safetensors_reads(saved: Path, tight: VLM) -> None:
    loaded = Session.load(tight, saved)
    assert loaded.context
    expected = {**loaded.context.state.arrays, "logits": loaded.context.logits}
    theirs = load_file(saved)
    assert theirs.keys() == expected.keys()
    for name, array in expected.items():
        assert theirs[name].dtype == array.dtype
        np.testing.assert_array_equal(theirs[name], array)


@pytest.mark.parametrize("change", ["dtype", "shape", "missing", "more"])
def test_other_tensors_are_told(change: str, saved: Path, tight: VLM) -> None:
    arrays, metadata = tensors.read(saved, "session", 1 << 30)
    some = next(iter(arrays))
    if change == "dtype":
        arrays[some] = arrays[some].astype(np.float64)
    if change == "shape":
        arrays[some] = arrays[some][:, :, 1:]
    if change == "missing":
        del arrays[some]
    if change == "more":
        arrays["more"] = np.zeros(3, np.float32)
    path = saved.with_name("others")
    tensors.write(path, arrays, metadata)
    with pytest.raises(UserError, match="others: its tensors are not those of level tight, bucket 16"):
        Session.load(tight, path)


def test_files_of_others_are_told(saved: Path, tight: VLM, bundle_path: Path, tmp_path: Path) -> None:
    theirs = runtime.open(toy.build(tmp_path / "other", unknown="loose"), level="tight", threads=1)
    with pytest.raises(UserError, match=r"made with another bundle than .*other: open that one"):
        Session.load(theirs, saved)
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="no session, or damaged"):
        Session.load(tight, tmp_path / "a.safetensors")
    tensors.write(tmp_path / "b", {"a": np.zeros(3, np.float32)}, {"format": "something else"})
    with pytest.raises(UserError, match="no session of this version"):
        Session.load(tight, tmp_path / "b")
    with pytest.raises(UserError, match="nowhere: cannot be read: "):
        Session.load(tight, tmp_path / "nowhere")
    again = runtime.open(bundle_path, level="loose", threads=1)  # its level is in the file
    assert Session.load(again, saved).level == "tight"


def test_what_is_no_file_or_too_large_for_a_session_is_not_read(tight: VLM, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="not a file"):
            Session.load(tight, path)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="too large for one"):
        Session.load(tight, tmp_path / "sparse")


@pytest.mark.parametrize("fails", ["open", "fsync", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(
    fails: str, saved: Path, tight: VLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, session = tmp_path / "chat", Session.load(tight, saved)
    session.save(path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    session.ask("big", max_new_tokens=2, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(tensors if fails == "open" else os, fails, full, raising=False)
        with pytest.raises(UserError, match=r"chat: cannot be written: .*No space left"):
            session.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["chat"]
    session.save(path)
    assert path.read_bytes() != before
    with pytest.raises(UserError, match="cannot be written"):
        session.save(tmp_path / "no folder" / "chat")


def test_a_file_is_written_where_a_link_leads_and_may_be_read_by_others(
    saved: Path, tight: VLM, tmp_path: Path
) -> None:
    session, target, link = Session.load(tight, saved), tmp_path / "folder" / "chat", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    before = os.umask(0o027)
    try:
        session.save(link)
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert Session.load(tight, link).messages == session.messages
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    os.mkfifo(tmp_path / "pipe")
    for wrong in ("itself", "pipe", "folder", "no folder/chat", "zero\0byte"):
        with pytest.raises(UserError) as error:
            session.save(tmp_path / wrong)
        assert str(error.value).startswith(f"{tmp_path / wrong}: ")
        assert "/." not in str(error.value)  # no temporary name
    with pytest.raises(UserError, match="cannot be read"):
        Session.load(tight, tmp_path / "zero\0byte")
    assert {each.name for each in tmp_path.iterdir()} == {"folder", "link", "itself", "pipe"}


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import runtime
from runtime.session import Session

bundle, folder = sys.argv[1], Path(sys.argv[2])
vlm, path = runtime.open(bundle, level="tight", threads=1), folder / "chat"
states = []
for name in ("old", "new"):
    session = Session.load(vlm, Path(sys.argv[3]))
    session.ask("is it red" if name == "old" else "big", max_new_tokens=5, ignore_eos=True)
    session = session.fork()
    session.messages[-1:] = [{"role": "assistant", "content": name * 10**6}]  # so that writing takes its time
    start = time.perf_counter()
    session.save(folder / name)
    states.append(session)
most = 3 * (time.perf_counter() - start)
states[0].save(path)
random.seed(int(sys.argv[4]))
for _ in range(60):
    if not (child := os.fork()):
        while True:
            for session in reversed(states):
                session.save(path)
    time.sleep(random.uniform(0, most))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print(Session.load(vlm, path).messages[-1]["content"][:3], path.read_bytes() in CONTENTS, flush=True)
""".replace("CONTENTS", '[(folder / name).read_bytes() for name in ("old", "new")]')


def test_a_process_that_is_killed_while_it_saves_leaves_the_old_file_or_the_new_one(
    saved: Path, tight: VLM, tmp_path: Path
) -> None:
    """Killed at 60 moments; what else it left behind is a hidden file, whole or refused."""
    command = [sys.executable, "-c", KILLED, tight.bundle.path, tmp_path, saved, "0"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    found = done.stdout.splitlines()
    assert len(found) == 60
    assert set(found) == {"old True", "new True"}
    rest = {each.name: each for each in tmp_path.iterdir() if each.name not in ("chat", "old", "new")}
    assert rest  # else no kill met a save
    for name, file in rest.items():
        assert name.startswith(".")
        with contextlib.suppress(UserError):
            assert Session.load(tight, file).messages[-1]["content"] in ("old" * 10**6, "new" * 10**6)
