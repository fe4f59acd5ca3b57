"""How a checked number is written: digits down to its uncertainty, powers of ten where it is tiny."""

from __future__ import annotations

import math

from keyshift.theory.results import Check


def number(check: Check) -> str:
    """The value and, where it has one, its uncertainty: ``-0.9997 ± 0.0003``, ``2.2e-16``."""
    if not check.error:
        return _plain(check.value)
    first = math.floor(math.log10(check.error))
    digits = max(0, -first if check.error / 10**first >= 2 else 1 - first)
    return f"{check.value:.{digits}f} ± {check.error:.{digits}f}".replace("-", "−")


def _plain(value: float) -> str:
    if value == 0:
        return "0"
    small = abs(value) < 1e-4
    return (f"{value:.1e}" if small else f"{value:.3g}").replace("-", "−")


def uncertainty(check: Check) -> str:
    """What the uncertainty is, in words; "" without one."""
    if check.error_kind is None:
        return "" if check.draws is None else f"{check.draws:,} cases"
    return f"{check.error_kind}, {check.draws:,} draws"
