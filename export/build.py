"""Build a bundle: a Hugging Face vision-language model, compressed, as static-shape ONNX graphs and TensorRT plans.

python export/build.py                                     the demo model, levels off, balanced, extreme and chat
python export/build.py CHECKPOINT --out DIR                 your model
python export/build.py --recipe my.toml --backend trt-rtx   your recipe, with TensorRT-RTX plans
"""

# ruff: noqa: E402 (sys.path comes first)
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script, Python puts export/ first; `export` must be importable as a package
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    import engines.interruption  # noqa: F401

import argparse
import dataclasses
import itertools
import os
from functools import partial
from typing import TYPE_CHECKING

from engines import bundle, releases
from engines.errors import UserError, command
from engines.plans import describe
from export.arguments import DEFAULT_IMAGES, DEFAULT_RECIPES, DEFAULT_TEXT, DEMO, arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.progress import Progress

    from calibration.samples import Sample
    from engines.guard import Guarded
    from export.checkpoint import Checkpoint
    from export.kernels import Kernels
    from export.recipe import Recipe


@command
def main(argv: list[str] | None = None) -> None:
    args = arguments(__doc__ or "").parse_args(argv)
    out = args.out or Path("build") / args.checkpoint.resolve().name
    if args.out is None and args.checkpoint == DEMO:
        out = ROOT / "build" / DEMO.name
    bundle.check_outside(out, args.checkpoint)
    with bundle.writing(out) as folder:
        image = " --image FILE" * bool(build(args, folder).model.layouts)
        size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"wrote {out} ({size / 2**20:.1f} MiB)\nask it:  python -m runtime ask {out}{image} 'question'")


def build(args: argparse.Namespace, folder: Path) -> bundle.Manifest:
    """Make all of a bundle in `folder`, which becomes the bundle when this returns."""
    releases.check_installed()
    print("loading PyTorch and transformers ...", flush=True)
    from rich.console import Console

    from calibration.entropy import with_entropy
    from calibration.prepare import prepare
    from calibration.report import assemble
    from export import checkpoint as checkpoints
    from export import kernels as kernel_libraries
    from export.memory import return_large_blocks
    from export.pipeline import SMALL, Exported, export_graphs, plan_levels
    from export.to_onnx import WeightFile
    from export.weights.weights import GROUPS

    return_large_blocks()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    levels = _levels(args)
    default = args.level or ("balanced" if "balanced" in levels else next(iter(levels)))
    if default not in levels:
        raise UserError(f"--level {default} is none of this bundle's levels: {', '.join(levels)}")
    backends = list(dict.fromkeys(["ort", *(args.backend or [])]))
    _check_backends(backends)

    if args.group and args.weights not in GROUPS:
        raise UserError(f"--group {args.group} is of --weights {' or '.join(GROUPS)}: give one of them too")
    checkpoint = checkpoints.load(args.checkpoint, sizes=args.image_sizes, scratch=folder)
    _sizes(args, checkpoint, levels)
    console.print(_describe(checkpoint))
    if args.weights == "float32" and parameters(checkpoint) >= SMALL and (told := _grows(checkpoint)):
        console.print(told)
    checkpoint, stored = _quantized(args, checkpoint, console)
    levels, guarded, known = _guarded(args, checkpoint, levels, console)
    buckets = _sizes(args, checkpoint, levels)
    with _progress(console) as bar:

        def task(what: str) -> Callable[[], None]:
            return partial(bar.advance, bar.add_task(f"{what} on {len(known)} samples", total=len(known)))

        prepared = prepare(checkpoint, levels, known, task, max(map(max, buckets.values())))
        decoders = {name: found.decoder for name, found in prepared.items()}
        levels = with_entropy(checkpoint, levels, decoders, known, task)
    for name, found in prepared.items():
        if found.note:
            console.print(f"level {name}: {found.note}")

    with console.status("compiling kernels"):
        kernels = kernel_libraries.prepare(folder, args.kernels, kernel_libraries.architectures(backends))
    for reason in kernels.missing:
        console.print(f"without kernels: {reason}")

    described, makers = plan_levels(checkpoint, levels, buckets, prepared, args.batch)
    described = {name: dataclasses.replace(level, guard=guarded[name]) for name, level in described.items()}
    mapped = stored.dtype in ("float32", "float16")  # by all processes; of codes each holds its own
    jobs = args.jobs or (min(os.cpu_count() or 1, 4) if mapped or parameters(checkpoint) < SMALL else 1)
    with WeightFile(folder, checkpoint.weights) as weights, _progress(console) as bar:
        exports = bar.add_task("exporting and checking graphs", total=len(makers))

        def done(exported: Exported) -> None:
            bar.advance(exports)
            if args.verbose:
                size = (folder / exported.graph.file).stat().st_size
                told = f"{size / 1024:.0f} KiB, {exported.seconds:.1f} s, equal to PyTorch to {exported.error:.0e}"
                console.print(f"  {exported.name}: {told}")

        embedding = checkpoint.weights.store(checkpoint.embedding, weights.add)
        graphs = export_graphs(makers, weights, jobs, done, kernels.cpu)
    manifest = bundle.Manifest(_model(checkpoint, embedding), described, default, graphs, weights=stored)
    _write_processor(checkpoint, folder)
    if args.report:
        with _progress(console) as bar:

            def looked(what: str, total: int) -> Callable[[], None]:
                return partial(bar.advance, bar.add_task(what, total=total))

            # Of a level that was lightened: as it was given, and as it is built.
            verdicts = [v for told in guarded.values() for v in (*told.verdicts[:1], *told.verdicts[1:][-1:])]
            why_not = assemble.write_into(folder, checkpoint, levels, prepared, args.samples, verdicts, looked)
        if why_not:
            print(f"without a report: {why_not}")
    plans = [plan for backend in backends[1:] for plan in _build_plans(backend, manifest, folder, console, kernels)]
    return bundle.seal(folder, _with_plans(manifest, plans, backends, kernels))


