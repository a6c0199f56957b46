"""The whole page from what was measured; a part that was not measured names the command that would."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from calibration import samples as sampling
from calibration import survey
from calibration.attention_map import AttentionMap
from calibration.memory import write
from calibration.report import FILE, SAMPLES, attention, pictures
from calibration.report import measured as files
from calibration.report.budget import budget
from calibration.report.guard import GUARD, guard
from calibration.report.page import Section, render
from calibration.report.recipes import recipes
from engines.errors import UserError, one_line
from engines.guard import Verdict
from export.checkpoint import Checkpoint
from export.pipeline import Prepared
from export.recipe import Recipe

PACKAGES = ("torch", "transformers", "matplotlib")


def write_into(
    folder: Path,
    checkpoint: Checkpoint,
    levels: Mapping[str, Recipe],
    prepared: Mapping[str, Prepared],
    samples: str | Path | None,
    verdicts: Sequence[Verdict] = (),
    task: Callable[[str, int], Callable[[], None]] = lambda what, total: lambda: None,
) -> str:
    """Put the page into a bundle's folder; returns why it is not there, if it is not.

    Args:
        samples: their folder; None: the checkpoint's.
        task: called with what is about to be measured and the number of samples; what it returns, once a sample.
    """
    try:
        known = sampling.of(checkpoint.path, samples, text_only=True)
        few = spread_out(known, SAMPLES)
        found = survey.measure(checkpoint, few, progress=task("looking at attention", len(few)))
        write(folder / FILE, report(checkpoint, levels, prepared, known, found, figures(verdicts)))
    except (UserError, ImportError) as error:  # a bundle is none the worse without it
        return one_line(error)
    return ""


def spread_out(samples: Sequence[sampling.Sample], most: int) -> list[sampling.Sample]:
    """So many of the samples, spread evenly."""
    return [samples[len(samples) * i // most] for i in range(most)] if most < len(samples) else list(samples)


def report(
    checkpoint: Checkpoint,
    levels: Mapping[str, Recipe],
    prepared: Mapping[str, Prepared],
    samples: Sequence[sampling.Sample],
    found: AttentionMap,
    measured: Sequence[Section],
) -> str:
    """The page.

    Args:
        prepared: what each level makes of the checkpoint's decoder, as `prepare` gives it.
        samples: some of their images are drawn.
        found: the checkpoint's attention map.
        measured: as `figures` gives it.
    """
    drawn = pictures.drawable(checkpoint, samples)
    return render(
        f"{checkpoint.path.resolve().name}: what compression does to it",
        _facts(checkpoint, found),
        found.facts.warnings,
        [
            budget(checkpoint, levels, prepared),
            *measured,
            pictures.attention(drawn),
            pictures.selection(checkpoint, drawn),
            pictures.eviction(checkpoint, drawn, levels, prepared),
            attention.by_depth(found),
            attention.by_head(found),
            attention.by_token(found),
            attention.by_cache(found),
            recipes(levels),
        ],
    )


def figures(
    verdicts: Sequence[Verdict] = (),
    accuracy: Path | None = None,
    latency: Sequence[Path] = (),
    trials: Path | None = None,
) -> list[Section]:
    """What other commands have measured.

    Args:
        verdicts: of the guard.
        accuracy, trials: files of scripts/accuracy.py and of `python -m calibration tune`.
        latency: files of scripts/compare_latency.py.

    Raises:
        UserError: a file is none of theirs.
    """
    return [
        guard(verdicts) if verdicts else _missing("Guard", GUARD, "--guard guard.json"),
        files.accuracy(accuracy)
        if accuracy
        else _missing("Accuracy against bytes", files.ACCURACY, "--accuracy accuracy.json"),
        files.latency(latency) if latency else _missing("Latency", files.LATENCY, "--latency latency-LEVEL.json"),
        files.trials(trials) if trials else _missing("Search for a recipe", files.TUNE, "--trials trials.json"),
    ]


def _missing(title: str, command: str, option: str) -> Section:
    """Names, not paths: the page may leave this machine."""
    first = command.format(checkpoint="CHECKPOINT", bundle="BUNDLE", level="LEVEL")
    return Section(title, missing=f"{first}\npython -m calibration report CHECKPOINT {option}")


def _facts(checkpoint: Checkpoint, found: AttentionMap) -> list[str]:
    facts, sizes = found.facts, found.facts.sizes
    parameters = sum(p.numel() for p in checkpoint.model.parameters())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    signals = ", ".join(f"{n.replace('_', ' ')} {v:.2f}" for n, v in facts.signals.items() if v is not None)
    return [
        f"{checkpoint.model_type}, {parameters / 1e6:.1f} M parameters: {sizes.layers} layers of {sizes.heads} query "
        f"and {sizes.kv_heads} KV heads of {sizes.head_dim}; "
        + (f"{checkpoint.image_tokens} tokens an image." if checkpoint.takes_images else "text alone."),
        f"Attention measured on {facts.samples} samples, {facts.with_images} with images: {facts.tokens} tokens, "
        f"{facts.steps} steps. By it a model of {facts.kind} ({signals}).",
        f"Made with {versions}.",
    ]
