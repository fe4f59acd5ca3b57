"""How a number or a time is written, the same in tables, sentences and figures."""

from __future__ import annotations

from datetime import UTC, datetime

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


def as_score(value: float) -> str:
    """A score from 0 to 1: 0.66."""
    return f"{value:.2f}"


def as_signed(value: float, decimals: int = 2) -> str:
    """With a sign: +4.18, −0.64, and 0.00 without one where nothing is left of it."""
    text = f"{value:+.{decimals}f}".replace("-", "−")
    return text if text.strip("+−0.") else text[1:]


def as_ratio(value: float) -> str:
    """Two decimals, fewer above 10, powers of ten where it is out of proportion."""
    if not 0.005 <= value < 10_000:
        return f"{value:.0e}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def as_moment(text: str) -> str:
    """An ISO 8601 time for readers; anything else as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if moment.tzinfo else text
