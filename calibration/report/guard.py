"""The guard's verdicts: figures beside their limits, a table a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibration import guard_table
from calibration.report.page import Section, Table
from engines.config import parse, read_json
from engines.errors import UserError
from engines.guard import Verdict

GUARD = "python -m calibration guard {checkpoint} --recipe NAME --json > guard.json"


def guard(verdicts: Sequence[Verdict]) -> Section:
    tables, told = [], []
    for verdict in verdicts:
        *notes, end = guard_table.notes(verdict)
        when = "; the question came after the compression" if verdict.later else ""
        tables.append(Table(f"{end}{when}. {'; '.join(notes)}.", guard_table.figures(verdict)))
        told += verdict.warnings
    warnings = "".join(f" Warning: {warning}." for warning in dict.fromkeys(told))
    return Section(
        "Guard",
        "Each recipe beside the uncompressed model on held-out samples: what the last layers look at, what is said of "
        f"the next token, the answers, and three ways to fail.{warnings}",
        tables=tables,
    )


def read(file: Path) -> list[Verdict]:
    """The verdicts that `python -m calibration guard --json` wrote.

    Raises:
        UserError: no such file.
    """
    data = read_json(file)
    if not isinstance(data, dict) or "verdicts" not in data:
        raise UserError(f"{file} holds no verdicts: write it by  {GUARD.format(checkpoint='CHECKPOINT')}")
    return parse(list[Verdict], data["verdicts"], str(file))
