"""python -m runtime serve BUNDLE: what it takes, and what it needs to be installed."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import math
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import UserError, one_line, positive

if TYPE_CHECKING:
    from runtime.server.app import Limits
    from runtime.server.levels import Levels

PACKAGES = ("fastapi", "h11", "idna", "prometheus_client", "python_multipart", "uvicorn")
TOKEN = "UNICACHE_TOKEN"
MEMORY_BUDGET = (
    "memory that the process never exceeds, like 2GiB: a request is let in at a heavier level, or refused, before it "
    "allocates anything (default: no limit)"
)


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to the runtime's."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP as OpenAI's chat completions do, and serve a page to try it",
        epilog=f"A bearer token, in the environment variable {TOKEN} or in --token-file, must come with every request.",
    )
    parser.set_defaults(run=run)
    options(parser)


def options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """What a server takes, on one machine or many."""
    parser.add_argument("bundle", help="folder that export/build.py wrote; its name is the model's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    parser.add_argument("--level", help="level of the model NAME (default: the bundle's); NAME:LEVEL is any other")
    parser.add_argument("--backend", default="auto", help="auto, ort, trt-rtx or trt (default: auto, and it "
                        "says which and why)")  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the backend's choice)")
    parser.add_argument("--no-kernels", action="store_true", help="run the graphs without compiled kernels")
    parser.add_argument("--memory-budget", metavar="SIZE", help=MEMORY_BUDGET)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"holds the token (default: ${TOKEN}, or none)")
    parser.add_argument(
        "--queue", type=positive, default=16, metavar="N", help="requests that may wait; more get 429 (default: 16)"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=1024, metavar="N", help="tokens of an answer, at most (default: 1024)"
    )
    parser.add_argument(
        "--max-body", type=positive, default=32, metavar="MIB", help="size of a request, at most (default: 32)"
    )
    parser.add_argument(
        "--body-seconds",
        type=positive,
        default=60,
        metavar="S",
        help="until a request has arrived, with the images that are fetched for it (default: 60)",
    )
    parser.add_argument(
        "--max-pixels", type=positive, default=32, metavar="MP", help="megapixels of an image, at most (default: 32)"
    )
    parser.add_argument(
        "--image-host",
        action="append",
        default=[],
        metavar="NAME[:PORT]",
        help="fetch images of http and https URLs from this host, which you trust: whatever address its name leads to "
        "is asked, also one of this machine or network; redirects are not followed; repeat for several (default: from "
        "none)",
    )
    parser.add_argument(
        "--on-alarm",
        choices=["none", "lighter-next", "retry"],
        default="none",
        help="what follows an answer that was compressed too much: a lighter level for the next request, or for this "
        "one, where nothing of it was sent yet (default: none)",
    )
    parser.add_argument(
        "--blindness", type=float, default=0.0, metavar="D", help="as in `ask`; costs a prefill (default: not tried)"
    )
    parser.add_argument(
        "--grace", type=positive, default=30, metavar="S", help="seconds that answers have to end (default: 30)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; accepted requests are answered first."""
    levels, limits = prepared(arguments)
    from runtime.server.serve import serve

    token, first = token_of(arguments), levels.opened[levels.default]
    with listen(arguments.host, arguments.port) as listening:
        address, port = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        if not token and not ipaddress.ip_address(address).is_loopback:
            print(f"warning: whoever reaches {shown} can use this server: set {TOKEN}", file=sys.stderr)
        print(
            f"{levels.name} at http://{shown}:{port}/  (models {', '.join(levels.models)}; Ctrl-C ends it; backend "
            f"{first.backend}: {first.why})",
            flush=True,
        )
        serve(levels, limits, token, listening, arguments.grace)


def prepared(arguments: argparse.Namespace) -> tuple[Levels, Limits]:
    """The opened bundle, and what the server takes."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve needs {', '.join(missing)}: in this package's folder, type pip install -e '.[serve]'")
    from PIL import Image

    import runtime.server.serve  # noqa: F401 (below)
    from runtime.memory import one_arena
    from runtime.model import VLM
    from runtime.monitor import Watch
    from runtime.server.app import Limits
    from runtime.server.levels import Levels
    from runtime.server.remote import host, tls

    if arguments.max_pixels * 10**6 > (most := Image.MAX_IMAGE_PIXELS or math.inf):
        raise UserError(f"--max-pixels {arguments.max_pixels} is more than Pillow takes: {most // 10**6} at most")
    try:
        hosts = frozenset(map(host, arguments.image_host))
    except ValueError as error:
        raise UserError(f"--image-host: {error}") from error
    if hosts:
        tls()  # it counts as in use, too
    limits = Limits(
        queue=arguments.queue,
        body_bytes=arguments.max_body << 20,
        body_seconds=arguments.body_seconds,
        pixels=arguments.max_pixels * 10**6,
        tokens=arguments.max_tokens,
        image_hosts=hosts,
    )
    watch, kernels = Watch(on_alarm=arguments.on_alarm, blindness=arguments.blindness), not arguments.no_kernels
    given = arguments.bundle, arguments.backend, arguments.level, arguments.threads, kernels, arguments.memory_budget
    one_arena()  # a server's memory is to be flat however many threads its requests come by
    first = VLM.open(*given)  # after the server's packages are imported: they count as in use
    return Levels(first, kernels, watch), limits


def token_of(arguments: argparse.Namespace) -> str:
    """The bearer token, "" if there is none; not an argument, since everybody can read those of a process."""
    if (file := arguments.token_file) is None:
        return os.environ.get(TOKEN, "").strip()
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error
    if not token:
        raise UserError(f"{file}: holds no token")
    return token


def listen(host: str, port: int) -> socket.socket:
    try:
        if port not in range(2**16):  # else its last 16 bits would be taken
            raise ValueError("ports are 0 to 65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, ValueError) as error:
        message = f"cannot listen on {host}, port {port}: {one_line(error)}: choose another --host or --port"
        raise UserError(message) from error
