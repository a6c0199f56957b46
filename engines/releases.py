"""Which releases of other packages are taken: what was never run is refused in one line, before anything is imported.

Standard library only: it says what is wrong where the rest cannot be imported.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from engines.errors import UserError

# As pyproject.toml states them, which pip reads. 1.23 of ONNX Runtime is also the last for Python 3.10.
OLDEST = {
    "onnx": "1.20",
    "onnx-ir": "0.1.16",
    "onnxruntime": "1.23",
    "onnxscript": "0.6",
    "torch": "2.13",
    "transformers": "5.24",
}
# Packages that bring a module of another's name.
ALSO = {"onnxruntime": ("onnxruntime-gpu",)}


def installed(name: str) -> str | None:
    """The release of a package; None: it is not installed."""
    for package in (name, *ALSO.get(name, ())):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check(name: str, found: str | None) -> None:
    """Raises `UserError` if `found`, a release of one of `OLDEST`, is older than that."""
    if found is not None and _numbers(found) < _numbers(OLDEST[name]):
        packages = " or ".join(f"'{package}>={OLDEST[name]}'" for package in (name, *ALSO.get(name, ())))
        raise UserError(f"{name} {found} is too old: pip install {packages}")


def check_installed() -> None:
    """Look at all that building takes. What is not installed is told where it is imported.

    Raises:
        UserError: the first that is too old.
    """
    for name in OLDEST:
        check(name, installed(name))


def _numbers(release: str) -> list[int]:
    """Of `2.13.0a0+cpu`: 2, 13, 0."""
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
