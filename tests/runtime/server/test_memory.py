"""The server under a memory budget: what waiting helps against is 503, what never fits is 413."""

from __future__ import annotations

import gc
import io
import json
import re
import subprocess
import sys
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
from PIL.PngImagePlugin import PngInfo

from engines import bundle as bundles
from engines.bundle import Bundle
from runtime import memory, probe
from runtime.memory import MIB, Cost, Need
from runtime.model import VLM
from runtime.preprocess import UNPACKED
from runtime.server import protocol
from runtime.server.errors import Refused
from runtime.server.levels import Levels
from runtime.server.protocol import PIECES, Limits, complete, parse
from runtime.server.remote import Names, Remote, host
from runtime.server.room import READING
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, question, serving

if not Path("/proc/self/statm").exists():
    pytest.skip("a memory budget needs Linux", allow_module_level=True)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, bundle_path: Path) -> SimpleNamespace:
    """A process of 100 MiB; every graph of the toy takes 20 MiB, and 10 when it runs."""
    state = SimpleNamespace(resident=100 * MIB)
    costs = {name: Cost(20 * MIB, 10 * MIB) for name in bundles.read(bundle_path).manifest.graphs}
    monkeypatch.setattr(probe, "costs", lambda *_: costs)
    monkeypatch.setattr(memory, "resident", lambda: state.resident)
    monkeypatch.setattr(memory, "settle", lambda: None)
    return state


@pytest.fixture
def budgeted(bundle_path: Path, process: SimpleNamespace) -> Iterator[Served]:
    with serving(Levels(VLM.open(bundle_path, level="loose", threads=1, memory_budget="400MiB"))) as served:
        yield served


def test_an_answer_tells_the_level_and_why_and_it_is_counted(budgeted: Served, process: SimpleNamespace) -> None:
    ask = question("what is it", png(image(0)), max_tokens=2)
    told = budgeted.chat(ask)[2]["unicache"]
    assert (told["level"], told["reason"]) == ("loose", "the default level")
    process.resident = 310 * MIB  # over 80 % with what the graphs run on
    told = budgeted.chat(ask)[2]["unicache"]
    assert re.match(r"with loose, 8\d% of the memory budget would be in use \(more than 80%\)", told["reason"])
    metrics = budgeted.ask("GET", "/metrics")[2].decode()
    assert re.search(r"^unicache_memory_budget_bytes 4.194304e\+08$", metrics, re.M)
    heavier = int(told["level"] != "loose")
    assert f"unicache_memory_heavier_total {heavier}.0" in metrics
    assert "unicache_memory_refused_total 0.0" in metrics


def test_what_never_fits_is_413(budgeted: Served, process: SimpleNamespace) -> None:
    large = png(np.zeros((3000, 3000), np.uint8))
    status, headers, body = budgeted.chat(question("what is it", large))
    assert (status, body["error"]["code"]) == (413, "over_memory_budget")
    assert re.search(
        r"give smaller or fewer images, less text, or a budget of at least \d+MiB$", body["error"]["message"]
    )
    assert "retry-after" not in headers
    assert budgeted.chat(question("what is it", png(image(0)), max_tokens=2))[0] == 200


def test_what_fits_later_is_503_with_retry_after(budgeted: Served, process: SimpleNamespace) -> None:
    ask = question("what is it", png(image(0)), max_tokens=2)
    assert budgeted.levels.memory
    held = budgeted.levels.memory.reserve(Need(frozenset(), 260 * MIB))  # as another answer would
    status, headers, body = budgeted.chat(ask)
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "memory_in_use", "2")
    assert "try again when others have ended" in body["error"]["message"]
    held.release()  # type: ignore[union-attr]
    assert budgeted.chat(ask)[0] == 200
    assert "unicache_memory_refused_total 1.0" in budgeted.ask("GET", "/metrics")[2].decode()


def test_a_body_needs_room_before_it_is_read(budgeted: Served, process: SimpleNamespace) -> None:
    leave = budgeted.worker.enter()  # as another request
    process.resident = 400 * MIB
    status, headers, body = budgeted.chat(question("what is it"))
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "memory_in_use", "2")
    leave()
    process.resident = 100 * MIB
    assert budgeted.chat(question("what is it", max_tokens=2))[0] == 200
    assert budgeted.worker.here == 0