def _levels(args: argparse.Namespace) -> dict[str, Recipe]:
    """The recipes asked for, and behind them those that they name for questions that are not known yet."""
    from export import recipe as recipes

    levels: dict[str, Recipe] = {}
    for recipe in (recipes.load(name, args.checkpoint) for name in args.recipe or DEFAULT_RECIPES):
        if levels.setdefault(recipe.name, recipe) is not recipe:
            raise UserError(f"two recipes are called {recipe.name}: a level is named by its recipe, rename one file")
    known = list(levels.values())
    for recipe in known:  # grows on the way
        if recipe.unknown is not None and recipe.unknown not in levels:
            try:
                levels[recipe.unknown] = recipes.load(recipe.unknown, args.checkpoint)
            except UserError as error:
                raise UserError(
                    f"recipe {recipe.name} names {recipe.unknown!r} for unknown questions: {error}; "
                    f"a file of that name becomes a level too with  --recipe {recipe.unknown}.toml"
                ) from error
            known.append(levels[recipe.unknown])
    return levels


def _check_backends(backends: list[str]) -> None:
    """Fail before the long work, not after it, when a builder is missing."""
    from engines import trt

    for backend in backends[1:]:
        trt.check(backend)


def parameters(checkpoint: Checkpoint) -> int:
    return sum(p.numel() for p in checkpoint.model.parameters())


def _describe(checkpoint: Checkpoint) -> str:
    d = checkpoint.decoder
    heads = "/".join(map(str, dict.fromkeys(d.kv_heads)))
    return (
        f"{checkpoint.model_type} {checkpoint.path.name}: {parameters(checkpoint) / 1e6:.1f} M parameters, "
        f"{d.num_layers} layers, {heads} KV heads of {d.head_dim}; "
        + (", ".join(f"images of {each.name} are {each.tokens} tokens" for each in checkpoint.layouts) or "no images")
    )


def _grows(checkpoint: Checkpoint) -> str:
    """Whether float32 takes more than the checkpoint does, and what takes less."""
    own, stored = (
        sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors")),
        4 * parameters(checkpoint),
    )
    more = (
        f"weights are stored as float32, {stored / 2**30:.1f} GiB, and the checkpoint has {own / 2**30:.1f} GiB of them"
    )
    return f"{more}: --weights float16, int8 or int4 store less" if stored > 1.5 * own else ""


def _quantized(
    args: argparse.Namespace, checkpoint: Checkpoint, console: Console
) -> tuple[Checkpoint, bundle.StoredWeights]:
    """The checkpoint with its weights as they are stored, and what is told of them."""
    from calibration.weights import guarded_weights
    from export.weights import Weights

    weights = Weights(args.weights, args.group or 0)
    with _progress(console) as bar:

        def task(what: str, times: int) -> Callable[[], None]:
            return partial(bar.advance, bar.add_task(what, total=times))

        return guarded_weights(checkpoint, weights, args.guard, args.samples, args.held_out, console.print, task)


def _guarded(
    args: argparse.Namespace, checkpoint: Checkpoint, levels: dict[str, Recipe], console: Console
) -> tuple[dict[str, Recipe], dict[str, Guarded], list[Sample]]:
    """The levels, lightened if need be, what the guard says of each, and the samples to calibrate on."""
    from calibration.levels import LIGHTEN, REFUSE, guarded
    from export import recipe as recipes

    files = {recipes.load(name).name for name in args.recipe or () if name.endswith(".toml")}
    auto = {name: REFUSE if name in files else LIGHTEN for name in levels}
    ways = auto if args.guard == "auto" else dict.fromkeys(levels, args.guard)
    with _progress(console) as bar:

        def task(what: str, times: int) -> Callable[[], None]:
            return partial(bar.advance, bar.add_task(what, total=times))

        return guarded(checkpoint, levels, ways, args.samples, args.held_out, console.print, task)


def _sizes(args: argparse.Namespace, checkpoint: Checkpoint, levels: dict[str, Recipe]) -> dict[str, list[int]]:
    """The buckets of every level.

    Raises:
        UserError: something does not fit them, or the model.
    """
    from export.buckets import check_sizes

    buckets = {name: bucket_lengths(args, checkpoint, recipe) for name, recipe in levels.items()}
    for name, recipe in levels.items():
        check_sizes(recipe, checkpoint, buckets[name])
    return buckets


