"""Resident memory of the process that asks (Linux: /proc)."""

from __future__ import annotations

import re
from pathlib import Path


def resident(what: str) -> int:
    """Bytes of this process's resident memory: now (VmRSS) or at its peak (VmHWM)."""
    found = re.search(rf"^{what}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    """VmHWM starts anew."""
    Path("/proc/self/clear_refs").write_text("5")
