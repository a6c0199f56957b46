"""What a benchmark draws: panels of lines, or of bars, as one SVG that is the same bytes every time."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 5.2, 4.4  # of a panel, inches
COLUMNS = 2  # of the legend, under each panel
BAR = 0.28  # inches that a bar takes
OURS = "ours"  # names that begin so are drawn solid and in colour, others dashed and in grey


@dataclass(frozen=True)
class Panel:
    """Lines of points, or bars.

    Attributes:
        x, y: what the axes tell; without `x` every name has one number, and a bar that is `y` long.
        lines: name -> its points [x, y].
        log: both axes are logarithmic.
    """

    title: str
    x: str
    y: str
    lines: dict[str, list[list[float]]]
    log: bool = False


def draw(panels: Sequence[Panel]) -> str:
    """An SVG of them side by side, which have one legend."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = max((len(panel.lines) for panel in panels if not panel.x), default=0)
    figure = Figure(
        figsize=(WIDTH * len(panels), max(HEIGHT * any(p.x for p in panels), 1 + BAR * bars)), layout="constrained"
    )
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    handles: dict[str, Any] = {}
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(True, which="both", alpha=0.2)
        if panel.x:
            axes.set_ylabel(panel.y)
            for name, points in panel.lines.items():
                handles[name] = _line(axes, name, points, names.index(name))
            axes.set_xlabel(panel.x)
            if panel.log:
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
        else:
            peers = [not name.startswith(OURS) for name in panel.lines]
            colors = ["C7" if peer and not all(peers) else "C0" for peer in peers]
            axes.barh([*panel.lines], [points[0][-1] for points in panel.lines.values()], color=colors)
            axes.invert_yaxis()
            axes.set_xlabel(panel.y)
            axes.tick_params("y", labelsize=8)
    if handles:
        columns = min(COLUMNS * len(panels), len(handles))
        figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns, fontsize=7)
    with io.StringIO() as out, matplotlib.rc_context({"svg.hashsalt": "unicache"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
        return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)


def _line(axes: Any, name: str, points: list[list[float]], place: int) -> Any:
    style = "-o" if name.startswith(OURS) else "--s"
    settings = {"color": f"C{place % 10}", "alpha": 1 if place < 10 else 0.5, "markersize": 4, "linewidth": 1.2}
    x, y = zip(*sorted(points), strict=True)
    (line,) = axes.plot(x, y, style, label=name, **settings)
    return line
