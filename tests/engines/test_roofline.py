"""What nvcc gives the kernels, and the floors in engines/plugins/ROOFLINE.md."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import numpy as np
import pytest

from engines.errors import UserError
from engines.plugins import resources, roofline
from engines.plugins.cuda_library import ARCHITECTURES, find_nvcc
from engines.plugins.host_library import kernels
from tests.engines.attention_inputs import in_types, inputs
from tests.engines.simt import PLUGINS

TEXT = (PLUGINS / "ROOFLINE.md").read_text()

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7_GLOBAL11attend_partILj4ELb1EEEvNS_4PlanE' for 'sm_87'
ptxas info    : Function properties for _ZN7_GLOBAL11attend_partILj4ELb1EEEvNS_4PlanE
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 20608 bytes smem, 808 bytes cmem[0]
ptxas info    : Compile time = 1.2 ms
ptxas info    : Compiling entry function '_ZN7_GLOBAL11gather_rowsENS_4PlanEPKljj' for 'sm_87'
ptxas info    : Function properties for _ZN7_GLOBAL11gather_rowsENS_4PlanEPKljj
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 500 bytes cmem[0]
"""


def test_ptxas_output_is_read() -> None:
    first, second = resources.parse(PTXAS)
    assert first == resources.Resources("attend_part<4, true>", "sm_87", 168, 20608, 16, 32)
    assert second == resources.Resources("gather_rows", "sm_87", 40, 0, 0, 0)
    assert [first.warps, second.warps] == [12, 48]  # three blocks of four warps; what sm_87 holds of few registers


def recorded() -> dict[tuple[str, str], int]:
    """Warps a multiprocessor, by kernel and architecture, in the table of ROOFLINE.md."""
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", TEXT, re.MULTILINE)
    return {
        (kernel, architecture): int(cell.split("/")[2])
        for kernel, cells in rows
        for architecture, cell in zip(ARCHITECTURES, cells.split(" | "), strict=True)
    }


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=[pytest.mark.slow] * (each != "sm_87")) for each in ARCHITECTURES]
)
def test_nvcc_compiles_every_kernel_without_spills_and_within_its_budget(architecture: str) -> None:
    try:
        find_nvcc()
    except UserError as error:
        pytest.skip(str(error))
    found = [each for source in kernels() for each in resources.measure(source, architecture)]
    budget = recorded()
    assert {(each.kernel, each.architecture) for each in found} == {key for key in budget if key[1] == architecture}
    for each in found:
        assert (each.stack, each.spilled) == (0, 0), each
        assert each.warps >= budget[each.kernel, architecture], each


def test_the_tables_are_what_the_command_prints() -> None:
    for table in (roofline.attention_table(), roofline.attention_table(group=1), roofline.topk_table()):
        assert table in TEXT


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_those_of_inputs_and_output(bits: int) -> None:
    shape: dict[str, Any] = {
        "batch": 1,
        "kv_heads": 2,
        "group": 3,
        "queries": 2,
        "slots": 40,
        "window": 7,
        "head_dim": 64,
    }
    x = inputs(np.random.default_rng(0), **shape, filled=1.0, bits=(bits, bits))
    x = in_types(x, "float16", ("float16", "float16"), ("float16", "float16"))
    moved = sum(each.nbytes for each in (*x.values(), x["query"]))
    shape.pop("batch")
    assert roofline.attention(bits=bits, **shape).bytes == moved


def test_bandwidths_are_those_of_the_planner() -> None:
    with (PLUGINS.parents[1] / "calibration" / "devices.toml").open("rb") as file:
        stated = {each["name"].split(",")[0]: each["bandwidth"]["value"] for each in tomllib.load(file).values()}
    for device in roofline.DEVICES:
        name = device.name if device.name in stated else f"Jetson {device.name}"
        assert stated[name] == device.bandwidth
