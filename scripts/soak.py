"""Thousands of mixed requests to a server: is every answer the one that its question gets alone, and does memory stay?

    python scripts/soak.py BUNDLE
    python scripts/soak.py BUNDLE --requests 200 --memory-budget 400MiB --json soak.json

Chats of 1 to 6 turns with 1 to 8 images are first answered one by one by the runtime in this process. Then clients ask
a server for turns of them in random order, whole or streamed; one in ten leaves in the middle, one in twenty sends what
is no request. It ends with 1 where an answer differs (or, of a client that left, is no beginning of it), where a
malformed request is not refused or a good one is, or where the server's memory in the last quarter of the requests is
over 1.02 times that in the second: graphs are loaded in the first. With a budget, refusals for memory are counted and
are no failure.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import base64
import http.client
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

import runtime
from engines.errors import Parser, UserError, command, positive
from reporting import json_option, markdown, write
from runtime.model import VLM
from runtime.sampling import Sampling

QUESTIONS = (
    "what color is the shape ?",
    "what shape is in the image ?",
    "is there a red circle in the image ?",
    "how many ?",
)
COLORS = ("red", "green", "blue", "yellow", "black")
IMAGES, TURNS = 8, 6
LEAVES, MALFORMED = 0.10, 0.05
GROWN = 1.02
NO_ROOM = ("memory_in_use", "over_memory_budget")


@dataclass(frozen=True)
class Turn:
    """A request, and the text that answers it when it is alone."""

    body: dict[str, Any]
    expected: str


@dataclass(frozen=True)
class Outcome:
    """What became of a request: `right`, `wrong`, `refused for memory`; and the server's memory behind it, in bytes."""

    kind: str
    verdict: str
    what: str
    seconds: float
    resident: int


