"""Replicas of a bundle behind one address, by Ray Serve: `python -m runtime serve` on many cores and machines.

    python scripts/serve_ray.py BUNDLE --replicas 2
    python scripts/serve_ray.py BUNDLE --replicas 1 --max-replicas 4 --target 3
    python scripts/serve_ray.py BUNDLE --replicas 8 --address auto        # on the Ray cluster that is running

Every replica is a process with the server of `python -m runtime serve`. Requests of a conversation that bear the same
header X-Session-ID go to the same replica while it is there and has a place free (by consistent hashing: another
replica more or less moves few of them); others go to any. The header X-Replica-ID of an answer tells which it was. Up
to --max-replicas there are as many as it takes for each to have --target requests, those that wait among them. Each has
its own /metrics: what is asked there is told by any one of them. --memory-budget is each replica's, and what Ray keeps
free for it. On a cluster, the bundle and this project lie at the same place on every node.

SIGTERM to this process alone lets answers that are begun end (systemd: KillMode=mixed). Where its whole group gets it,
Ray's own processes go first, and the answers with them.

Needs two extras: pip install -e '.[serve,ray]'
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import contextlib
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.errors import Parser, UserError, command, one_line, positive
from runtime.memory import parse_size
from runtime.server import command as server

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from engines.bundle import Bundle

ROOT = Path(__file__).resolve().parents[1]
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
PROCESS = 256 << 20  # bytes that a replica takes beside its weights
LOGS = "/tmp/ray/session_latest/logs/serve"  # Ray's default
OBJECTS = 128 << 20  # of Ray's object store: requests of HTTP do not go through it


class Named:
    """ASGI middleware: the answer tells whose it is."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._header = app, (b"x-replica-id", replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), self._header]}
            await send(message)

        await self._app(scope, receive, named)


def application(arguments: argparse.Namespace, token: str) -> Any:
    """What Ray Serve runs; the bundle is opened in every replica."""
    from ray import serve

    def build() -> ASGIApp:
        from runtime.server.app import create

        levels, limits = server.prepared(arguments)
        local = ipaddress.ip_address(arguments.host).is_loopback
        return Named(create(levels, limits, token, local), serve.get_replica_context().replica_tag)

    a = arguments
    scaling = {"min_replicas": a.replicas, "max_replicas": a.max_replicas, "target_ongoing_requests": a.target}
    scaling["upscale_delay_s"] = a.after
    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name=Path(a.bundle).name,
        **{"autoscaling_config": scaling} if a.max_replicas > a.replicas else {"num_replicas": a.replicas},
        max_ongoing_requests=a.queue + a.rows,
        max_queued_requests=a.queue,  # of those that no replica takes; what is more gets
        backpressure_config={"status_code": 429, "retry_after_s": 1.0},
        request_router_config={"request_router_class": ROUTER},
        ray_actor_options={"num_cpus": a.threads, "memory": a.memory},
        graceful_shutdown_timeout_s=a.grace,
    )
    return deployment.bind()


