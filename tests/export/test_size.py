"""Models larger than memory: weights are mapped, transposed as views, and written and hashed once for all graphs."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from engines import bundle
from export import checkpoint as checkpoints
from export.graphs import Decode, Prefill, State
from export.to_onnx import WeightFile, export
from export.verify import TOLERANCE, largest_error
from export.weights.kept import Kept
from tests.export import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("size") / "checkpoint")


def mappings(folder: Path) -> list[tuple[int, int]]:
    """Addresses of this process that files of a folder, also of no name, are mapped to."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if len(line) == 6 and line[5].startswith(str(folder))]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def test_weights_lie_in_a_file_that_is_gone_with_them(path: Path, tmp_path: Path) -> None:
    inside, mapped = checkpoints.load(path).model, checkpoints.load(path, scratch=tmp_path).model
    assert not list(tmp_path.iterdir())
    places = mappings(tmp_path)
    known = dict(inside.named_parameters())
    for name, parameter in mapped.named_parameters():
        begin = parameter.data_ptr()
        assert any(start <= begin and begin + parameter.nbytes <= end for start, end in places), name
        assert torch.equal(parameter, known.pop(name))
    assert not known
    with torch.no_grad():
        weight = mapped.get_input_embeddings().weight
        weight.mul_(2)
        assert torch.equal(weight, 2 * inside.get_input_embeddings().weight)


def test_a_mapped_weight_holds_no_file_open(path: Path, tmp_path: Path) -> None:
    """A process may often hold 1,024 open, and models have more weights."""
    before = len(os.listdir("/proc/self/fd"))
    model = checkpoints.load(path, scratch=tmp_path).model
    assert len(list(model.parameters())) > 30
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_where_the_disk_is_full_nothing_is_loaded(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "posix_fallocate", full)
    out = tmp_path / "out"
    with pytest.raises(checkpoints.UserError, match=f"no space left to write {out}"), bundle.writing(out) as folder:
        checkpoints.load(path, scratch=folder)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    assert checkpoints.load(path).model is not None  # and what is loaded next stays in memory
    assert not mappings(tmp_path)


def test_the_second_graph_writes_and_copies_no_weight(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, sizes = checkpoints.load(path), list[int]()
    state = State(checkpoint.decoder, tiny.recipe(), 16)
    with WeightFile(tmp_path) as weights:
        first = export(Prefill(state, None), "prefill", weights)
        add = weights.add

        def counted(data: Any) -> Any:
            sizes.append(len(data))
            return add(data)

        monkeypatch.setattr(weights, "add", counted)
        second = Decode(state, None)
        exported = export(second, "decode", weights)
    assert largest_error(second, exported, tmp_path) < TOLERANCE
    products = [stored(ir.load(tmp_path / graph.file)) for graph in (first, exported)]
    assert products[0] == products[1]
    # Queries, keys and values are one, gate and up too.
    assert len(products[0]) >= 4 * checkpoint.decoder.num_layers
    assert not {size for _, size in products[0]} & set(sizes)


def stored(model: ir.Model) -> set[tuple[int, int]]:
    """Where the weights of products lie in the file, and how many bytes they have."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return {(t.offset or 0, t.nbytes) for t in tensors if isinstance(t, ir.ExternalTensor) and len(t.shape) == 2}


def external(folder: Path, written: list[np.ndarray]) -> Kept:
    def store(tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        written.append(tensor.numpy().copy())
        return ir.ExternalTensor("x", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name="", base_dir=folder)  # type: ignore[arg-type]

    return Kept(store)


def test_only_parameters_are_known_again(tmp_path: Path) -> None:
    """A constant that one graph made is gone when the next one makes its own, perhaps at the same address."""
    written: list[np.ndarray] = []
    kept, numbers = external(tmp_path, written), torch.zeros(4)
    for value in (1.0, 2.0):
        passing = TorchTensor(numbers.fill_(value))
        kept.of(passing, "whole", partial(list, [passing]))
    assert [array[0] for array in written] == [1.0, 2.0]
    weight = nn.Parameter(torch.ones(2, 3))
    for tensor in (weight, weight, nn.Parameter(weight.detach().mT)):
        named = TorchTensor(tensor)
        kept.of(named, "whole", partial(list, [named]))
    assert [array.shape for array in written[2:]] == [(2, 3), (3, 2)]
