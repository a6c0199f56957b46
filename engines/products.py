"""Products of few rows, as a decode step has them, by our own kernel in place of ONNX Runtime's.

They are bound by reading the weights: of those that are mapped ONNX Runtime reads neighbouring rows, our kernel rows
that lie far apart, which is faster (engines/plugins/cpu/row_matmul_path.h). The file stays as it is, for every backend:
its nodes are exchanged while it is loaded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from typing import Any

from engines import wire
from engines.manifest import Graph
from engines.trt_plugins import DOMAIN

OPERATOR = b"RowMatMul"  # of the library that engines/plugins/cpu_library.py builds
FEW = 8  # rows
PRODUCTS = (b"MatMul", b"Gemm")
NAME, FLOAT, INTEGER = 1, 2, 3  # of AttributeProto
OPSET_DOMAIN, OPSET_VERSION = 1, 2  # of OperatorSetIdProto


def rows(graph: Graph) -> int:
    """Tokens that a graph of the decoder reads at once; 0: it reads none."""
    return max((math.prod(s.shape[:2]) for s in graph.inputs if s.name in ("embedding", "embeddings")), default=0)


def few(graph: Graph) -> bool:
    """Whether its products have few rows."""
    return 0 < rows(graph) <= FEW


def exchange(model: bytes, weights: Collection[str]) -> bytes:
    """An ONNX file's bytes with our operator in place of those products by these weights that add nothing.

    Args:
        weights: matrices of float32.

    Raises:
        ValueError: this is no ONNX file.
    """
    known = {name.encode() for name in weights}
    try:
        parts: list[bytes | memoryview] = []
        domains: set[bytes] = set()
        for number, value, raw in wire.spans(memoryview(model)):
            if number == wire.GRAPH and isinstance(value, memoryview):
                parts.append(wire.written(number, b"".join(_nodes(value, known))))
                continue
            if number == wire.OPSET and isinstance(value, memoryview):
                domains.update(bytes(domain) for domain in wire.all_of(value, OPSET_DOMAIN))
            parts.append(raw)
    except (IndexError, TypeError, KeyError, struct.error) as error:
        raise ValueError("this is no ONNX file") from error
    if DOMAIN.encode() not in domains:
        ours = wire.written(OPSET_DOMAIN, DOMAIN.encode()) + wire.written(OPSET_VERSION, 1)
        parts.append(wire.written(wire.OPSET, ours))
    return b"".join(parts)


def _nodes(graph: memoryview, weights: set[bytes]) -> list[bytes | memoryview]:
    """Its fields, those of nodes exchanged where they are such a product."""
    return [
        wire.written(number, _exchanged(value))
        if number == wire.NODE and isinstance(value, memoryview) and _is_product(value, weights)
        else raw
        for number, value, raw in wire.spans(graph)
    ]


def _is_product(node: memoryview, weights: set[bytes]) -> bool:
    inputs = [bytes(name) for name in wire.all_of(node, wire.INPUT)]
    if len(inputs) != 2 or inputs[1] not in weights:
        return False
    if not any(bytes(name) in PRODUCTS for name in wire.all_of(node, wire.OPERATOR)):
        return False
    attributes: list[dict[int, Any]] = [dict(wire.fields(each)) for each in wire.all_of(node, wire.ATTRIBUTE)]
    numbers = {bytes(each[NAME]): each for each in attributes}
    factor = struct.unpack("<f", numbers[b"alpha"][FLOAT])[0] if b"alpha" in numbers else 1
    turned = numbers[b"transA"].get(INTEGER, 0) if b"transA" in numbers else 0
    return factor == 1 and not turned


def _exchanged(node: memoryview) -> bytes:
    rest = [raw for number, _, raw in wire.spans(node) if number not in (wire.OPERATOR, wire.DOMAIN)]
    return b"".join([*rest, wire.written(wire.OPERATOR, OPERATOR), wire.written(wire.DOMAIN, DOMAIN.encode())])
