"""python -m runtime ask BUNDLE --image FILE "question"  |  chat BUNDLE  |  info BUNDLE  |  serve BUNDLE"""

from __future__ import annotations

if __name__ == "__main__":
    import engines.interruption  # noqa: F401

import argparse
import dataclasses
import io
import json
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from engines.backend import Status
from engines.errors import Parser, UserError, command, positive
from runtime.server import command as server

if TYPE_CHECKING:
    from engines.bundle import Bundle
    from runtime.model import VLM
    from runtime.sampling import Sampling

BYTES = 1024


class _Video(str):
    """A path that `--video` names."""


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd tags and the like, about an image that is fine
    arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m runtime",
        description="Ask a compressed vision-language model about images.",
        epilog='example:  python -m runtime ask build/demo-vlm --image shape.png "what color is the shape?"',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ask = commands.add_parser("ask", help="ask one question about one or several images")
    ask.set_defaults(run=_ask)
    _model(ask)
    ask.add_argument("question")
    ask.add_argument("--image", action="append", default=[], metavar="FILE", help="repeat it for several images")
    ask.add_argument("--video", action="append", dest="image", type=_Video, metavar="PATH", help="a folder of frames, "
                     "or an animated GIF, WebP or PNG; repeat it for several")  # fmt: skip
    ask.add_argument("--frames", type=positive, metavar="N", help="of each video at most, spread evenly (default: all)")
    ask.add_argument("--fps", type=float, metavar="N", help="frames a second of a video (default: as its file says, "
                     "else 24)")  # fmt: skip
    ask.add_argument("--question-later", action="store_true", help="compress the images before the question is known")
    ask.add_argument("--json", action="store_true", help="print one JSON object instead of the answer")
    _drawn(ask).add_argument(
        "--logprobs", type=int, metavar="N", help="tell log-probabilities: the tokens' and N likeliest's"
    )
    watched = ask.add_argument_group("what is watched", argument_default=argparse.SUPPRESS)  # Watch has the defaults
    watched.add_argument("--on-alarm", choices=["none", "retry"], help="retry: answer anew, at a lighter level, "
                         "unless a part was printed (default: none)")  # fmt: skip
    watched.add_argument("--blindness", type=float, metavar="D", help="alarm where blank images would move the first "
                         "token's log-probabilities by less than D nats; costs a prefill")  # fmt: skip

    chat = commands.add_parser(
        "chat", help="talk about images, line by line", description="Questions line by line; /help tells what else."
    )
    chat.set_defaults(run=_chat)
    _model(chat)
    chat.add_argument("--room", type=positive, metavar="N", help="take memory for N tokens, as for the shortest bucket "
                      "that holds them (`info` lists them), and keep more of a long chat; it may be longer where the "
                      "level compacts (default: for the first turn; where it never compacts, the longest)")  # fmt: skip
    _drawn(chat)

    info = commands.add_parser("info", help="what a bundle holds and what can run it here")
    info.set_defaults(run=_info)
    info.add_argument("bundle", help="folder that export/build.py wrote")
    info.add_argument("--json", action="store_true", help="print one JSON object")

    server.add(commands)
    return parser


def _model(parser: argparse.ArgumentParser) -> None:
    """What opens a bundle, and how long an answer may be."""
    parser.add_argument("bundle", help="folder that export/build.py wrote")
    parser.add_argument("--level", help="compression level (default: the bundle's; `info` lists them)")
    parser.add_argument("--backend", default="auto", help="auto, ort, trt-rtx or trt (default: auto, the first "
                        "of trt, trt-rtx and ort that runs the bundle here, and it says why)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the backend's choice)")
    parser.add_argument("--no-kernels", action="store_true", help="run the graphs as they are, without kernels")
    parser.add_argument("--memory-budget", metavar="SIZE", help=server.MEMORY_BUDGET)


