"""The process that talks to the TensorRT builder:  python -m engines.trt_worker MODULE

The builder may abort its process (`std::terminate` on a plugin, a failed internal check), so it never runs inside a
command. Jobs come in on stdin and answers go out on the original stdout, one JSON object a line; everything that the
builder prints, native code included, goes to stderr, where `engines.trt` finds the last words of a worker that died.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from engines import trt_plugins, trt_weights
from engines.errors import UserError, one_line

# What the builder prints of the finished engine at verbosity DETAILED: one line a fused layer, with its ONNX nodes.
ENGINE_REPORT = "Layers:\n"
ENGINE_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+)")
ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


def gpu() -> str | None:
    """Compute capability of the first NVIDIA GPU, for example `sm_87`; None where there is no GPU or no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    calls = (
        (cuda.cuInit, 0),
        (cuda.cuDeviceGet, ctypes.byref(device), 0),
        (cuda.cuDeviceGetAttribute, ctypes.byref(major), 75, device),  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        (cuda.cuDeviceGetAttribute, ctypes.byref(minor), 76, device),  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    )
    if any(call(*arguments) != 0 for call, *arguments in calls):
        return None
    return f"sm_{major.value}{minor.value}"


def make_logger(trt: ModuleType, printed: Any = None) -> Any:
    """A logger that prints what a person may need, and keeps the graph's errors and the builder's layer report.

    Args:
        printed: the least severity that is printed; INFO by default.
    """
    printed = trt.ILogger.Severity.INFO if printed is None else printed

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.report = ""

        def log(self, severity: Any, message: str) -> None:
            if message.startswith(ENGINE_REPORT):
                self.report = message
            if severity.value <= trt.ILogger.Severity.ERROR.value:
                self.errors.append(one_line(Exception(message)))
            if severity.value <= printed.value:
                print(message, file=sys.stderr, flush=True)

    return Logger()


def describe(error: Any, complaint: str) -> str:
    """One parser error: node, operator and why; a plugin's complaint says it better than the parser."""
    functions = [*error.local_function_stack()] if error.local_function_stack_size() else []
    inside = f" in function {functions[0]}" if functions else ""
    node = f"unsupported node {error.node_name() or error.node()} ({error.node_operator()}){inside}"
    of_plugin = complaint.removeprefix(f"{error.node_operator()}: ")
    return f"{node}: {of_plugin if of_plugin != complaint else one_line(Exception(error.desc()))}"


def parse(trt: ModuleType, logger: Any, builder: Any, path: str, plugins: str | None) -> tuple[Any, dict[str, str]]:
    """ONNX file -> strongly typed network; external data is found beside the file.

    Returns:
        The network, and the operators of the nodes that are layers of the library `plugins`, by the nodes' names.

    Raises:
        UserError: the file cannot be read, or a node is not supported.
    """
    # TensorRT 11 knows strongly typed networks only and may drop the flag.
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << typed.value)
    parser = trt.OnnxParser(network, logger)
    nodes: dict[str, str] = {}
    if plugins is None:
        parsed = parser.parse_from_file(path)
    else:
        trt_plugins.load(trt, logger, plugins)
        model, nodes = trt_plugins.prepare(path)
        parsed = parser.parse(model, path)
    if not parsed:
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        if not errors or errors[0].node() < 0:  # the file or its weights, and the log says it best
            raise UserError("; ".join(logger.errors[:1]) or "the parser gave no reason")
        complaint = trt_plugins.complaint(plugins) if plugins else ""
        errors = [describe(error, complaint) for error in errors]
        raise UserError("; ".join(errors[:3]) + (f"; and {len(errors) - 3} more" if len(errors) > 3 else ""))
    trt_plugins.check_network(network, nodes)
    return network, nodes


def inspect(trt: ModuleType, logger: Any, plan: Any) -> list[dict[str, Any]]:
    """Fused layers of a finished plan: from the engine where there is a GPU, else from the builder's log."""
    if gpu():
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        layers = [layer if isinstance(layer, dict) else {"Name": layer} for layer in json.loads(text)["Layers"]]
        return [
            {
                "name": layer["Name"],
                "kind": layer.get("LayerType", ""),
                "nodes": ONNX_NODE.findall(layer.get("Metadata", "")),
            }
            for layer in layers
        ]
    lines = [(ENGINE_LAYER.match(line), line) for line in logger.report.splitlines()]
    return [{"name": m["name"], "kind": m["kind"], "nodes": ONNX_NODE.findall(line)} for m, line in lines if m]


def build(trt: ModuleType, logger: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Build one plan.

    Args:
        job: `onnx` and `plan` (paths), `targets` (compute capabilities; empty: the GPU that is present), `plugins`
            (path of the plugin library, or null).

    Returns:
        `layers`: the network's layer types; `fused`: the engine's layers; `plugins`: plugin layers by operator;
        `inputs`, `outputs`: names; `seconds`.
    """
    start = time.monotonic()
    logger.errors.clear()
    logger.report = ""
    builder = trt.Builder(logger)
    with trt_weights.dequantizing(job["onnx"], Path(job["plan"]).parent) as path:
        network, nodes = parse(trt, logger, builder, path, job["plugins"])
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job["targets"]:
        config.num_compute_capabilities = len(job["targets"])
        for i, target in enumerate(job["targets"]):
            config.set_compute_capability(trt.ComputeCapability.__members__[target.replace("sm_", "SM")], i)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError("the builder refused it: " + "; ".join(logger.errors[-2:]))
    fused = inspect(trt, logger, plan)
    trt_plugins.check_engine(fused, nodes)
    with open(job["plan"], "wb") as stream:
        stream.write(memoryview(plan))
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    return {
        "layers": [layer.type.name for layer in layers],
        "fused": fused,
        "plugins": Counter(nodes.values()),
        "inputs": [network.get_input(i).name for i in range(network.num_inputs)],
        "outputs": [network.get_output(i).name for i in range(network.num_outputs)],
        "seconds": time.monotonic() - start,
    }


def serve(module: str, jobs: TextIO, answers: TextIO) -> None:
    """Answer every job; a graph that fails is an answer with `error`, and the worker goes on."""
    trt = importlib.import_module(module)
    logger = make_logger(trt)
    for line in jobs:
        try:
            answer = build(trt, logger, json.loads(line))
        except Exception as error:  # whatever it was, the parent must hear of it with the graph's name
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            answer = {"error": kind + one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers itself
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # native code prints to stdout too
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
