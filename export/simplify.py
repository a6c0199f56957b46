"""An exported program in operators that become ONNX, without a second trace of it.

`torch.onnx.export` has PyTorch decompose what it cannot translate. PyTorch traces the whole program anew for it, which
is half of an export's time, while most graphs hold a few such operators only, each another's name or a special case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isroutine
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

aten = torch.ops.aten
CHECK = aten._assert_tensor_metadata.default
CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device)
ALIASES = (aten.alias.default, aten.contiguous.default, aten.detach.default, aten.detach_.default)
COPIES = (*CONVERSIONS, *ALIASES)  # of another dtype at most: all is on the CPU, and nothing is trained
RESHAPE = aten.reshape.default
# A view of what was a copy may not be one of what it was copied from.
SHAPES = (RESHAPE, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int)
SAME: dict[Any, Any] = {aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__or__.Tensor: aten.bitwise_or.Tensor}


def simplify(program: ExportedProgram) -> ExportedProgram:
    """Change a program in place; PyTorch traces it anew only if it is asked to decompose something that is left."""
    for node in _calls(program):
        if node.target is CHECK:
            program.graph.erase_node(node)
        elif node.target in (*COPIES, *SHAPES):
            _rewrite(node)
        elif node.target is aten.narrow.default:
            _slice(node)
        else:
            node.target = SAME.get(node.target, node.target)
    program.run_decompositions = partial(_decomposed, program)
    return program


def _rewrite(node: fx.Node) -> None:
    """What changes nothing is its source, but as an output of the program, which is known by the node's name."""
    source = node.all_input_nodes[0]
    old, new = source.meta["val"], node.meta["val"]
    if (old.dtype, old.shape) == (new.dtype, new.shape):
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
    if not node.users:
        node.graph.erase_node(node)
    elif node.target in COPIES:
        node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": new.dtype}
    else:
        node.target, node.args, node.kwargs = RESHAPE, (source, [*new.shape]), {}


def _slice(node: fx.Node) -> None:
    """A part of fixed size and place, as PyTorch's own decomposition has it."""
    source, places = node.all_input_nodes[0], [n for n in node.args if isinstance(n, int)]
    if len(places) == 3:  # else its start is another node
        shape, (dim, start, length) = source.meta["val"].shape, places
        start %= shape[dim]
        node.target, node.args = aten.slice.Tensor, (source, dim % len(shape), start, start + length)


def _decomposed(program: ExportedProgram, table: dict[Any, Callable] | None = None) -> ExportedProgram:
    """The program without the operators of `table`, and without those that PyTorch decomposes whatever it says."""
    used = {node.target for node in _calls(program)}
    if table is not None and not used & table.keys() and not any(map(_always, used - {RESHAPE})):
        return program
    return ExportedProgram.run_decompositions(program, table)


def _always(target: Any) -> bool:
    """Whether an operator writes into its inputs, is made of others and may return a view, or calls a graph."""
    if isroutine(target):  # Python's own, of sizes
        return False
    try:  # what has no public name; a graph that is called has no schema
        view = any(value.alias_info is not None for value in target._schema.returns)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return target._schema.is_mutable or (view and target.has_kernel_for_dispatch_key(composite))
    except AttributeError:  # or a newer PyTorch has other names: it traces anew, which is slower and never wrong
        return True


def _calls(program: ExportedProgram) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]
