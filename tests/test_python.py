"""The lean runtime does with Python 3.10, JetPack 6.2's: said by vermin, which knows what came with which version."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def vermin(*paths: Path) -> subprocess.CompletedProcess[str]:
    line = [
        str(Path(sys.executable).with_name("vermin")),
        "--no-tips",
        "--eval-annotations",
        "-vvv",
        "-t=3.10-",
        *map(str, paths),
    ]
    return subprocess.run(line, capture_output=True, text=True)


def test_the_runtime_and_its_engines_need_no_more_than_3_10() -> None:
    done = vermin(ROOT / "engines", ROOT / "runtime")
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "3.11" in line or "3.12" in line]
    assert "Minimum required versions: 3.10" in done.stdout


def test_what_is_newer_is_found(tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text("import hashlib\nhashlib.file_digest(open('x', 'rb'), 'sha256')\n")
    done = vermin(tmp_path)
    assert done.returncode != 0
    assert "hashlib.file_digest" in done.stdout