def test_a_body_in_pieces_takes_room_as_it_comes(budgeted: Served, process: SimpleNamespace) -> None:
    """Not all that it might come to be: that would never fit."""
    process.resident = 280 * MIB  # four times the largest body, 128 MiB, would not be left
    body = json.dumps(question("what is it", max_tokens=2)).encode()
    assert budgeted.chat(iter([body[:9], body[9:]]))[0] == 200  # http.client sends chunks
    process.resident = 399 * MIB
    status, _, refused = budgeted.chat(iter([body, b" " * (MIB // 7)]))
    assert (status, refused["error"]["code"]) == (413, "over_memory_budget")  # no other is here that could end
    assert budgeted.worker.here == 0


def test_a_body_that_never_fits_is_413_and_says_what_to_do(budgeted: Served, process: SimpleNamespace) -> None:
    assert budgeted.levels.memory
    budgeted.levels.memory.budget = 100 * MIB + 7 * 2**16
    status, headers, body = budgeted.chat(b" " * (2**16 + 1))
    assert (status, body["error"]["code"]) == (413, "over_memory_budget")
    assert "send less, or serve with a larger --memory-budget" in body["error"]["message"]
    assert "retry-after" not in headers


@pytest.mark.parametrize("piece", ["[]", "{}", '{"a":1}', '"ab"', "1e5", '{"type":"text","text":"a"}'])
@pytest.mark.parametrize("field", ["metadata", "messages", "content", "stop", "annotations"])
def test_reading_takes_no_more_than_was_taken_for_it(field: str, piece: str) -> None:
    """As many values as are read, right or wrong, beside a long text: measured, the libraries' own included."""
    many = f"[{','.join([piece] * (PIECES // (1 + sum(map(piece.count, ',{['))) - 30))}]"
    fields = {"metadata": "null", "stop": "null", "messages": '[{"role":"user","content":"hi"}]', "model": '"a"'}
    if field in ("content", "annotations"):
        other = "" if field == "content" else '"content":"hi",'
        fields["messages"] = f'[{{"role":"user",{other}"{field}":{many}}}]'
    else:
        fields[field] = many
    for letter in ("a", "\U0001f600"):
        text = letter + "a" * MIB
        body = json.dumps({"user": text}, ensure_ascii=False)[:-1] + "".join(f',"{k}":{v}' for k, v in fields.items())
        assert peak((body + "}").encode()) <= 0, letter


@pytest.mark.parametrize("letter", ["a", "\U0001f600"])
def test_images_take_no_more_than_was_taken_for_them(letter: str) -> None:
    url = f"data:image/png;base64,{letter}{'a' * (8 * MIB - 1)}"
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "a", "messages": [{"role": "user", "content": parts}]}
    for ascii_only in (True, False):
        assert peak(json.dumps(body, ensure_ascii=ascii_only).encode()) <= 0


def test_unpacked_text_of_an_image_takes_no_more_than_was_taken_for_it() -> None:
    taken: list[int] = []
    for first in ("", "", "\U0001f600"):  # the first one imports
        info = PngInfo()
        for number in range(30):
            info.add_itxt(f"k{number}", first + "a" * (UNPACKED - 9), zip=True)
        file = io.BytesIO()
        PIL.Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=info)
        assert len(file.getvalue()) < 100_000
        body = question("what is it", file.getvalue())
        taken.append(peak(json.dumps(body).encode()))
    assert max(taken[1:]) <= 0


def peak(body: bytes) -> int:
    """Bytes that reading a request took, more than it took room for."""
    taken = [READING * len(body)]
    memory.settle()
    before = memory.resident()
    Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
    with suppress(Refused):
        complete(parse(body, Limits(), taken.append), None, {}, Limits(), taken.append)
    status = Path("/proc/self/status").read_text()
    highest = next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM"))
    return highest - before - sum(taken)


@pytest.mark.parametrize("start", ["data:image/png;base64,", "data:", "http://a/", "HTTPS://a:99/?", "//", ""])
def test_nothing_of_a_request_is_kept_behind_it(start: str) -> None:
    """Python's urlsplit keeps the last 128 URLs, whole and in parts."""
    remote = Remote(frozenset({host("b")}), 1, 1, Names())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(6):
            url = f"{start}{number}{'a' * MIB}"
            assert not remote.allows(url)
            body = question("what is it")
            body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": url}})
            with suppress(Refused):
                complete(parse(json.dumps(body).encode(), Limits()), None, {}, Limits())
            del url, body
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < MIB
    finally:
        tracemalloc.stop()


def test_a_request_of_too_many_pieces_is_not_parsed(budgeted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.ChatRequest, "model_validate_json", lambda *_: pytest.fail("it is parsed"))
    status, _, body = budgeted.chat(question("what is it", metadata=[{}] * PIECES))
    assert (status, body["error"]["code"]) == (413, "too_large")
    assert "send fewer parts" in body["error"]["message"]


def test_levels_share_the_budget(budgeted: Served) -> None:
    for level in ("tight", "loose", "thrifty"):
        assert budgeted.chat(question("what is it", png(image(0)), model=f"bundle:{level}", max_tokens=2))[0] == 200
    opened = budgeted.levels.opened.values()
    assert len({id(vlm.memory) for vlm in opened}) == 1
    assert len({id(vlm._sessions) for vlm in opened}) == 1


def posted(url: str, body: Any) -> int:
    """The status of an answer; 503 where it was refused before its body was read, and the rest of it had no taker."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}v1/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except urllib.error.URLError:
        return 503


def highest_of(process: subprocess.Popen[str]) -> int:
    """Bytes that a process ever had in memory at once."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM"))


