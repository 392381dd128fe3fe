"""Figures for papers, drawn with Matplotlib: panels of lines with bands, or intervals.

The style is set here for all figures: sizes in inches for a column (one panel) or a
page (several), 8 pt text, colors that are distinguishable with color blindness, and
another line style where colors repeat.
"""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from reverie.api import UserError
from reverie.plugins import install_command
from reverie.render.figure import AXIS, BLACK, COLORS, GRAY, GRID, format_tick

P = ParamSpec("P")
T = TypeVar("T")

FORMATS = ("png", "svg", "pdf")
DPI = 300
FIGURE_WIDTHS = {1: 3.4, 2: 5.4, 3: 7.2, 4: 7.2, 5: 7.2}
"""Width of a figure in inches, by its number of columns."""
PANEL_HEIGHTS = {1: 2.0, 2: 2.0, 3: 2.0, 4: 1.7, 5: 1.4}
"""Height of a panel in inches, by the number of columns."""
ROW_HEIGHT = 0.3
"""Height of a row in a panel of intervals, in inches."""
LEGEND_HEIGHT, CAPTION_HEIGHT = 0.2, 0.15
"""Heights of a line of the legend and of a line of the caption, in inches."""
SAMPLE_WIDTH, LETTER_WIDTH = 0.4, 0.063
"""Widths of the line sample and of a letter in the legend, in inches."""
LINE_STYLES = ("-", "--", ":", "-.")


class Line(NamedTuple):
    """A line with a band; NaN where there is no band."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Panel(NamedTuple):
    """Lines over a common x axis, and horizontal reference lines by name."""

    title: str
    lines: Sequence[Line]
    references: dict[str, float]
    x_label: str
    y_label: str
    y_range: tuple[float, float] | None = None
    """Range of the y axis; None for the range of the lines."""


class Interval(NamedTuple):
    """A value with its interval; NaN bounds where there is none."""

    name: str
    value: float
    low: float
    high: float


class IntervalPanel(NamedTuple):
    """One row per interval, and a vertical reference line."""

    title: str
    rows: Sequence[Interval]
    x_label: str
    reference: float | None = None
    x_range: tuple[float, float] | None = None


def _styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function, so that it is called with the style of all figures."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _style():
            return function(*args, **kwargs)

    return call


@_styled
def draw_panels(panels: Sequence[Panel], caption: str = "") -> Any:
    """Draw panels in rows of up to five, with one legend for all of them."""
    names = [*dict.fromkeys(line.name for panel in panels for line in panel.lines)]
    references = [*dict.fromkeys(name for panel in panels for name in panel.references)]
    columns = _panel_columns(len(panels))
    height = PANEL_HEIGHTS[columns]
    figure, axes = _make_figure(
        len(panels), columns, height, [*names, *references], caption
    )
    handles: dict[str, Any] = {}
    for i, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        for line in panel.lines:
            handles[line.name] = _draw_line(axis, line, names.index(line.name))
        for name, value in panel.references.items():
            index = len(names) + references.index(name)
            handles[name] = axis.axhline(
                value, color=_color(index), linestyle=(0, (4, 2)), linewidth=1
            )
        # panels in narrow columns have an x label only in the lowest row
        is_labeled = i + columns >= len(panels) or columns < 4
        _style_axis(axis, panel.title, panel.x_label if is_labeled else "")
        if i % columns == 0 or panel.y_label != panels[i - 1].y_label:
            axis.set_ylabel(_wrap_label(panel.y_label, height))
        axis.set_xlim(left=min([0.0, *(float(line.x[0]) for line in panel.lines)]))
        if panel.y_range is not None:
            low, high = panel.y_range
            margin = 0.03 * (high - low)
            axis.set_ylim(low - margin, high + margin)
        else:
            # `axhline` adds no margin around values that are within the range
            axis.autoscale_view(scalex=False)
        axis.yaxis.set_major_formatter(_format_tick)
        axis.yaxis.set_major_locator(_ticks(5))
    _draw_legend(figure, {name: handles[name] for name in [*names, *references]})
    return figure


@_styled
def draw_intervals(panels: Sequence[IntervalPanel], caption: str = "") -> Any:
    """Draw panels of values with intervals, with the same rows in each panel."""
    rows = max(len(panel.rows) for panel in panels)
    height = 0.65 + ROW_HEIGHT * rows  # 0.65 inches for title and x axis
    columns = min(len(panels), 2)
    figure, axes = _make_figure(len(panels), columns, height, [], caption)
    for i, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        for row, (_, value, low, high) in enumerate(panel.rows):
            color = _color(row)
            if math.isfinite(low):
                # without caps, which would make the interval longer
                style: Any = {"linewidth": 4, "solid_capstyle": "butt", "alpha": 0.4}
                axis.plot([low, high], [row, row], color=color, **style)
            axis.plot([value], [row], "o", color=color, markersize=4, clip_on=False)
        if panel.reference is not None:
            axis.axvline(panel.reference, color=_rgb(AXIS), linewidth=0.8)
        if panel.x_range is not None:
            axis.set_xlim(*panel.x_range)
        _style_axis(axis, panel.title, panel.x_label)
        names = [row.name if i % columns == 0 else "" for row in panel.rows]
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(rows - 0.5, -0.5)
    return figure


@_styled
def encode_figure(figure: Any, format: str) -> bytes:
    """Return the content of a PNG, SVG or PDF file; the same for equal figures."""
    buffer = io.BytesIO()
    dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(buffer, format=format, dpi=DPI, metadata=dates.get(format))
    return buffer.getvalue()


def _make_figure(
    count: int, columns: int, height: float, legend: Sequence[str], caption: str
) -> tuple[Any, list[Any]]:
    """Return a figure with room for legend and caption, and the axes of its panels.

    `height` is that of a panel in inches; `legend` are the names of its entries.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(count / columns)
    width = FIGURE_WIDTHS[columns]
    legend_rows = math.ceil(len(legend) / _legend_columns(width, legend))
    legend_height = LEGEND_HEIGHT * legend_rows
    lines = _wrap(caption, width)
    caption_height = CAPTION_HEIGHT * len(lines)
    size = (width, rows * height + legend_height + caption_height)
    figure: Any = Figure(size, layout="constrained")
    area = (
        0,
        caption_height / size[1],
        1,
        1 - (caption_height + legend_height) / size[1],
    )
    figure.get_layout_engine().set(rect=area, w_pad=0.06, h_pad=0.05)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[count:]:
        axis.remove()
    for i, text in enumerate(reversed(lines)):
        figure.text(
            0.02,
            CAPTION_HEIGHT * (i + 0.3) / size[1],
            text,
            fontsize=6.5,
            color=_rgb(GRAY),
            in_layout=False,
        )
    return figure, [*axes.flat[:count]]


