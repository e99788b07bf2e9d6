"""Numbers as a person writes them: percent, points, bytes, durations."""


def format_percent(share: float) -> str:
    """Return percent with one decimal and a real minus sign."""
    return f"{round(100 * share, 1) + 0.0:.1f}".replace("-", "−")


def format_points(share: float) -> str:
    """Return whole percentage points with their sign."""
    return f"{round(100 * share):+d}".replace("-", "−").replace("+0", "0")


def format_number(value: float) -> str:
    """Return three digits, or all before the point up to a million, and a real minus sign."""
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}").replace("-", "−")


def format_bytes(count: float) -> str:
    """Return bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}" if count else "0"
        count /= 1000
    return f"{count:.3g} TB"


def format_duration(seconds: float) -> str:
    """Return seconds up to two minutes, minutes up to two hours, then hours."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
