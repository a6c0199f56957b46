"""A recipe: which stages run, with which knobs. A TOML file, checked on load."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engines.bundle import Adaptive
from engines.config import parse
from engines.errors import UserError
from engines.gate import Fallback, Gate
from engines.guard import Limits
from export.stages import budget, importance, merge, modality, perception, quantize, shorten
from export.stages.heads import Heads
from export.stages.positions import Positions
from export.stages.protect import Protect
from export.stages.stage import Stage

PRESETS = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Window:
    """The last tokens, in full precision.

    Attributes:
        share: W as a share of the bucket, clamped to `least` .. `most` tokens.
        recent: share of W that stays in the window when it is compacted, r; the other W - r slots are free for new
            tokens, so compaction costs something every W - r steps.
        chunk: tokens of a long prompt or a new turn that are read at once, T, at most; no more than are free.
        compact: whether a full window is compacted into the store; if not, generation ends when it is full.
        dtype: of the window's keys and values.
    """

    share: float = 1 / 64
    least: int = 8
    most: int = 64
    recent: float = 0.25
    chunk: int = 64
    compact: bool = True
    dtype: Literal["float32", "float16"] = "float16"

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"1 <= least <= most is needed, got {self.least} and {self.most}")
        if not (self.share >= 0 and 0 <= self.recent < 1):
            raise ValueError("share must be at least 0 and recent in [0, 1)")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        if self.compact and self.least < 2:
            raise ValueError("a window that is compacted needs at least 2 tokens")

    def sizes(self, bucket: int) -> tuple[int, int]:
        """W and r for prompts of up to `bucket` tokens."""
        window = min(max(round(self.share * bucket), self.least), self.most)
        return window, min(round(self.recent * window), window - 1, bucket - 1)  # a full prompt has no more to leave


@dataclass(frozen=True)
class Recipe:
    """One compression level. Each table of the TOML file is a stage; what is left out has the stage's defaults.

    Attributes:
        description: one line for `runtime info`.
        unknown: the recipe for images whose question is not known yet, a level of the same bundle; None is this one.
            What a question does not ask for can go once it is known. Before that, importance is a guess.
        perception: visual tokens that enter the language model.
        positions: how far RoPE reaches.
        heads: KV heads that become one.
        shorten: visual tokens that leave it between two of its layers.
        importance: score of a cached token.
        budget: slots per layer.
        modality: how a layer's slots are shared out between text and visual tokens.
        protect: tokens never dropped.
        merge: what becomes of the tokens that are not kept.
        quantize: how the store holds keys and values.
        gate, fallback: which of perception's buckets a request may take, by memory and by the prompt; left out: any.
        guard: what it may cost on held-out samples.
    """

    name: str
    description: str = ""
    unknown: str | None = None
    perception: perception.Methods = field(default_factory=perception.Diversity)
    positions: Positions = field(default_factory=Positions)
    heads: Heads = field(default_factory=Heads)
    shorten: shorten.Methods = field(default_factory=shorten.Whole)
    importance: importance.Methods = field(default_factory=importance.SnapKV)
    budget: budget.Methods = field(default_factory=budget.Cosine)
    modality: modality.Methods = field(default_factory=modality.Joint)
    protect: Protect = field(default_factory=Protect)
    merge: merge.Methods = field(default_factory=merge.Evict)
    quantize: quantize.Methods = field(default_factory=quantize.Int8)
    window: Window = field(default_factory=Window)
    gate: Gate | None = None
    fallback: Fallback | None = None
    guard: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in (self.name, self.unknown or self.name):
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"a recipe's name is letters, digits, '-' and '_', got {name!r}")
        if self.quantize.needs_mass and not self.importance.needs_mass:
            methods = f"[quantize] {self.quantize.method} and [importance] {self.importance.method}"
            raise ValueError(f"{methods}: the first needs attention to be counted, the second counts none")
        if (self.gate or self.fallback) and not self.perception.buckets:
            raise ValueError("gate and fallback choose among the buckets of perception: set  [perception] buckets")

    @property
    def needs_kinds(self) -> bool:
        """Whether a stage must tell text from visual tokens also in compaction."""
        return any(stage.needs_kinds for stage in self._stages())

    @property
    def needs_segments(self) -> bool:
        """Whether a stage must know which image or sentence a token of the prompt belongs to."""
        return any(stage.needs_segments for stage in self._stages())

    @property
    def needs_mass(self) -> bool:
        """Whether a stage reads the attention that tokens have received."""
        return any(stage.needs_mass for stage in self._stages())

    def _stages(self) -> list[Stage]:
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return [stage for stage in values if isinstance(stage, Stage)]

    @property
    def needs_samples(self) -> bool:
        """Whether something is measured on sample prompts before it is built."""
        return self.quantize.calibrated or self.heads.merge or self.budget.needs_entropy

    def adaptive(self, image_tokens: int) -> Adaptive | None:
        """What the manifest says of perception if the runtime decides how many tokens an image keeps."""
        if not self.perception.adaptive:
            return None
        counts, p = self.perception.counts(image_tokens), self.perception
        return Adaptive(counts, p.coverage, min(p.floor, counts[0]), p.quota, self.gate, self.fallback)

    def settings(self) -> dict[str, Any]:
        """Plain data for the manifest; `parse(Recipe, ...)` reads it back."""
        return dataclasses.asdict(self)


def own(checkpoint: Path) -> Path:
    """The folder of a checkpoint's own recipes."""
    return checkpoint / "recipes"


def find(name: str, checkpoint: Path | None) -> Path:
    """The file of a recipe called by name: tuned for this checkpoint and lying beside its weights, or the preset's."""
    beside = [own(checkpoint) / f"{name}.toml"] if checkpoint else []
    return next((path for path in beside if path.is_file()), PRESETS / f"{name}.toml")


def presets() -> list[str]:
    return sorted(p.stem for p in PRESETS.glob("*.toml"))


def load(name_or_file: str, checkpoint: Path | None = None) -> Recipe:
    """Load a recipe by its file or by name: the checkpoint's own (`CHECKPOINT/recipes/NAME.toml`), else the preset.

    Raises:
        UserError: no such recipe, no valid TOML, an unknown or ill-typed key.
    """
    path = Path(name_or_file)
    if path.suffix != ".toml":
        path = find(name_or_file, checkpoint)
        if not path.is_file():
            raise UserError(f"no recipe {name_or_file!r}: presets are {', '.join(presets())}, or give a .toml file")
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"recipe file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"recipe file {path} cannot be read: {error}") from error
    return parse(Recipe, {"name": path.stem, **data}, path.name)
