"""Plans with plugins: the library in TensorRT's registry, and ONNX nodes that become its layers, all of them."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from engines.errors import UserError

NAMESPACE, VERSION = "unicache", "1"  # of the plugins, as engines/plugins/tensorrt/plugin.h has them
DOMAIN = "unicache"  # of the ONNX operators


def load(trt: ModuleType, logger: Any, library: str) -> None:
    """Put the library's plugins into the registry, once a process.

    Raises:
        UserError: it is no library of the plugins.
    """
    registry = trt.get_plugin_registry()
    if any(creator.plugin_namespace == NAMESPACE for creator in registry.all_creators):
        return
    logger.errors.clear()
    if registry.load_library(library) is None:
        reason = "; ".join(logger.errors[:1]) or "TensorRT gave no reason"
        raise UserError(f"{library} is no plugin library that loads here: {reason}")


def complaint(library: str) -> str:
    """What a plugin has complained of, and nothing the next time: TensorRT-RTX gives plugins no logger."""
    try:
        ask = ctypes.CDLL(library).unicache_complaint
    except (OSError, AttributeError):  # another library
        return ""
    ask.restype = ctypes.c_char_p
    return ask().decode()


def prepare(path: str) -> tuple[bytes, dict[str, str]]:
    """The ONNX file as it is parsed with plugins, and the operator of every node that is to be a plugin, by its name.

    A node asks for its plugin by attributes. The functions of the operators are left out: TensorRT before 10.7 prefers
    them to a plugin, and no later one can then fall back to them unnoticed.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    nodes = {}
    for i, node in enumerate(model.graph.node):
        if node.domain == DOMAIN:
            node.name = node.name or f"{node.op_type}_{i}"
            asks = {"plugin_namespace": NAMESPACE, "plugin_version": VERSION}
            node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in asks.items())
            nodes[node.name] = node.op_type
    others = [function for function in model.functions if function.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(others)
    return model.SerializeToString(), nodes


def check_network(network: Any, nodes: dict[str, str]) -> None:
    """Raises UserError, with the nodes' names, where a node is no plugin layer of the parsed network."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    _check({layer.name for layer in layers if layer.type.name == "PLUGIN_V3"}, nodes, "parsed network")


def check_engine(fused: list[dict[str, Any]], nodes: dict[str, str]) -> None:
    """Raises UserError, with the nodes' names, where no layer of the engine computes a node."""
    _check({name for layer in fused for name in (layer["name"], *layer["nodes"])}, nodes, "engine")


def _check(found: set[str], nodes: dict[str, str], where: str) -> None:
    if missing := [f"{name} ({operator})" for name, operator in nodes.items() if name not in found]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"no plugin layer of the {where} for node {', '.join(missing[:3])}{more}")
