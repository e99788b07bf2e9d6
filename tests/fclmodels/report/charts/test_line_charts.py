"""Lines and bands as paths whose coordinates are computed by hand."""

from fclmodels.report.charts.axes import BOTTOM, LEFT, RIGHT, TOP
from fclmodels.report.charts.line_charts import Series, draw_line_chart


def test_a_line_keeps_its_place_and_breaks_where_values_are_missing():
    line = Series(2, "fot", [1, 2, 3, 4], [100.0, 0.0, None, 50.0], [0.0, 50.0, None, None])
    curve = draw_line_chart("t", [line], "x", "y", [0, 50, 100]).curves[0]
    third = (RIGHT - LEFT) / 3
    assert curve.path == f"M{LEFT:.1f},{TOP:.1f} L{LEFT + third:.1f},{BOTTOM:.1f} M{RIGHT:.1f},{(TOP + BOTTOM) / 2:.1f}"
    # the band is cut at the plot's edge: 100 +- 0, then 0 +- 50 reaches from 50 down to 0
    middle = (TOP + BOTTOM) / 2
    right = LEFT + third
    assert (
        curve.band
        == f"M{LEFT:.1f},{TOP:.1f} L{right:.1f},{middle:.1f} L{right:.1f},{BOTTOM:.1f} L{LEFT:.1f},{TOP:.1f} Z"
    )
    assert [mark.text for mark in curve.marks] == ["fot, 1: 100.0 ± 0.0", "fot, 2: 0.0 ± 50.0", "fot, 4: 50.0"]