@pytest.mark.slow
def test_a_real_server_never_exceeds_its_budget(demo_bundle: Bundle) -> None:
    """Small and large images, from many clients at once, at a budget that is short for them."""
    budget = 300 * MIB
    line = [sys.executable, "-m", "runtime", "serve", str(demo_bundle.path), "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        [*line, "--memory-budget", str(budget)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            url = re.search(r"http://\S+", process.stdout.readline())
            assert url

            def ask(number: int) -> int:
                """As a client that tries again when it is told to."""
                body = asked(number)
                for _ in range(600):
                    if (status := posted(url[0], body)) not in (429, 503):
                        return status
                    time.sleep(0.1)
                return status

            def asked(number: int) -> dict[str, Any]:
                size, random = (64, 64, 3) if number % 3 else (1200, 900, 3), np.random.default_rng(number)
                pictures = [png(random.integers(0, 256, size, np.uint8)) for _ in range(number % 5)]
                return question("what color is the shape?", *pictures, model=demo_bundle.path.name, max_tokens=8)

            with ThreadPoolExecutor(6) as pool:
                statuses = [*pool.map(ask, range(30))]
            assert highest_of(process) <= budget
            assert {statuses[number] for number in range(30) if number % 3} == {200}  # whatever waits for whom
            assert {*statuses} <= {200, 413}
        finally:
            process.terminate()


@pytest.mark.slow
def test_the_least_budget_that_a_server_tells_is_enough_however_long_it_has_worked(demo_bundle: Bundle) -> None:
    """For a question about an image: all that a fresh server answers it answers behind other work, too."""
    line = [sys.executable, "-m", "runtime", "serve", str(demo_bundle.path), "--port", "0", "--threads", "1"]
    told = subprocess.run([*line, "--memory-budget", "50MiB"], capture_output=True, text=True, check=False).stderr
    least = re.search(r"give at least +(\d+MiB)$", told.strip())
    assert least, told
    with subprocess.Popen([*line, "--memory-budget", least[1]], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = re.search(r"http://\S+", process.stdout.readline())
            assert url
            small, name = png(np.zeros((64, 64, 3), np.uint8)), demo_bundle.path.name
            models = [name, *(f"{name}:{level}" for level in demo_bundle.manifest.levels)]

            def asked() -> list[int]:
                same = [question("what color is the shape?", small, model=model, max_tokens=8) for model in models]
                return [posted(url[0], body) for body in same]

            assert asked() == [200] * len(models)
            dice, known = np.random.default_rng(0), {200, 400, 413, 503}
            for number in range(8):
                large = png(dice.integers(0, 256, (300 + 200 * number, 500, 3), np.uint8))
                broken = dice.integers(0, 256, 300_000 + number, np.uint8).tobytes()
                assert posted(url[0], question("what?", large, model=name, max_tokens=8)) in known
                assert posted(url[0], question("how many?", *[small] * (number + 1), model=name)) in (
                    200,
                    400,
                    413,
                    503,
                )
                assert posted(url[0], question("what?", broken, model=name)) in known
                assert posted(url[0], json.dumps(question("what " * 9999, model=name))[:-9].encode()) in known
            assert asked() == [200] * len(models)
            assert highest_of(process) <= int(least[1].removesuffix("MiB")) * MIB
        finally:
            process.terminate()
