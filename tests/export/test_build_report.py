"""`report.html` in a bundle: made by default, hashed like every other file, and no reason for a build to fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines import bundle
from engines.bundle import Bundle
from engines.errors import UserError
from export import build

REPORT = "report.html"


def test_a_bundle_has_a_report_that_is_sealed_with_it(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    assert REPORT in bundle.read(copy).manifest.files
    text = (copy / REPORT).read_text()
    assert "<h2" in text
    assert str(tmp_path.parent) not in text  # a bundle goes elsewhere: it tells nobody where it was made
    (copy / REPORT).write_text(text.replace("<h2", "<h3", 1))
    with pytest.raises(UserError, match=f"{REPORT} is damaged"):
        bundle.read(copy)


def test_it_tells_what_the_guard_found(demo_bundle: Bundle) -> None:
    text = demo_bundle.file(REPORT).read_text()
    verdicts = [v for level in demo_bundle.manifest.levels.values() for v in level.guard.verdicts[-1:]]
    assert len(verdicts) >= 3
    for verdict in verdicts:
        assert f"{verdict.recipe} holds" in text
        assert f"{verdict.perplexity_change:+.2f} %" in text


def test_without_samples_or_without_wanting_it_there_is_none(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(tiny_path, tmp_path / "bare", ignore=shutil.ignore_patterns("samples"))
    recipe = tmp_path / "plain.toml"
    recipe.write_text('[quantize]\nmethod = "float16"\n')
    out = tmp_path / "bundle"
    arguments = ["--out", str(out), "--recipe", str(recipe), "--buckets", "48", "--kernels", "never", "--jobs", "1"]
    assert build.main([str(bare), *arguments]) == 0
    assert "without a report: " in (said := capsys.readouterr().out)
    assert "samples.jsonl does not exist" in " ".join(said.split())
    assert REPORT not in bundle.read(out).manifest.files
    assert build.main([str(tiny_path), *arguments, "--no-report"]) == 0
    assert "report" not in capsys.readouterr().out
    assert REPORT not in bundle.read(out).manifest.files
