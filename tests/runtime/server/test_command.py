"""`python -m runtime serve`, as a user types it."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.errors import command
from runtime.__main__ import main
from tests.runtime.server.conftest import question

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def running(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """The process, its port, and the first line that it prints."""
    line = [sys.executable, "-m", "runtime", "serve", *map(str, arguments), "--port", "0", "--threads", "1"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=ROOT, env=os.environ | environment, **pipes) as process:
        try:
            told = process.stdout.readline() if process.stdout else ""
            assert "http://" in told, process.communicate()
            yield process, int(told.split("/ ")[0].rpartition(":")[2]), told
        finally:
            process.kill()


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    json_type = {"Content-Type": "application/json"}
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, json_type | headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, text


def test_it_serves_until_it_is_told_to_end(bundle_path: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with running(bundle_path, "--level", "tight", "--token-file", token) as (process, port, told):
        assert told.startswith("bundle at http://127.0.0.1:")
        assert "models bundle, bundle:loose, bundle:tight" in told
        assert "backend ort: onnxruntime " in told
        assert "not trt nor trt-rtx: no NVIDIA GPU here" in told
        assert ask(port, "/v1/models")[0] == 401
        right = {"Authorization": "Bearer secret"}
        status, text = ask(port, "/v1/chat/completions", question("what is it", max_tokens=3), **right)
        assert status == 200
        assert json.loads(text)["unicache"]["level"] == "tight"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")


def test_what_everybody_reaches_without_a_token_is_warned_of(bundle_path: Path) -> None:
    for secret in ("", "secret"):
        with running(bundle_path, "--host", "0.0.0.0", UNICACHE_TOKEN=secret) as (process, port, _):
            assert ask(port, "/v1/models")[0] == (401 if secret else 200)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
            assert (process.returncode, err.count("\n")) == (0, 0 if secret else 1)
            assert err.startswith("" if secret else "warning: whoever reaches 0.0.0.0 can use this server")


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is none must not serve for ever."""
    monkeypatch.setattr("runtime.server.serve.serve", lambda *_: pytest.fail("it serves"))


def mistake(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert command(main)(["serve", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.usefixtures("never")
def test_mistakes_are_one_line(bundle_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --host or --port" in mistake(capsys, bundle_path, "--port", taken.getsockname()[1])
    assert "choose another --host or --port" in mistake(capsys, bundle_path, "--port", 99999)
    assert "choose another --host or --port" in mistake(capsys, bundle_path, "--host", "no.such.host.invalid")
    assert "no level 'none'" in mistake(capsys, bundle_path, "--level", "none")
    assert "is not a folder" in mistake(capsys, tmp_path / "none")
    assert "cannot be read" in mistake(capsys, bundle_path, "--token-file", tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    assert "holds no token" in mistake(capsys, bundle_path, "--token-file", tmp_path / "empty")
    assert "--queue: must be at least 1" in mistake(capsys, bundle_path, "--queue", 0)
    assert "more than Pillow takes: 89 at most" in mistake(capsys, bundle_path, "--max-pixels", 90)


@pytest.mark.usefixtures("never")
def test_missing_packages_are_named_with_the_command_that_installs_them(
    bundle_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    told = mistake(capsys, bundle_path)
    assert "serve needs uvicorn: in this package's folder, type pip install -e '.[serve]'" in told