def _drawn(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What `Sampling` is made of."""
    drawn = parser.add_argument_group("how tokens are chosen", argument_default=argparse.SUPPRESS)  # Sampling has them
    drawn.add_argument("--temperature", type=float, metavar="T", help="draw tokens; at 0 (default) take the likeliest")
    drawn.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest")
    drawn.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest that have P together")
    drawn.add_argument("--min-p", type=float, metavar="P", help="draw among those that have P times the likeliest's")
    drawn.add_argument("--seed", type=int, metavar="N", help="draw the same tokens every time")
    drawn.add_argument("--repetition-penalty", type=float, metavar="X", help="over 1: repeat less (default: 1)")
    drawn.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT; repeat it for several")
    return drawn


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from runtime.sampling import Sampling

    given = {name: vars(arguments)[name] for name in Sampling.__dataclass_fields__ if name in arguments}
    sampling = Sampling(**given)
    idle = [f"--{name.replace('_', '-')}" for name in ("top_k", "top_p", "min_p", "seed") if name in given]
    if idle and sampling.temperature == 0:
        raise UserError(f"{', '.join(idle)}: at temperature 0 nothing is drawn: add  --temperature 1")
    return sampling


def _opened(arguments: argparse.Namespace) -> VLM:
    import runtime

    a = arguments
    return runtime.open(a.bundle, a.backend, a.level, a.threads, not a.no_kernels, a.memory_budget)


def _chat(arguments: argparse.Namespace) -> None:
    from runtime.chat import Chat
    from runtime.sampling import check_number

    sampling = _sampling(arguments)
    check_number("max_new_tokens", arguments.max_new_tokens, 1)
    if isinstance(sys.stdin, io.TextIOWrapper):  # names of files may be any bytes, and questions are told if they are
        sys.stdin.reconfigure(errors="surrogateescape")
    Chat(_opened(arguments), arguments.max_new_tokens, sampling, arguments.room).run(sys.stdin or io.StringIO())


def _ask(arguments: argparse.Namespace) -> None:
    from runtime.monitor import Monitor, Watch

    watch = {name: vars(arguments)[name] for name in Watch.__dataclass_fields__ if name in arguments}
    sampling, monitor = _sampling(arguments), Monitor(Watch(**watch))
    shown = _shown(arguments)
    vlm = _opened(arguments)
    vlm.monitor = monitor
    stream = vlm.stream(
        arguments.question,
        shown,
        arguments.max_new_tokens,
        question_later=arguments.question_later,
        sampling=sampling,
        on_restart=(lambda: None) if arguments.json else None,
    )
    for piece in stream:
        if not arguments.json:
            print(piece, end="", flush=True)
    result, stats = stream.result, stream.result.stats
    if arguments.json:
        values = dataclasses.asdict(stats)
        values |= {"answer": result.text, "tokens": result.tokens, "seconds_by_part": stats.seconds}
        values |= {"finish_reason": result.finish_reason, "backend_reason": vlm.why}
        values |= {"logprobs": [dataclasses.asdict(each) for each in result.logprobs]}
        print(json.dumps(values | {"seconds": sum(stats.seconds.values())}))
        return
    print()
    for each in result.logprobs:
        beside = ", ".join(f"{vlm.tokenizer.id_to_token(token)!r} {value:z.3f}" for token, value in each.top)
        print(f"{vlm.tokenizer.id_to_token(each.token)!r} {each.logprob:z.3f}  [{beside}]", file=sys.stderr)
    if arguments.backend == "auto":
        print(f"backend {vlm.backend}: {vlm.why}", file=sys.stderr)
    print(
        f"[{stats.level}{stats.reason and f' ({stats.reason})'}, "
        f"{stats.backend} ({stats.provider}{', kernels' * stats.kernels}); "
        f"{stats.prompt_tokens} prompt tokens, {stats.visual_tokens} visual tokens kept; "
        f"KV {stats.kv_bytes / BYTES:.0f} KiB, uncompressed {stats.kv_bytes_uncompressed / BYTES:.0f} KiB; "
        f"{stats.generated_tokens} tokens, {sum(stats.seconds.values()):.2f} s, stopped by {stats.stop_reason}"
        + "".join(f"; alarm: {alarm.sign} at token {alarm.tokens}" for alarm in stats.alarms)
        + "; answered anew" * stats.retries
        + "]",
        file=sys.stderr,
    )


def _shown(arguments: argparse.Namespace) -> list[Any]:
    """Images and videos, in the order in which they were named."""
    from runtime.video import Video

    given = arguments.image
    if (arguments.frames or arguments.fps) and not any(isinstance(each, _Video) for each in given):
        raise UserError("--frames and --fps are of videos: give one with  --video PATH")
    options = {"frames": arguments.frames, "fps": arguments.fps}
    return [Video(str(each), **options) if isinstance(each, _Video) else each for each in given]


def _info(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from engines import bundle as bundles
    from runtime.backends import NAMES, status

    bundle = bundles.read(Path(arguments.bundle))
    manifest = bundle.manifest
    levels = {name: dataclasses.asdict(level) for name, level in manifest.levels.items()}
    default = manifest.levels[manifest.default_level]
    values: dict[str, Any] = {
        "model": dataclasses.asdict(manifest.model),
        "level": manifest.default_level,
        "recipe": default.recipe,
        "buckets": [bucket.length for bucket in default.buckets],
        "capacities": {str(bucket.length): bucket.capacities for bucket in default.buckets},
        "weights": dataclasses.asdict(manifest.weights),
        "levels": levels,
        "backends": {name: _backend(status(name, bundle)) for name in NAMES},
        "operators": _operators(bundle),
        "libraries": [dataclasses.asdict(library) for library in manifest.libraries],
        "tools": manifest.tools,
        "files": {name: dataclasses.asdict(file) for name, file in manifest.files.items()},
    }
    if arguments.json:
        print(json.dumps(values))
        return
    model = manifest.model
    heads = "/".join(map(str, dict.fromkeys(model.kv_heads)))
    print(
        f"{bundle.path}: {model.model_type}, {model.num_layers} layers, {heads} KV heads of "
        f"{model.head_dim}; "
        + (", ".join(f"images of {each.name} are {each.tokens} tokens" for each in model.layouts) or "no images")
    )
    print(f"weights: {manifest.weights.line(manifest.files[bundles.WEIGHTS].bytes)}")
    for name, level in manifest.levels.items():
        print(f"\nlevel {name}{' (default)' if name == manifest.default_level else ''}: ", end="")
        views = level.views.items()
        seen = (f"{'at most ' if own.adaptive else ''}{own.tokens} of an image of {size}" for size, own in views)
        kept = f"visual tokens kept: {', '.join(seen) or 'none'}"
        merged = f", {sum(level.kv_heads)} of {sum(model.kv_heads)} KV heads"
        later = f"; question later: {level.unknown}" if level.unknown else ""
        print(kept + (merged if level.kv_heads != model.kv_heads else "") + later)
        print(f"  guard: {level.guard.line}")
        for bucket in level.buckets:
            compacts = "compacts" if bucket.compact else "never compacts"
            print(
                f"  up to {bucket.length:5} tokens: store {', '.join(map(str, bucket.capacities))} slots a layer, "
                f"window {bucket.window} ({bucket.recent} recent, {compacts})"
                + f", {bucket.batch} requests at once"
                * (bucket.batch > 1)
            )
    print("\nbackends")
    for name, backend in values["backends"].items():
        print(f"  {name:8} {'yes' if backend['available'] else 'no '}  {backend['reason']}")
    print("\noperators")
    for name, runs in values["operators"].items():
        print(f"  {name:18} " + "; ".join(f"{backend}: {what}" for backend, what in runs.items()))
    for library in manifest.libraries:
        print(f"  {library.file}: {library.platform}, {', '.join(library.architectures)}")
    print(f"\nfiles ({sum(file.bytes for file in manifest.files.values()) / 2**20:.1f} MiB)")
    for name, file in manifest.files.items():
        print(f"  {file.bytes:12,}  {name}")


def _operators(bundle: Bundle) -> dict[str, dict[str, str]]:
    """What each operator of the bundle's graphs runs as, by backend."""
    from runtime.backends import kernels

    manifest, library = bundle.manifest, kernels(bundle)[0]
    count = sum((Counter(graph.operators) for graph in manifest.graphs.values()), Counter())
    runs = {name: {"ort": "kernel" if library else "function body"} for name in sorted(count)}
    for backend in dict.fromkeys(plan.backend for plan in manifest.plans):
        layers = sum((Counter(plan.plugins) for plan in manifest.plans if plan.backend == backend), Counter())
        for name, nodes in count.items():
            plugins = f"{layers[name]} of {nodes} nodes are plugin layers"
            runs[name][backend] = plugins if layers[name] else "function body"
    return runs


def _backend(status: Status) -> dict[str, Any]:
    return {"available": status.available, "reason": status.reason}


if __name__ == "__main__":
    sys.exit(command(main)())
