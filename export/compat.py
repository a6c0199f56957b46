"""What differs between versions of transformers, in one place."""

from __future__ import annotations

import transformers
from packaging.version import Version

from engines.errors import UserError

OLDEST, TESTED = "5.24", "5.24.0"


def check_transformers() -> None:
    """Raises `UserError` for a version of transformers whose modelling code this exporter was never run with."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise UserError(
            f"transformers {transformers.__version__} is too old (its checkpoints name weights differently): "
            f"pip install 'transformers>={OLDEST}' (tested with {TESTED})"
        )
