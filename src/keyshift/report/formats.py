"""How a number is written, the same in tables, sentences and figures."""

from __future__ import annotations

from keyshift.report.numbers import Row


def as_percent(value: float) -> str:
    """Two digits near the top, so that 98.96% does not read as having reached 99%."""
    return f"{value:.2%}" if 0.98 < value < 1 else f"{value:.1%}"


def as_loss(value: float) -> str:
    """Three decimals, or two significant digits for a small value."""
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def as_compact(value: float) -> str:
    """At most about five characters: 512, 66.3k, 2.41M."""
    if value < 10_000:
        return f"{value:.0f}"
    for size, suffix in ((1e3, "k"), (1e6, "M")):
        if value / size < 999.5:
            return f"{value / size:.3g}{suffix}"
    return f"{value / 1e9:.3g}G"


def as_range(steps: Row) -> str:
    """From the first to the last of the steps at which a level was reached; "" where they are the same."""
    return "" if steps["min"] == steps["max"] else f"{steps['min']:,}–{steps['max']:,}"
