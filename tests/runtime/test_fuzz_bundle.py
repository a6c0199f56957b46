"""A bundle that somebody changed, its hashes with it, answers or is a UserError: FUZZ=20 tries so many times more.

It is asked in a process of its own, which says what it is about to do: what kills it is told too. Graphs are ONNX
Runtime's to read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import CHECKSUM, MANIFEST
from tests.fuzz import damaged, examples, mutated

CHILD = """
import json, resource, sys
import numpy as np
import runtime
from engines.errors import UserError
from runtime.session import Session

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
for line in sys.stdin:
    path, level = json.loads(line)
    try:
        vlm = runtime.open(path, level=level, threads=1)
        result = vlm.generate("what is it", [pixels], max_new_tokens=12, ignore_eos=True)
        session = Session(vlm)
        session.ask("how many red", [pixels], 2)
        said = f"answered {isinstance(result.text, str)} {session.ask('big', max_new_tokens=2).finish_reason}"
    except UserError as error:
        said = f"refused {error}"
    except Exception as error:
        said = f"broke {type(error).__name__} {error}"
    print("said:", json.dumps(said), flush=True)  # ONNX Runtime prints too
"""


class Asked:
    """A process that asks bundles, begun anew where one has ended it."""

    def __init__(self, folder: Path, whole: Path) -> None:
        self.path, self.whole = folder / "bundle", whole
        shutil.copytree(whole, self.path)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, level: str) -> str:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-W", "ignore", "-c", CHILD]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([str(self.path), level]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("said: "):
                return json.loads(line.removeprefix("said: "))
        return f"died {self._process.wait()}"

    def end(self) -> None:
        if self._process:
            self._process.communicate()

    def changed(self, name: str, content: bytes) -> None:
        """Put a file there, and its hash into the manifest."""
        (self.path / name).write_bytes(content)
        data = json.loads((self.whole / MANIFEST).read_text())
        data["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        self.manifest(data)

    def manifest(self, data: Any) -> None:
        text = json.dumps(data).encode()
        (self.path / MANIFEST).write_bytes(text)
        (self.path / CHECKSUM).write_text(hashlib.sha256(text).hexdigest())

    def mend(self, name: str) -> None:
        for each in (name, MANIFEST, CHECKSUM):
            shutil.copyfile(self.whole / each, self.path / each)


@pytest.fixture(scope="module")
def asked(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    made = Asked(tmp_path_factory.mktemp("forged"), bundle_path)
    assert made.ask("tight") == "answered True length"
    yield made
    assert made.ask("tight") == "answered True length"
    made.end()


def harmless(said: str) -> None:
    assert said.startswith(("answered True", "refused ")), said
    assert "\n" not in said


SMALL = ["tokenizer.json", "preprocessor.json", "chat_template.jinja", "prompt.json"]


@examples(80)
@given(data=st.data(), name=st.sampled_from(SMALL))
def test_small_files_of_any_bytes(data: st.DataObject, name: str, asked: Asked) -> None:
    asked.changed(name, data.draw(damaged((asked.whole / name).read_bytes())))
    try:
        harmless(asked.ask("tight"))
    finally:
        asked.mend(name)


@examples(80)
@given(data=st.data(), name=st.sampled_from(["tokenizer.json", "preprocessor.json", "prompt.json"]))
def test_small_files_of_any_values(data: st.DataObject, name: str, asked: Asked) -> None:
    asked.changed(name, json.dumps(data.draw(mutated(json.loads((asked.whole / name).read_text())))).encode())
    try:
        harmless(asked.ask("tight"))
    finally:
        asked.mend(name)


@examples(60)
@given(data=st.data(), level=st.sampled_from(["loose", "tight", "shared"]))
def test_a_manifest_of_any_values(data: st.DataObject, level: str, asked: Asked) -> None:
    asked.manifest(data.draw(mutated(json.loads((asked.whole / MANIFEST).read_text()))))
    try:
        harmless(asked.ask(level))
    finally:
        asked.mend(MANIFEST)


GRAPHS = [f"{kind}_tight_16.onnx" for kind in ("prefill", "decode", "extend", "compact")] + ["vision_tight.onnx"]


@examples(60)
@given(data=st.data(), name=st.sampled_from([*GRAPHS, "weights.bin"]))
def test_graphs_and_weights_of_any_bytes(data: st.DataObject, name: str, asked: Asked) -> None:
    asked.changed(name, data.draw(damaged((asked.whole / name).read_bytes())))
    try:
        harmless(asked.ask("tight"))
    finally:
        asked.mend(name)