def fit(arguments: argparse.Namespace, bundle: Bundle, resources: dict[str, float]) -> None:
    """Share the cores out where no number of threads is given, and refuse what would never start.

    Sets also what a replica may take of memory, and how many requests it answers at once.

    Args:
        resources: of the cluster, as Ray counts them.
    """
    a, cores, memory = arguments, int(resources.get("CPU", 0)), int(resources.get("memory", 0))
    most = a.replicas if a.address else a.max_replicas  # a cluster may grow
    a.threads = a.threads or max(1, cores // most)
    a.rows = bundle.manifest.batch
    files = sum(file.bytes for file in bundle.manifest.files.values())
    a.memory = parse_size(a.memory_budget) if a.memory_budget else files + PROCESS
    if most * a.threads > cores:
        raise UserError(f"{most} replicas of {a.threads} threads need {most * a.threads} cores, and there are {cores}: "
                        "give fewer replicas or --threads")  # fmt: skip
    if most * a.memory > memory:
        raise UserError(
            f"{most} replicas of {a.memory >> 20:,} MiB do not fit into the {memory >> 20:,} MiB that Ray has: give "
            + (f"at most {memory // a.memory}" if memory >= a.memory else "a smaller --memory-budget, or more memory")
        )


def delete(name: str, gcs: str) -> None:
    """Take an application from Serve; answers that are begun are ended.

    Where Ray's own processes have gone before, this one goes at once: Ray would look for them for a minute.

    Args:
        gcs: HOST:PORT of Ray's global control service.
    """
    from ray import serve

    def deletes() -> None:
        with contextlib.suppress(Exception):  # what it no longer reaches ends with Ray
            serve.delete(name)

    (ending := threading.Thread(target=deletes, daemon=True)).start()
    host, _, port = gcs.rpartition(":")
    while ending.is_alive():
        ending.join(0.2)
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1).close()
        except OSError:
            os._exit(128 + signal.SIGTERM)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scale = parser.add_argument_group("replicas")
    scale.add_argument("--replicas", type=positive, default=1, metavar="N", help="at least so many (default: 1)")
    scale.add_argument("--max-replicas", type=positive, metavar="N", help="at most so many (default: --replicas)")
    scale.add_argument("--target", type=positive, default=2, metavar="N", help="requests that a replica should have, "
                       "answered and waiting, where there may be more of them (default: 2)")  # fmt: skip
    scale.add_argument("--after", type=positive, default=30, metavar="S", help="seconds that there must be more, "
                       "until a replica is added (default: 30); one goes after 10 minutes of fewer")  # fmt: skip
    scale.add_argument("--address", help="of a Ray cluster, or auto (default: this machine alone)")
    server.options(parser.add_argument_group("each of them, as in  python -m runtime serve"))
    arguments = parser.parse_args(argv)
    arguments.max_replicas = arguments.max_replicas or arguments.replicas
    if arguments.max_replicas < arguments.replicas:
        raise UserError(f"--max-replicas {arguments.max_replicas} is less than --replicas {arguments.replicas}")
    arguments.bundle = str(Path(arguments.bundle).resolve())
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if importlib.util.find_spec("ray") is None:
        advice = "type  . .venv/bin/activate  where scripts/test.sh made that, or  pip install -e '.[serve,ray]'"
        raise UserError(f"Ray is not installed: in this project's folder, {advice}")
    levels, _ = server.prepared(arguments)  # what is wrong with the bundle is told before anything is started
    token = server.token_of(arguments)
    with server.listen(arguments.host, arguments.port) as free:
        arguments.host, arguments.port = free.getsockname()[:2]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell somebody that it is used
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # its 5 are few for a small or busy machine
    import ray
    from ray import serve

    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    alone: dict[str, Any] = {} if arguments.address else {"include_dashboard": False, "object_store_memory": OBJECTS}
    print("starting Ray: half a minute, more on a busy machine", file=sys.stderr, flush=True)
    try:
        with_ours = {"env_vars": {"PYTHONPATH": paths}}
        ray.init(arguments.address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=with_ours, **alone)
    except Exception as error:  # a node that is late is told by a bare one
        raise UserError(f"Ray does not start: {one_line(error)}") from error
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # Ray has put its own there
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with contextlib.ExitStack() as ending:
        ending.callback(ray.shutdown)
        fit(arguments, levels.bundle, ray.cluster_resources())
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        try:
            serve.start(http_options={"host": arguments.host, "port": arguments.port}, logging_config=quiet)
        except Exception as error:  # its proxy has seconds to be there, and an error of Ray's own if it is not
            busy = "a machine that is busy may be too slow for it: try again"
            raise UserError(f"Ray Serve does not start: {one_line(error)[:200]}: {busy}; logs {LOGS}") from error
        if arguments.address:  # of a cluster's Serve only what is ours
            ending.callback(serve.delete, levels.name)
        else:
            ending.callback(delete, levels.name, ray.get_runtime_context().gcs_address)
        try:
            serve.run(application(arguments, token), name=levels.name, logging_config=quiet)
        except RuntimeError as error:
            raise UserError(f"the replicas do not start: {one_line(error)}") from error
        shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        more = f" to {arguments.max_replicas}" if arguments.max_replicas > arguments.replicas else ""
        print(
            f"{levels.name} at http://{shown}:{arguments.port}/  ({arguments.replicas}{more} replicas, "
            f"{arguments.threads} threads each; models {', '.join(levels.models)}; Ctrl-C ends it; logs {LOGS})",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