def picture(dice: random.Random) -> bytes:
    """A shape on noise, as a PNG file."""
    size = dice.choice([64, 100, 240])
    noise = np.random.default_rng(dice.randrange(2**32)).integers(180, 256, (size, size, 3), np.uint8)
    image = Image.fromarray(noise)
    box = sorted(dice.sample(range(size), 2))
    draw = ImageDraw.Draw(image)
    dice.choice([draw.ellipse, draw.rectangle])((box[0], box[0], box[1], box[1]), fill=dice.choice(COLORS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def chats(vlm: VLM, model: str, count: int, dice: random.Random) -> list[Turn]:
    """The turns of so many chats, answered by the runtime, one after another and each as a request of its own."""
    turns: list[Turn] = []
    for _ in tqdm(range(count), unit="chat", desc="alone", disable=None, leave=False):
        left, messages, pictures = dice.randint(1, IMAGES), list[dict[str, Any]](), list[bytes]()
        tokens, seed, temperature = dice.randint(2, 24), dice.randrange(99), dice.choice([0.0, 0.0, 0.8])
        asked = {"max_tokens": tokens, "seed": seed, "temperature": temperature}
        sampling = Sampling(temperature=temperature, seed=seed)
        last = dice.randint(1, TURNS)
        for turn in range(1, last + 1):
            new = [picture(dice) for _ in range(left if turn == last else dice.randint(turn == 1, left))]
            left, pictures = left - len(new), pictures + new
            text = {"type": "text", "text": dice.choice(QUESTIONS)}
            messages = [*messages, {"role": "user", "content": [*({"type": "image"} for _ in new), text]}]
            try:
                answer = vlm.generate(messages, pictures, tokens, sampling=sampling).text
            except UserError:  # the level takes no longer ones
                break
            turns.append(Turn({"model": model, "messages": _with_urls(messages, pictures), **asked}, answer))
            messages = [*messages, {"role": "assistant", "content": answer or "?"}]
    if not turns:
        raise UserError(f"level {vlm.level} takes none of the chats: choose one that compacts")
    return turns


def _with_urls(messages: Sequence[dict[str, Any]], pictures: Sequence[bytes]) -> list[dict[str, Any]]:
    urls = iter(pictures)

    def part(known: dict[str, Any]) -> dict[str, Any]:
        if known["type"] == "text":
            return known
        url = f"data:image/png;base64,{base64.b64encode(next(urls)).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return [m if isinstance(m["content"], str) else {**m, "content": [*map(part, m["content"])]} for m in messages]


def malformed(turn: Turn, dice: random.Random) -> bytes:
    """What is no request, made of one."""
    body = turn.body
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAAN"}}
    remote = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/shape.png"}}
    text = json.dumps(body)
    wrong: tuple[dict[str, Any], ...] = (
        {"messages": []}, {"model": "nobody"}, {"temperature": -1}, {"tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": [broken]}]}, {"messages": [{"role": "user", "content": [remote]}]},
        {"messages": [{"role": "user", "content": "what " * 100_000}]},
    )  # fmt: skip
    whole = [json.dumps(body | each).encode() for each in wrong]
    return dice.choice([text[: len(text) // 2].encode(), b"\xff\xfe{}", *whole])


class Server:
    """A running server, and what its process has in memory."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    @property
    def resident(self) -> int:
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except OSError:
            raise UserError("the server has ended: see what it said above") from None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def ask(self, turn: Turn, seed: int) -> Outcome:
        """One request, of the kind that the seed says."""
        dice, start = random.Random(seed), time.perf_counter()
        chance = dice.random()
        kind = "malformed" if chance < MALFORMED else "leaves" if chance < MALFORMED + LEAVES else "answered"
        streams = kind == "leaves" or dice.random() < 0.5
        body = malformed(turn, dice) if kind == "malformed" else json.dumps(turn.body | {"stream": streams}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if kind == "malformed" or response.status != 200:
                told = json.loads(response.read())
                verdict, what = refused(kind, response.status, told)
            else:
                least = dice.randint(0, 3) if kind == "leaves" else None
                text = "".join(_pieces(response, least)) if streams else _whole(response)
                right = text == turn.expected if least is None else turn.expected.startswith(text)
                verdict, what = ("right", "") if right else ("wrong", f"{text!r}, alone {turn.expected!r}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            verdict, what = "wrong", f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return Outcome(kind, verdict, what, time.perf_counter() - start, self.resident)


def refused(kind: str, status: int, told: Any) -> tuple[str, str]:
    """Whether it was right to refuse."""
    error = told.get("error", {})
    if error.get("code") in NO_ROOM and kind != "malformed":
        return "refused for memory", error["code"]
    right = kind == "malformed" and 400 <= status < 500
    return ("right", "") if right else ("wrong", f"status {status}: {error.get('message', told)}")


def _whole(response: http.client.HTTPResponse) -> str:
    return str(json.loads(response.read())["choices"][0]["message"]["content"])


def _pieces(response: http.client.HTTPResponse, most: int | None) -> Iterator[str]:
    """The text of a stream, to its end or so many events."""
    count = 0
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ValueError(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
        count += 1
        if count == most:
            return


@contextmanager
def served(arguments: argparse.Namespace) -> Iterator[Server]:
    line = [sys.executable, "-m", "runtime", "serve", arguments.bundle, "--port", "0", "--threads", arguments.threads]
    line += ["--queue", 2 * arguments.clients]
    line += ["--level", arguments.level] if arguments.level else []
    line += ["--memory-budget", arguments.memory_budget] if arguments.memory_budget else []
    with subprocess.Popen([*map(str, line)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            begun = process.stdout.readline()
            if " at http://" not in begun:
                raise UserError("the server did not start: see what it said above")
            yield Server(process, int(begun.partition(" at http://")[2].partition("/")[0].rpartition(":")[2]))
        finally:
            process.terminate()


def quarters(outcomes: Sequence[Outcome]) -> list[float]:
    """Mean of the server's memory in each quarter of the requests, in bytes."""
    each = len(outcomes) // 4
    return [float(np.mean([o.resident for o in outcomes[i * each : (i + 1) * each]])) for i in range(4)]


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """What became of answers and memory, and whether both held."""
    _, second, _, last = quarters(outcomes)
    wrong = [outcome for outcome in outcomes if outcome.verdict == "wrong"]
    lines = [f"wrong: {outcome.kind}: {outcome.what}" for outcome in wrong[:10]]
    lines.append(
        f"{len(outcomes):,} requests, {len(wrong)} wrong; the server's memory in the last quarter / in the second: "
        f"{last / 2**20:.1f} / {second / 2**20:.1f} MiB = {last / second:.4f}"
    )
    return "\n".join(lines), not wrong and last <= GROWN * second


def report(outcomes: Sequence[Outcome]) -> list[str]:
    rows: list[Sequence[str]] = [("requests", "count", "right", "wrong", "refused for memory", "median, ms")]
    for kind in ("answered", "leaves", "malformed"):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        count = Counter(outcome.verdict for outcome in own)
        median = f"{1e3 * np.median([outcome.seconds for outcome in own]):.0f}" if own else ""
        told = (str(count[name]) for name in ("right", "wrong", "refused for memory"))
        rows.append((kind, f"{len(own):,}", *told, median))
    memory: list[Sequence[str]] = [("quarter of the requests", "server, MiB")]
    memory += [(str(number), f"{mean / 2**20:.1f}") for number, mean in enumerate(quarters(outcomes), 1)]
    return [*markdown(rows), "", *markdown(memory)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=positive, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--chats", type=positive, default=40, metavar="N", help="that they are of (default: 40)")
    parser.add_argument("--clients", type=positive, default=4, metavar="N", help="that ask at once (default: 4)")
    parser.add_argument("--level", help="of the bundle (default: its default)")
    parser.add_argument("--memory-budget", metavar="SIZE", help="of the server (default: none)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="default: 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is asked (default: 0)")
    json_option(parser, "")
    arguments = parser.parse_args(argv)
    if arguments.requests < 8:
        raise UserError(f"--requests must be at least 8, got {arguments.requests}: their quarters are compared")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    dice = random.Random(arguments.seed)
    vlm = runtime.open(arguments.bundle, "ort", arguments.level, arguments.threads)
    turns = chats(vlm, arguments.bundle.resolve().name, arguments.chats, dice)
    asked = [(dice.choice(turns), dice.randrange(2**32)) for _ in range(arguments.requests)]
    with served(arguments) as server, ThreadPoolExecutor(arguments.clients) as pool:
        done = pool.map(lambda each: server.ask(*each), asked)
        outcomes = list(tqdm(done, total=len(asked), unit="request", disable=None, leave=False))
    line, held = verdict(outcomes)
    print("\n".join([*report(outcomes), "", line]))
    if arguments.json is not None:
        values = {
            "command": ["scripts/soak.py", *(sys.argv[1:] if argv is None else argv)],
            "level": vlm.level,
            "held": held,
            "quarters": quarters(outcomes),
            "requests": [vars(outcome) for outcome in outcomes],
        }
        write(arguments.json, json.dumps(values, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
