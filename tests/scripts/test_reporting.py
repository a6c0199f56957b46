"""Options that the measuring scripts share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import bench_batch
import bench_compact
from engines.errors import Parser, UserError
from reporting import json_option, new_file, write


@pytest.mark.parametrize(("script", "plots"), [(bench_compact, True), (bench_batch, False)])
def test_help_tells_of_a_plot_where_there_is_one(
    script: ModuleType, plots: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--json FILE keep all that was measured in FILE" in told
    assert (", its plot beside it" in told) == plots


def test_a_file_that_could_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    parser = Parser()
    json_option(parser)
    parser.add_argument("--out", type=new_file("--out"), default="a.json")
    assert parser.parse_args([]).json is None
    given = parser.parse_args(["--json", str(tmp_path / "b.json")])
    assert (given.json, given.out) == (tmp_path / "b.json", Path("a.json"))
    for option in ("--json", "--out"):
        with pytest.raises(UserError, match=f"is not a folder: make it, or give another {option}"):
            parser.parse_args([option, str(tmp_path / "nowhere" / "b.json")])
    with pytest.raises(UserError, match=r"^/proc/b\.json cannot be written: No such file or directory$"):
        write(Path("/proc/b.json"), "{}")
