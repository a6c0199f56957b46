"""Which graphs a bundle needs, and their export and check, several at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engines import bundle, products
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Compact, Decode, Decoder, Extend, Graph, Prefill, State, Vision
from export.recipe import Recipe
from export.to_onnx import WeightFile, export
from export.verify import largest_error

SMALL = 200e6  # parameters up to which several copies of the weights fit into a workstation's memory


@dataclass(frozen=True)
class Exported:
    """A graph in the bundle's folder.

    Attributes:
        error: how far its outputs are from PyTorch's, relative to their size.
        seconds: that its export and its check took.
    """

    name: str
    graph: bundle.Graph
    error: float
    seconds: float


@dataclass(frozen=True)
class Prepared:
    """What a recipe makes of the checkpoint's decoder.

    Attributes:
        statistics: of its keys, one a layer, if the recipe needs any.
        note: what was found that a person should know.
    """

    decoder: Decoder
    statistics: list[KeyStatistics] | None = None
    note: str = ""


Makers = dict[str, Callable[[], Graph]]  # a graph's name -> its module, made when it is exported
BEFORE = ("name", "description", "unknown", "perception", "gate", "fallback", "guard")  # what no decoder's graph reads


def plan_levels(
    checkpoint: Checkpoint,
    recipes: dict[str, Recipe],
    buckets: dict[str, list[int]],
    prepared: dict[str, Prepared],
    batch: int = 1,
) -> tuple[dict[str, bundle.Level], Makers]:
    """Every level's description, and the graphs that they name.

    Args:
        batch: requests that are decoded at once.
    """
    makers: Makers = {}
    visions: dict[tuple[str, str], str] = {}  # layout, and how visual tokens are chosen -> the graph that does it
    alike: dict[tuple[str, int], str] = {}  # the rest of a recipe, and a decoder -> the level whose graphs they are

    def add(name: str, maker: Callable[[], Graph]) -> str:
        makers.setdefault(name, maker)
        return name

    levels = {}
    for name, recipe in recipes.items():
        views = {}
        for layout in checkpoint.layouts:
            tokens, own = recipe.perception.count(layout.tokens), f"{name}.vision_{layout.name}"
            # Levels that keep all tokens share a graph; so do those that choose the same, named after the first one.
            choice = layout.name, str(recipe.settings()["perception"])
            chooses = tokens < layout.tokens or recipe.perception.adaptive
            vision = visions.setdefault(choice, own) if chooses else f"vision_{layout.name}"
            add(vision, partial(Vision, checkpoint.encoders[layout.name], recipe, layout, checkpoint.decoder))
            views[layout.name] = bundle.View(vision, tokens, recipe.adaptive(layout.tokens))
        decoder, known = prepared[name].decoder, prepared[name].statistics
        rest = {part: value for part, value in recipe.settings().items() if part not in BEFORE}
        own = alike.setdefault((str(rest), id(decoder)), name)  # levels that differ in what they see share the others
        sized = []
        for length in buckets[name]:
            state = State(decoder, recipe, length)
            extends = state.chunk > 1 or decoder.mrope  # decode takes one position id, a visual token has three
            rows, many = f"{own}.decode_{length}x{batch}", partial(Decode, replace(state, batch=batch), known)
            sized.append(
                bundle.Bucket(
                    length=length,
                    capacities=state.capacities,
                    window=state.window,
                    recent=state.recent,
                    prefill=add(f"{own}.prefill_{length}", partial(Prefill, state, known)),
                    decode=add(f"{own}.decode_{length}", partial(Decode, state, known)),
                    compact=add(f"{own}.compact_{length}", partial(Compact, state, known)) if state.compacts else "",
                    shortened=state.shortened,
                    extend=add(f"{own}.extend_{length}", partial(Extend, state, known)) if extends else "",
                    chunk=state.chunk,
                    batched=add(rows, many) if batch > 1 else "",
                    batch=batch,
                )
            )
        reach = checkpoint.max_positions(recipe.positions.scale)
        levels[name] = bundle.Level(recipe.settings(), decoder.kv_heads, reach, views, sized, recipe.unknown)
    return levels, makers


def _export_one(makers: Makers, weights: WeightFile, library: Path | None, name: str) -> Exported:
    start, module = time.perf_counter(), makers[name]()
    graph = export(module, name, weights)
    kernels = library if graph.operators or products.few(graph) else None
    error = largest_error(module, graph, weights.folder, kernels)
    return Exported(name, graph, error, time.perf_counter() - start)


_work: Callable[[str], Exported]  # set before the workers are forked: a module with weights is never pickled


def _forked(name: str) -> Exported:
    torch.set_num_threads(1)
    return _work(name)


def export_graphs(
    makers: Makers,
    weights: WeightFile,
    jobs: int,
    done: Callable[[Exported], None] = lambda exported: None,
    library: Path | None = None,
) -> dict[str, bundle.Graph]:
    """Export and check every graph into the folder of `weights`, `jobs` at a time.

    Args:
        done: called with each graph as it is finished.
        library: kernels of the operators, which every graph that uses them is checked with too.

    Raises:
        UserError: a graph differs from PyTorch, or a worker died.
    """
    global _work
    _work = partial(_export_one, makers, weights, library)
    made = {}
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        for name in makers:
            made[name] = _work(name)
            done(made[name])
    else:
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"))
        try:
            for future in as_completed([pool.submit(_forked, name) for name in makers]):
                exported = future.result()
                made[exported.name] = exported
                done(exported)
        except BaseException as error:
            for worker in multiprocessing.active_children():
                worker.kill()  # else an interrupt or SIGTERM waits for the graphs in work, however long they take
            if not isinstance(error, BrokenProcessPool):
                raise
            raise UserError("a worker that exports died, probably for lack of memory: try --jobs 1") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return {name: made[name].graph for name in makers}
