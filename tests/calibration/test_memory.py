"""What was measured is found again, and measured again where it is damaged; files are written whole."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from calibration.commands.options import as_json
from calibration.memory import Memory, check_writable, write
from engines.errors import UserError


@pytest.mark.parametrize("damaged", ["", "{", "null", "{}", "[1]", "[1, null]", "[" * 99999])
def test_what_is_damaged_is_measured_again(tmp_path: Path, damaged: str) -> None:
    measured: list[int] = []

    def measure() -> list[int]:
        measured.append(1)
        return [1, 2]

    def read(told: Any) -> tuple[int, int]:
        first, second = told
        return int(first), int(second)

    memory = Memory(tmp_path, "known")
    assert [memory(measure, read, "this") for _ in range(2)] == [(1, 2)] * 2
    assert (len(measured), memory.found) == (1, 1)
    (file,) = tmp_path.iterdir()
    file.write_text(damaged)
    assert memory(measure, read, "this") == (1, 2)
    assert (len(measured), memory.found) == (2, 1)
    assert json.loads(file.read_text()) == [1, 2]


def test_two_who_write_one_file_do_not_mix(tmp_path: Path) -> None:
    texts = ["a" * 300_000, "b" * 300_000]

    def write_often(text: str) -> None:
        for _ in range(20):
            write(tmp_path / "x", text)

    writers = [threading.Thread(target=write_often, args=[text]) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "x").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_where_nothing_can_be_written_is_found_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "x")
    assert not [*(tmp_path / "new").iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        check_writable(tmp_path / "file" / "x")
    with pytest.raises(UserError, match=r"^/proc/x cannot be written: No such file or directory: choose"):
        check_writable(Path("/proc/x"))


def test_json_has_null_for_what_is_no_number() -> None:
    told = {"a": [float("nan"), 1.0, (float("inf"), "nan")], "b": None}
    assert json.loads(as_json(told)) == {"a": [None, 1.0, [None, "nan"]], "b": None}
