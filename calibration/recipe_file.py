"""A recipe as a TOML file that a person reads: what it says otherwise than the defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

from export.recipe import Recipe


def text(recipe: Recipe, head: list[str]) -> str:
    """The file, with a comment at its head."""
    import tomli_w

    return "".join(f"# {line}".rstrip() + "\n" for line in head) + tomli_w.dumps(settings(recipe))


def settings(recipe: Recipe) -> dict[str, Any]:
    """What `export.recipe.load` reads back: all settings but those that are their stage's default."""
    default = Recipe(recipe.name)
    own, plain = ({f.name: _plain(getattr(r, f.name)) for f in dataclasses.fields(r)} for r in (recipe, default))
    return {name: value for name, value in own.items() if name == "name" or value != plain[name]}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    told = {}
    for f in dataclasses.fields(value):
        own = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if own is not None and (f.name == "method" or own != default):
            told[f.name] = _plain(own)
    return told