def _draw_line(axis: Any, line: Line, index: int) -> Any:
    """Draw a line and its band; return the handle for the legend."""
    color = _color(index)
    style = LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)]
    if np.isfinite(line.low).any():
        axis.fill_between(
            line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0
        )
    marker = "o" if len(line.x) == 1 else None
    (handle,) = axis.plot(
        line.x, line.y, style, color=color, marker=marker, markersize=3, linewidth=1.3
    )
    return handle


def _style_axis(axis: Any, title: str, x_label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x_label)
    axis.xaxis.set_major_formatter(_format_tick)
    axis.xaxis.set_major_locator(_ticks(4))


def _ticks(count: int) -> Any:
    """Return a locator of ticks at round values, with up to `count` intervals."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)


def _format_tick(value: float, position: int | None) -> str:
    return format_tick(value).replace("-", "\N{MINUS SIGN}")


def _panel_columns(count: int) -> int:
    """Return a number of columns that leaves few empty places in the last row."""
    if count > 12:
        return 5
    return {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}.get(count, 4)


def _legend_columns(width: float, names: Sequence[str]) -> int:
    """Return how many entries of a legend fit into a row."""
    longest = max(map(len, names), default=0)
    return max(1, int(width / (SAMPLE_WIDTH + LETTER_WIDTH * longest)))


def _draw_legend(figure: Any, handles: dict[str, Any]) -> None:
    width = figure.get_figwidth()
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, 1),
        borderaxespad=0.1,
        ncols=min(len(handles), _legend_columns(width, list(handles))),
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
    ).set_in_layout(False)


def _wrap_label(label: str, height: float) -> str:
    """Break the label of a y axis that is longer than a panel of this height."""
    return textwrap.fill(
        label,
        max(8, int(16 * (height - 0.6))),  # 16 letters per inch of the axis
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrap(caption: str, width: float) -> list[str]:
    """Return the lines of a caption, with 20 letters per inch."""
    space = "\N{NO-BREAK SPACE}"  # keeps a number and its % on the same line
    lines = textwrap.wrap(caption.replace(" %", f"{space}%"), int(width * 20))
    return [line.replace(space, " ") for line in lines]


def _color(index: int) -> tuple[float, ...]:
    return _rgb(COLORS[index % len(COLORS)])


def _rgb(color: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(value / 255 for value in color)


def _style() -> Any:
    """Return the context in which figures are made and written."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UserError(
            "Figures need Matplotlib, which is not installed.\n"
            f"  Fix: {install_command('plot')}"
        ) from None
    return mpl.rc_context(
        {
            "font.size": 8,
            "axes.titlesize": 8,
            "axes.labelsize": 8,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "legend.fontsize": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": _rgb(AXIS),
            "axes.labelcolor": _rgb(GRAY),
            "axes.titlecolor": _rgb(BLACK),
            "text.color": _rgb(BLACK),
            "xtick.color": _rgb(AXIS),
            "ytick.color": _rgb(AXIS),
            "xtick.labelcolor": _rgb(GRAY),
            "ytick.labelcolor": _rgb(GRAY),
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": _rgb(GRID),
            "grid.linewidth": 0.6,
            "axes.linewidth": 0.6,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "svg.hashsalt": "reverie",
            "pdf.fonttype": 42,  # text that can be edited
            "path.simplify": True,
        }
    )
