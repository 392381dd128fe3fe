"""Figures for papers."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image

from reverie.api import UserError
from reverie.render import panels

X = np.array([0.0, 1.0, 2.0])
NAN = np.full(3, np.nan)


def line(name: str, offset: float = 0.0) -> panels.Line:
    return panels.Line(name, X, X + offset, X + offset - 0.1, X + offset + 0.1)


def test_panels_share_a_legend_and_colors():
    both = [
        panels.Panel(
            "a", [line("one"), line("two", 1)], {"published": 0.5}, "frames", "y"
        ),
        panels.Panel("b", [line("two")], {}, "frames", "y", (0.0, 1.0)),
    ]
    figure = panels.draw_panels(both, "Mean of episodes.")
    first, second = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "one",
        "two",
        "published",
    ]
    colors = {axis: [x.get_color() for x in axis.lines] for axis in figure.axes}
    assert colors[second][0] == colors[first][1]
    assert len({*colors[first]}) == 3
    assert len(first.collections) == 2  # bands
    assert second.get_ylim() == pytest.approx((-0.03, 1.03))
    assert first.get_xlim()[0] == 0
    assert figure.get_figwidth() == panels.FIGURE_WIDTHS[2]
    assert [text.get_text() for text in figure.texts] == ["Mean of episodes."]


def test_lines_without_a_band_and_with_one_point():
    single = panels.Line("one", X[:1], X[:1], NAN[:1], NAN[:1])
    figure = panels.draw_panels([panels.Panel("a", [single, line("b")], {}, "x", "y")])
    assert figure.axes[0].lines[0].get_marker() == "o"
    assert len(figure.axes[0].collections) == 1


def test_repeated_colors_have_another_line_style():
    lines = [line(str(i), i) for i in range(len(panels.COLORS) + 1)]
    axis = panels.draw_panels([panels.Panel("a", lines, {}, "x", "y")]).axes[0]
    first, last = axis.lines[0], axis.lines[-1]
    assert first.get_color() == last.get_color()
    assert first.get_linestyle() != last.get_linestyle()


def test_reference_lines_are_inside_the_panel():
    for value in (-0.2, 2.2):  # within the margin of the line and its band
        panel = panels.Panel("a", [line("b")], {"published": value}, "x", "y")
        low, high = panels.draw_panels([panel]).axes[0].get_ylim()
        assert low < value - 0.02
        assert high > value + 0.02


def test_long_names_have_their_own_row_in_the_legend():
    sizes = []
    for names in (("one", "two"), ("one " * 12, "two " * 12)):
        lines = [line(name) for name in names]
        figure = panels.draw_panels([panels.Panel("a", lines, {}, "x", "y")])
        figure.canvas.draw()
        legend = figure.legends[0].get_window_extent()
        assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
        sizes.append(figure.get_figheight())
    assert sizes[1] - sizes[0] == pytest.approx(panels.LEGEND_HEIGHT)


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (3, 3), (4, 2), (6, 3), (7, 4), (9, 3), (27, 5)]
)
def test_panels_fit_on_a_page(count, columns):
    figure = panels.draw_panels(
        [panels.Panel(str(i), [line("one")], {}, "x", "y") for i in range(count)]
    )
    assert len({axis.get_position().x0 for axis in figure.axes}) == columns
    assert figure.get_figwidth() <= 7.2
    assert figure.get_figheight() < 9


def test_intervals():
    rows = [
        panels.Interval("a", 0.4, 0.3, 0.5),
        panels.Interval("b", 0.8, np.nan, np.nan),
    ]
    panel = panels.IntervalPanel("", rows, "probability", 0.5, (0.0, 1.0))
    (axis,) = panels.draw_intervals([panel]).axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    xs = [list(map(float, x.get_xdata())) for x in axis.lines]
    assert xs == [[0.3, 0.5], [0.4], [0.8], [0.5, 0.5]]
    # caps would extend the bar beyond the interval, and beyond possible values
    assert axis.lines[0].get_solid_capstyle() == "butt"


def test_files_of_all_formats_are_the_same_every_time():
    figure = panels.draw_panels(
        [panels.Panel("a", [line("one")], {}, "frames", "score")]
    )
    image = Image.open(io.BytesIO(panels.encode_figure(figure, "png")))
    assert image.width == round(panels.FIGURE_WIDTHS[1] * panels.DPI)
    starts = {"svg": b"<?xml", "pdf": b"%PDF"}
    for format, start in starts.items():
        content = panels.encode_figure(figure, format)
        assert content.startswith(start)
        assert panels.encode_figure(figure, format) == content


def test_missing_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"Fix: pip install .*\[plot\]"):
        panels.draw_panels([panels.Panel("a", [line("one")], {}, "x", "y")])