def bucket_lengths(args: argparse.Namespace, checkpoint: Checkpoint, recipe: Recipe) -> list[int]:
    """Prompt lengths S of a level: for each number of images, what the chat template makes of them, plus the question.

    Raises:
        UserError: nothing fits the positions that the model knows, or the text does not fit a shortened prompt.
    """
    from export.buckets import bucket_length, text_tokens

    limit = checkpoint.max_positions(recipe.positions.scale)
    if args.buckets:
        lengths = args.buckets
        if too_long := [s for s in lengths if not 1 <= s <= limit]:
            raise UserError(f"--buckets {too_long[0]}: the model has positions 1 to {limit}")
        return sorted(set(lengths))
    if args.images and not checkpoint.layouts:
        raise UserError(f"--images {args.images[0]}: {checkpoint.model_type} models take no images: leave it out")
    lengths, largest = [], max(checkpoint.layouts, key=lambda layout: layout.tokens, default=None)
    counts = (args.images or DEFAULT_IMAGES) if largest else [0]
    questions = [args.text_tokens] if args.text_tokens else DEFAULT_TEXT[bool(largest)]
    for images, question in itertools.product(counts, questions):
        text = text_tokens(checkpoint, images, question, layout=largest)
        lengths.append(bucket_length(checkpoint, recipe, images, text, largest))
        if lengths[-1] > limit and (args.images or len(lengths) == 1):
            raise UserError(
                f"a prompt of {images} image{'s' * (images != 1)} and --text-tokens {question} takes "
                f"{lengths[-1]} tokens, and the model has {limit} positions: give fewer of them"
            )
    return sorted({s for s in lengths if s <= limit})


def _model(checkpoint: Checkpoint, embedding: bundle.Embedding) -> bundle.Model:
    text, generation = checkpoint.text_config, checkpoint.model.generation_config
    ends = generation.eos_token_id if generation.eos_token_id is not None else text.eos_token_id
    return bundle.Model(
        model_type=checkpoint.model_type,
        num_heads=text.num_attention_heads,
        kv_heads=checkpoint.decoder.model_kv_heads,
        head_dim=checkpoint.decoder.head_dim,
        hidden_size=checkpoint.decoder.hidden_size,
        vocab_size=text.vocab_size,
        image_token_id=checkpoint.image_token_id,
        placeholder=checkpoint.placeholder,
        layouts=checkpoint.layouts,
        bos_token_id=text.bos_token_id,
        eos_token_ids=[int(e) for e in (ends if isinstance(ends, list) else [ends]) if e is not None],
        embedding=embedding,
        sentence_ends=checkpoint.sentence_ends,
        block=checkpoint.decoder.block,
        mrope=checkpoint.decoder.mrope,
        deepstack=checkpoint.decoder.deepstack,
        video=checkpoint.video,
    )


def _write_processor(checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer, template and image settings in the forms that the lean runtime reads."""
    import json

    from export.layouts import adds_special_tokens

    tokenizer = checkpoint.processor.tokenizer
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(checkpoint.processor.chat_template or tokenizer.chat_template)
    tokens = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token")}
    image = tokenizer.convert_ids_to_tokens(checkpoint.image_token_id) if checkpoint.takes_images else None
    begun = checkpoint.processor.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "?"}]}])
    special = adds_special_tokens(checkpoint.processor, begun)
    prompt = {**tokens, "image_token": image, "add_special_tokens": special}
    (folder / "prompt.json").write_text(json.dumps(prompt, indent=1))
    if checkpoint.preprocessor:
        checkpoint.preprocessor.write(folder)


def _build_plans(
    backend: str, manifest: bundle.Manifest, folder: Path, console: Console, kernels: Kernels
) -> list[bundle.Plan]:
    from engines import trt

    files = {name: folder / graph.file for name, graph in manifest.graphs.items()}
    with _progress(console) as bar:
        task = bar.add_task(f"building {backend} plans", total=len(files))
        return trt.build_plans(backend, files, folder, lambda *_: bar.advance(task), plugins=kernels.cuda)


def _with_plans(
    manifest: bundle.Manifest, plans: list[bundle.Plan], backends: list[str], kernels: Kernels
) -> bundle.Manifest:
    checked = ", with the function bodies and with kernels" if kernels.cpu else ""
    notes = {"ort": f"ONNX graphs, checked against PyTorch on CPU{checked}"}
    for backend in backends[1:]:
        notes[backend] = describe([plan for plan in plans if plan.backend == backend])
    names = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript")
    tools = {name: releases.installed(name) or "unknown" for name in names}
    return dataclasses.replace(manifest, plans=plans, libraries=kernels.libraries, backends=notes, tools=tools)


def _progress(console: Console) -> Progress:
    from export.progress import progress

    return progress(console)


if __name__ == "__main__":
    sys.exit(main())
