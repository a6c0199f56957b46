"""Plots as inline SVG, by matplotlib, in the colors of the page around them, be it light or dark."""

from __future__ import annotations

import io
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

INK = "#010203"  # stands for the page's text color while matplotlib draws
COLORS = ("#3b82f6", "#f08c00", "#12a37a", "#d6409f", "#8b5cf6", "#e5484d", "#b08900", "#0aa5c2")  # on white and black
REFERENCE: dict[str, Any] = {"linestyle": "--", "color": INK, "alpha": 0.7}
WIDTH, HEIGHT = 4.2, 2.7  # inches; small, so that letters stay readable on a phone


def svg(draw: Callable[[Axes], None], name: str, height: float = HEIGHT) -> str:
    """What `draw` draws on empty axes.

    Args:
        name: no other plot of the page has it: the names of the SVG's parts are made from it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the first time it tells how it looks for fonts

    style: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
        "axes.prop_cycle": f"cycler('color', {COLORS})",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": 9,
        "grid.alpha": 0.2,
        "grid.color": INK,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "lines.markersize": 4,
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # the same bytes every time
        "text.parse_math": False,  # names of levels and suites are text
    }
    with matplotlib.rc_context(style), io.StringIO() as out:
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1).replace("<svg", '<svg role="img"', 1)


def by_layer(
    series: Mapping[str, NDArray], unit: str, name: str, reference: Mapping[str, NDArray] | None = None
) -> str:
    """Lines over the layers; of [layers, heads] the mean, in a band from the lowest head to the highest.

    Args:
        series: [layers], [layers, heads] or [layer_pairs, ...]; NaN where nothing was measured.
        reference: what they are compared with, dashed, [layers].
    """
    reference = reference or {}

    def draw(axes: Axes) -> None:
        for label, values in series.items():
            rows = values.reshape(len(values), -1)
            layers, known = np.arange(len(rows)), ~np.isnan(rows).all(axis=1)
            layers, rows = layers[known], rows[known]
            (line,) = axes.plot(layers, np.nanmean(rows, axis=1), marker="o", label=label)
            if rows.shape[1] > 1:
                ends = np.nanmin(rows, axis=1), np.nanmax(rows, axis=1)
                axes.fill_between(layers, *ends, color=line.get_color(), alpha=0.15, linewidth=0)
        for label, values in reference.items():
            axes.plot(values, **REFERENCE, label=label)
        axes.set(xlabel="layer", ylabel=unit)
        whole_numbers(axes.xaxis)
        finish(axes, len(series) + len(reference) > 1)
        if all(np.nanmin(values) >= 0 for values in series.values()):
            axes.set_ylim(bottom=0)

    return svg(draw, name)


def finish(axes: Axes, legend: bool) -> None:
    axes.grid()
    axes.set_axisbelow(True)
    if legend:
        axes.figure.legend(loc="outside upper center", ncols=2, fontsize=8)


def whole_numbers(axis: Axis) -> None:
    """Ticks at layers and heads, not between them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def logarithmic(axes: Axes) -> None:
    """x by its logarithm, with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def by_head(values: NDArray, unit: str, name: str, ylabel: str = "layer", xlabel: str = "query head") -> str:
    """A cell a layer and head, [layers, heads]; empty where nothing was measured."""

    def draw(axes: Axes) -> None:
        # One pixel a cell in the file, however large it is drawn.
        image = axes.imshow(values, aspect="auto", interpolation="none", cmap="viridis")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        for axis in (axes.xaxis, axes.yaxis):
            whole_numbers(axis)
        bar = axes.figure.colorbar(image, label=unit)
        bar.outline.set_visible(False)
        axes.spines[:].set_visible(False)

    return svg(draw, name, height=min(max(HEIGHT, 0.13 * len(values) + 0.7), 2 * HEIGHT))


def dots(points: Mapping[str, tuple[NDArray, NDArray]], xlabel: str, ylabel: str, name: str, log: bool = False) -> str:
    """Dots (x, y) of several sorts.

    Args:
        log: x by its logarithm.
    """

    def draw(axes: Axes) -> None:
        for number, (label, (x, y)) in enumerate(points.items()):
            # Many dots are pixels in the file: each of them drawn would be more bytes than all the rest.
            style: dict[str, Any] = {"marker": "os^DvPX*"[number % 8], "alpha": 0.6, "rasterized": x.size > 200}
            axes.plot(x.ravel(), y.ravel(), linestyle="", label=label, **style)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        finish(axes, len(points) > 1)
        if log:
            logarithmic(axes)

    return svg(draw, name)


def curves(lines: Mapping[str, Sequence[tuple[float, float, float, str]]], xlabel: str, ylabel: str, name: str) -> str:
    """Lines through points (x, y, error, name), x by its logarithm; the first line's points bear their names."""

    def draw(axes: Axes) -> None:
        for number, (label, points) in enumerate(lines.items()):
            x, y, error, names = zip(*sorted(points), strict=True)
            axes.errorbar(x, y, error, marker="o", capsize=2, label=label)
            for a, b, text in zip(x, y, names, strict=True) if number == 0 else ():
                axes.annotate(text, (a, b), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.margins(x=0.12, y=0.15)
        finish(axes, len(lines) > 1)
        logarithmic(axes)

    return svg(draw, name)


def bars(
    stacks: Mapping[str, Mapping[str, float]], unit: str, name: str, reference: Mapping[str, float] | None = None
) -> str:
    """A bar a name, of stacked parts.

    Args:
        reference: what they are compared with, dashed.
    """
    reference = reference or {}
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))

    def draw(axes: Axes) -> None:
        left = np.zeros(len(stacks))
        # Colors from the far end: those at the near one are levels' lines in the plots beside it.
        for part, color in zip(parts, itertools.cycle(reversed(COLORS)), strict=False):
            sizes = np.array([stack.get(part, 0.0) for stack in stacks.values()])
            axes.barh(list(stacks), sizes, height=0.6, left=left, label=part, color=color)
            left += sizes
        for label, size in reference.items():
            axes.axvline(size, **REFERENCE, label=label)
        axes.invert_yaxis()
        axes.set(xlabel=unit)
        finish(axes, len(parts) + len(reference) > 1)
        axes.grid(visible=False, axis="y")

    return svg(draw, name, height=0.3 * len(stacks) + 1.1)
