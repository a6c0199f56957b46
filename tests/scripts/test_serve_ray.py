"""scripts/serve_ray.py: replicas that are added, conversations that stay with theirs, and what is refused before."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import runtime
import serve_ray
from engines import bundle as bundles
from engines.errors import UserError
from tests.runtime import toy

ROOT = Path(__file__).resolve().parents[2]
FEW = {"CPU": 4.0, "memory": 2e9}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("ray") / "toy")


class Cluster:
    """The script, running."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def ask(self, session: str = "", **options: Any) -> tuple[int, str, bytes]:
        """Status, replica and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"model": "toy:tight", "messages": [{"role": "user", "content": "what is it"}]} | options
        headers = {"Content-Type": "application/json"} | ({"X-Session-ID": session} if session else {})
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        told = response.status, response.headers["X-Replica-ID"], response.read()
        connection.close()
        return told

    def grow(self, replicas: int) -> set[str]:
        """Ask, four at once, until so many replicas have answered."""
        seen: set[str] = set()
        until = time.monotonic() + 180

        def ask() -> None:
            while len(seen) < replicas and time.monotonic() < until:
                seen.add(self.ask(max_tokens=100)[1])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen


@pytest.fixture(scope="module")
def cluster(path: Path) -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "scripts" / "serve_ray.py"), str(path), "--port", str(port), "--threads", "1"]
    command += ["--replicas", "1", "--max-replicas", "2", "--target", "1", "--after", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path)
    try:
        assert process.stdout
        assert process.stdout.readline().startswith("starting Ray")
        said = process.stdout.readline()
        assert said.startswith(
            f"toy at http://127.0.0.1:{port}/  (1 to 2 replicas, 1 threads each; models toy, toy:"
        ), said
        yield Cluster(process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=120)
    assert (process.returncode, rest) == (128 + signal.SIGTERM, "")


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two replicas need two cores")
def test_two_replicas(cluster: Cluster, path: Path) -> None:
    both = cluster.grow(2)
    assert len(both) == 2
    expected = runtime.open(path, level="tight", threads=1).generate("what is it", max_new_tokens=5).text
    chats: dict[str, set[str]] = {f"chat {number}": set() for number in range(24)}
    for _ in range(3):
        for chat, replicas in chats.items():
            status, replica, body = cluster.ask(chat, max_tokens=5)
            assert status == 200
            assert json.loads(body)["choices"][0]["message"]["content"] == expected
            replicas.add(replica)
    assert {len(replicas) for replicas in chats.values()} == {1}
    assert set.union(*chats.values()) == both
    assert {cluster.ask(max_tokens=1)[1] for _ in range(24)} == both

    status, _, body = cluster.ask("chat 1", max_tokens=5, stream=True)
    *chunks, done = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    assert (status, done) == (200, b"[DONE]")
    pieces = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert len(pieces) > 3
    assert "".join(pieces) == expected
    status, replica, body = cluster.ask(max_tokens=0)
    assert status == 400
    assert replica in both
    assert b"max_tokens" in body


def test_what_does_not_fit_is_refused_before_it_starts(path: Path) -> None:
    bundle = bundles.read(path)

    def fitted(**changes: Any) -> argparse.Namespace:
        given = {"replicas": 1, "max_replicas": 2, "threads": None, "address": None, "memory_budget": None} | changes
        arguments = argparse.Namespace(**given)
        serve_ray.fit(arguments, bundle, FEW)
        return arguments

    assert fitted().threads == 2
    assert fitted(max_replicas=4).threads == 1
    assert fitted(threads=2).memory > sum(file.bytes for file in bundle.manifest.files.values())
    assert fitted(memory_budget="300MiB").memory == 300 << 20
    assert fitted().rows == 1
    with pytest.raises(UserError, match="5 replicas of 1 threads need 5 cores, and there are 4: give fewer"):
        fitted(max_replicas=5)
    assert fitted(max_replicas=5, address="auto").threads == 4
    with pytest.raises(UserError, match="2 replicas of 3 threads need 6 cores"):
        fitted(threads=3)
    FEW_MEMORY = {"CPU": 64.0, "memory": 1e9}
    with pytest.raises(UserError, match="that Ray has: give a smaller --memory-budget, or more memory"):
        fitted(memory_budget="100GiB")
    with pytest.raises(
        UserError, match=r"4 replicas of \d+ MiB do not fit into the 953 MiB that Ray has: give at most 3"
    ):
        serve_ray.fit(
            argparse.Namespace(replicas=4, max_replicas=4, threads=1, address=None, memory_budget=None),
            bundle,
            FEW_MEMORY,
        )


def test_mistakes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    (damaged / bundles.MANIFEST).write_bytes(b"{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for asked, message in (
            ([str(damaged)], "manifest.json is damaged"),
            ([str(path), "--level", "heavy"], "no level 'heavy'"),
            ([str(path), "--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is less than --replicas 3"),
            ([str(path), "--replicas", "0"], "argument --replicas: must be at least 1"),
            ([str(path), "--port", port], f"cannot listen on 127.0.0.1, port {port}"),
        ):
            assert serve_ray.main(asked) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert message in line
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert serve_ray.main([str(path)]) == 2
    assert "Ray is not installed: in this project's folder, type . .venv/bin/activate" in capsys.readouterr().err


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in of Ray, whose Serve is never started."""
    stand_in = SimpleNamespace(
        __spec__=ModuleSpec("ray", None),
        init=lambda *_, **__: None,
        cluster_resources=lambda: FEW,
        shutdown=lambda: None,
        serve=SimpleNamespace(delete=lambda name: pytest.fail("Serve was never started")),
    )
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def test_what_does_not_fit_is_one_line(path: Path, ray: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []
    ray.shutdown = lambda: ended.append("Ray")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert serve_ray.main([str(path), "--replicas", "50", "--port", "0"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    began, line = capsys.readouterr().err.splitlines()
    assert began.startswith("starting Ray")
    assert line.startswith("error: 50 replicas of 1 threads need 50 cores, and there are 4")
    assert ended == ["Ray"]


def test_a_serve_that_is_late_is_one_line(path: Path, ray: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def late(**_: object) -> None:
        raise OSError("The actor died\nunexpectedly: killed by ray.kill")  # Ray's own is an Exception too

    ray.serve.start = late
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert serve_ray.main([str(path), "--port", "0"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: Ray Serve does not start: The actor died unexpectedly: killed by ray.kill: a machine"
    )


def test_it_does_not_wait_for_a_ray_that_has_gone(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[str] = []
    ray.serve.delete = deleted.append
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        serve_ray.delete("toy", address)
    assert deleted == ["toy"]
    never = threading.Event()
    ray.serve.delete = lambda name: never.wait(60)
    monkeypatch.setattr("os._exit", sys.exit)
    try:
        with pytest.raises(SystemExit) as ended:
            serve_ray.delete("toy", address)
    finally:
        never.set()
    assert ended.value.code == 128 + signal.SIGTERM
