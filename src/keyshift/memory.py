"""The memory that this process can still have: the machine's, or less in a container or a scheduler's job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can be allocated before the machine runs out of memory, or a control group that this process
    is in reaches its limit, which ends the process without a word."""
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_groups(MEMBERSHIP, GROUPS)])


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """What each limit leaves, of control groups of either version (Linux) and of those around them.

    Whatever cannot be read sets no limit: to ask is a precaution, and may not be what fails.

    Args:
        membership: lines of ``number:controllers:path``, no controllers for version 2.
        groups: where control groups are mounted.
    """
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(.*)$", _text(membership), re.MULTILINE):
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limit, used = groups, "memory.max", "memory.current"
        if controllers:
            mounted, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        own = mounted / path.lstrip("/")
        # In a container the path may be the host's, and only the mounted root be there.
        for group in (each for each in (own, *own.parents) if each.is_relative_to(mounted)):
            most, taken = _text(group / limit).strip(), _text(group / used).strip()
            if most.isdecimal() and taken.isdecimal():  # "max" is no limit
                yield max(0, int(most) - int(taken) + _reclaimable(group))


def _reclaimable(group: Path) -> int:
    """Bytes of a group that files were read into, which the kernel takes back when memory is asked for."""
    counts: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat"), re.MULTILINE))
    names = ("inactive_file", "active_file")
    return sum(int(counts.get(f"total_{name}") or counts.get(name, "0")) for name in names)


def _text(file: Path) -> str:
    """What is in a file; nothing if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
