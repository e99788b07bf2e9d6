"""Numbers as the page writes them."""

import pytest

from fclmodels.report.formatting import format_bytes, format_duration, format_number, format_percent, format_points


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        (format_percent, 0.1234, "12.3"),
        (format_percent, -0.05, "−5.0"),
        (format_percent, -0.0001, "0.0"),
        (format_percent, 1.0, "100.0"),
        (format_points, 0.126, "+13"),
        (format_points, -0.126, "−13"),
        (format_points, -0.001, "0"),
        (format_points, 0.1, "+10"),
        (format_number, -0.0123456, "−0.0123"),
        (format_number, 12345.6, "12,346"),
        (format_number, 2e6, "2e+06"),
        (format_bytes, 0, "0"),
        (format_bytes, 8, "8 B"),
        (format_bytes, 999.9, "1 kB"),
        (format_bytes, 102_400, "102 kB"),
        (format_bytes, 3_456_789_012_345, "3.46 TB"),
        (format_duration, 41.26, "41.3 s"),
        (format_duration, 180, "3.0 min"),
        (format_duration, 9000, "2.5 h"),
    ],
)
def test_figures_read_as_a_person_writes_them(function, value, shown):
    assert function(value) == shown
